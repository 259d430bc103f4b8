"""On ONNX Runtime, states are updated in place: same bits as with separate buffers, and no state is ever copied.

A portable graph returns every state as a new tensor. Bound to the input's own memory, a scatter becomes a write of the
rows that change; that is right only if nothing reads the old state after the write, and cheap only if no node between
makes a copy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.runtime.engines import onnxruntime_engine
from flashnext.runtime.model_runner import ModelRunner

from .configs import BASE, BY_NAME, Case
from .decode_step import SeparateBuffers
from .driver import Sequences
from .oracle import Array, Oracle
from .references import bundle_of, reference, runner_of
from .test_mtp import Drafter, pairs


@pytest.mark.parametrize("name", ["official", "ngrams_apart", "block_8"])
def test_bound_states_give_the_bits_of_separate_buffers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, decode, drafts partly kept, a ragged batch: logits and all states."""
    case = BY_NAME[name]
    bound = runner_of(case, "onnxruntime")
    monkeypatch.setattr(onnxruntime_engine, "OnnxRuntimeEngine", SeparateBuffers)
    separate = ModelRunner.open(bundle_of(case), engine="onnxruntime", threads=1)
    for state in (*bound.states.values(), *separate.states.values()):
        state.fill(0)
    assert np.array_equal(mixed_steps(bound, case), mixed_steps(separate, case))
    assert np.array_equal(draft_steps(bound, case), draft_steps(separate, case))
    nowhere = bound.manifest.slots
    for key, state in bound.states.items():
        assert np.array_equal(state[:nowhere], separate.states[key][:nowhere]), key
    separate.close()


def mixed_steps(runner: ModelRunner, case: Case) -> Array:
    a, b = (reference(case, 110, seed).tokens for seed in (0, 1))
    sequences = Sequences(runner)
    sequences.start(4, 1)
    steps: list[tuple[dict[int, list[int]], dict[int, int]]] = [
        ({4: a[:70], 1: b[:9]}, {}),
        ({1: b[9:17]}, {}),
        ({4: a[70:73], 1: b[14:22]}, {1: 5}),
        ({4: a[73:74], 1: b[14:15]}, {1: 0}),
        ({1: b[15:60], 4: a[73:103]}, {4: 0}),
        ({1: b[60:61], 4: a[103:104]}, {}),
    ]
    out = [sequences.step(tokens, keep, padding_rows=1) for tokens, keep in steps]
    return np.concatenate([logits for step in out for logits in step.values()])


def draft_steps(runner: ModelRunner, case: Case) -> Array:
    hidden, tokens = pairs(case, 110)
    drafter = Drafter(runner)
    cuts = [0, 70, 77, 78, 110]
    steps = [drafter.first({3: (hidden[i:j], tokens[i:j])})[3] for i, j in pairwise(cuts)]
    return np.concatenate([logits for logits, _, _ in steps])


# --- no copy ------------------------------

# Every state of this model is tens of megabytes for 4096 slots, so the copy of any one of them shows.
BROAD = Case(
    "broad",
    BASE
    | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 16,
        "indexer_head_dim": 64,
        "mtp_num_hidden_layers": 0,
    },
)
SLOTS = 4096


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_steps_copy_no_state(tmp_path: Path) -> None:
    """Prefill, verification and decode on half a gigabyte of states touch less memory than the smallest state takes.

    Nothing like that is true of separate buffers, where each state is copied each step: the measurement sees copies.
    """
    Oracle(BROAD).save(tmp_path / "checkpoint")
    export_bundle(tmp_path / "checkpoint", tmp_path / "bundle", ExportOptions(window=16, capacity=128, slots=SLOTS))
    bound, separate = (measure(tmp_path / "bundle", mode) for mode in ("bound", "separate"))
    sizes = bound["state_bytes"]
    assert min(sizes.values()) > 18e6
    assert sum(sizes.values()) > 400e6
    assert bound["peak_growth"] < 12e6
    assert separate["peak_growth"] > sum(sizes.values())
    assert separate["seconds"] > 10 * bound["seconds"]
    for mode, report in (("bound", bound), ("separate", separate)):
        growth, seconds = report["peak_growth"] / 1e6, report["seconds"] * 1e3
        print(f"{mode}: {growth:.1f} MB touched of {sum(sizes.values()) / 1e6:.0f}, {seconds:.1f} ms a decode step")


def measure(bundle: Path, mode: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("decode_step.py")), str(bundle), mode]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(result.stdout))
