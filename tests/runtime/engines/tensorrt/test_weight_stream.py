"""Weights streamed to the device are the bytes that the other engines bind, whatever is stored and however cut."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnxruntime_plans import module

from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CheckpointError
from flashnext.export.graphs.manifest import Manifest, WeightSpec
from flashnext.runtime.engines.tensorrt import weight_stream
from flashnext.runtime.engines.tensorrt.host_device import HostDevice
from flashnext.runtime.engines.tensorrt.plan import Library
from flashnext.runtime.engines.tensorrt.session import Session
from flashnext.runtime.model_runner import open_checkpoint
from flashnext.runtime.weights import load_weights


def session(seed: int | None = None) -> Session:
    return Session(HostDevice(seed), Library("tensorrt", module))


@pytest.mark.parametrize(("buffer_bytes", "seed"), [(1 << 12, None), (10_000, 1), (64 << 20, None)])
@pytest.mark.parametrize("in_host", [False, True])
def test_streamed_weights_are_those_of_the_other_engines(
    random_bundle: Path, buffer_bytes: int, seed: int | None, in_host: bool
) -> None:
    manifest = Manifest.read(random_bundle)
    checkpoint = open_checkpoint(manifest)
    loaded = weight_stream.load(session(seed), manifest.weights, checkpoint, in_host, buffer_bytes)
    wanted = load_weights(manifest, checkpoint)
    assert loaded.keys() == wanted.keys()
    for name, weight in loaded.items():
        assert (weight.shape, weight.dtype) == (wanted[name].shape, wanted[name].dtype)
        np.testing.assert_array_equal(weight.copy().view(np.uint8), wanted[name].view(np.uint8))


def test_tensors_of_single_experts_are_assembled_and_converted(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "checkpoint", {"num_hidden_layers": 4}, experts="per_expert")
    checkpoint = Checkpoint.open(tmp_path / "checkpoint")
    prefix = "layers.0.mlp.experts."
    names = [n for n in checkpoint.tensors if n.startswith(prefix) and n.endswith("gate_proj.weight")]
    height, width = checkpoint.tensors[names[0]].shape
    sources = tuple(f"{prefix}{{e}}.{part}_proj.weight" for part in ("gate", "up"))
    spec = WeightSpec(f"{prefix}gate_up_proj", "float32", (len(names), 2, height, width), sources)
    loaded = weight_stream.load(session(1), [spec], checkpoint, buffer_bytes=3000)[spec.name].copy()
    for expert in range(len(names)):
        for place, part in enumerate(("gate", "up")):
            stored = checkpoint.array(f"{prefix}{expert}.{part}_proj.weight")
            assert stored.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(loaded[expert, place], stored.astype(np.float32))


def test_wrong_weights_are_refused(random_bundle: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(random_bundle)
    checkpoint = open_checkpoint(manifest)
    spec = manifest.weights[0]
    gone = WeightSpec("w", spec.dtype, spec.shape, ("no.such.tensor",))
    with pytest.raises(CheckpointError, match=r"lacks no\.such\.tensor, from which w is made"):
        weight_stream.load(session(), [gone], checkpoint)
    name = next(w.sources[0] for w in manifest.weights if len(w.sources) == 1 and "{e}" not in w.sources[0])
    scale = WeightSpec("scales", spec.dtype, checkpoint.tensors[name].shape, (name,), is_scale=True)
    with pytest.raises(CheckpointError, match=rf"{name} holds the scale -?\d.*finite numbers above zero"):
        weight_stream.load(session(), [scale], checkpoint, buffer_bytes=4096)


def test_a_file_that_shrank_is_an_error_and_nothing_hangs(
    random_checkpoint: Path, random_bundle: Path, tmp_path: Path
) -> None:
    manifest = Manifest.read(random_bundle)
    moved = Path(shutil.copytree(random_checkpoint, tmp_path / "checkpoint"))
    checkpoint = open_checkpoint(manifest, moved)
    for file in moved.glob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="ends at byte"):
        weight_stream.load(session(), manifest.weights, checkpoint, buffer_bytes=4096)
