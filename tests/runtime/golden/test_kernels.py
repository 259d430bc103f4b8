"""The kernels against golden files, as plugins meet them: states of every step are given, and compared afterwards.

The host execution of the kernels plays the GPU, and the script that lies in the folder judges.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from polygraphy.comparator import RunResults
from polygraphy.json import load_json

from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.engines import open_engine
from flashnext.runtime.golden.folder import file_of
from flashnext.runtime.golden.write import Written
from flashnext.runtime.model_runner import open_checkpoint
from flashnext.runtime.states import allocate_states
from flashnext.runtime.weights import load_weights


def script_of(folder: Path) -> Any:
    """The folder's compare.py."""
    spec = importlib.util.spec_from_file_location("compare", folder / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_kernels_give_the_saved_outputs_and_states(written: Written, random_bundle: Path) -> None:
    manifest = Manifest.read(random_bundle)
    checkpoint = open_checkpoint(manifest)
    weights, states = load_weights(manifest, checkpoint), allocate_states(manifest)
    script, steps = script_of(written.folder), 0
    for graph, spec in manifest.graphs.items():
        engine = open_engine("torch:host", graph, random_bundle, manifest, checkpoint, watch=True)
        wanted = {t.name for t in engine.spec.inputs}
        engine.bind({name: array for name, array in {**weights, **states}.items() if name in wanted})
        for number in range(len(list((written.folder / graph / "inputs").iterdir()))):
            (inputs,) = load_json(str(file_of(written.folder, graph, "inputs", number)))
            for name in spec.states:
                states[name][...] = inputs.pop(name)
            found = engine.run(inputs) | {out: states[name] for name, out in spec.states.items()}
            saved = RunResults.load(str(file_of(written.folder, graph, "outputs", number)))[0][1][0]
            verdict = script.compare_outputs(saved, found)
            assert set(verdict) == set(found)
            assert all(verdict.values()), [name for name, passed in verdict.items() if not passed]
            steps += 1
    assert steps == 13
