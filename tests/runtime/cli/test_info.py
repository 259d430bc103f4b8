"""`flashnext info` on a checkpoint and on a bundle."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.config import ModelConfig
from flashnext.export.graphs.io import BuildOptions
from flashnext.export.graphs.manifest import Manifest
from flashnext.export.inventory import OTHER, count_parts, slot_bytes, total
from flashnext.runtime.cli.main import main
from flashnext.runtime.cli.table import amount, amount_of_bytes
from flashnext.runtime.states import bytes_per_slot


def facts(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["info", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_parts_add_up_to_the_checkpoint(random_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(random_checkpoint)
    parts = count_parts(checkpoint.tensors)
    assert OTHER not in {p.name for p in parts}
    assert total(parts).parameters == sum(math.prod(t.shape) for t in checkpoint.tensors.values())
    assert total(parts).bytes == sum(checkpoint.array(name).nbytes for name in checkpoint.tensors)


@pytest.mark.parametrize("quantization", ["fp8", "nvfp4", "mixed"])
def test_quantization_changes_bytes_and_not_parameters(
    quantization: str, random_checkpoint: Path, tmp_path: Path
) -> None:
    small = write_random_checkpoint(tmp_path / "small", quantization=quantization)
    plain, quantized = (total(count_parts(Checkpoint.open(f).tensors)) for f in (random_checkpoint, small))
    assert quantized.parameters == plain.parameters
    assert quantized.bytes < plain.bytes


def test_checkpoint_as_text(random_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(random_checkpoint)]) == 0
    out = capsys.readouterr().out
    assert "gated residuals" in out
    assert "memory of one slot" in out


def test_checkpoint_as_json(random_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(random_checkpoint, capsys)
    assert found["kind"] == "checkpoint"
    assert found["model"]["vocabulary"] == ModelConfig.from_folder(random_checkpoint).vocab_size


def test_bundle_as_json(random_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, manifest = facts(random_bundle, capsys), Manifest.read(random_bundle)
    assert found["slot_bytes"] == bytes_per_slot(manifest)
    options = BuildOptions(manifest.window, manifest.capacity, manifest.slots, manifest.dtype)
    assert found["slot_bytes"] == slot_bytes(manifest.config, options)
    assert found["checkpoint_found"] is True


def test_bundle_as_text(random_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(random_bundle)]) == 0
    assert "slots       3 of 256 tokens" in capsys.readouterr().out


def test_memory_grows_with_the_context(random_checkpoint: Path) -> None:
    config = ModelConfig.from_folder(random_checkpoint)
    sizes = [slot_bytes(config, BuildOptions(capacity=n)) for n in (64, 128, 192)]
    assert np.diff(sizes, 2).tolist() == [0]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (512 * 1024, "512 KiB"), (3 << 40, "3.00 TiB")],
)
def test_amount_of_bytes(count: int, text: str) -> None:
    assert amount_of_bytes(count) == text


def test_amount() -> None:
    assert [amount(n) for n in (7, 1234567, 123_456_789_012)] == ["7", "1.23 M", "123 G"]
