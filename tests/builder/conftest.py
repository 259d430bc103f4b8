"""A bundle that is built in a second: one layer, no n-grams, no draft layer."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.graphs.bundle import ExportOptions, export_bundle

HAS_RTX = importlib.util.find_spec("tensorrt_rtx_bindings") is not None
needs_rtx = pytest.mark.skipif(not HAS_RTX, reason="needs tensorrt-rtx")


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read it, never write into it."""
    folder = tmp_path_factory.mktemp("tiny")
    fields = {"ple_layer_ids": [], "num_experts": 4, "num_experts_per_tok": 2}
    write_random_checkpoint(folder / "checkpoint", fields, layers=1, mtp=False, tokenizer=False)
    export_bundle(folder / "checkpoint", folder / "bundle", ExportOptions(window=2, capacity=32, slots=2))
    return folder / "bundle"


@pytest.fixture
def bundle_copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of `tiny_bundle` to break, or to build into."""
    copy = tmp_path / "bundle"
    copy.mkdir()
    for file in tiny_bundle.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture
def gpu(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an nvidia-smi that answers with a line in front of the PATH ("": it fails, as without a GPU)."""

    def answer(line: str) -> None:
        folder = tmp_path_factory.mktemp("bin")
        script = f"#!/bin/sh\necho {json.dumps(line)}\n" if line else "#!/bin/sh\nexit 9\n"
        (folder / "nvidia-smi").write_text(script)
        (folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    answer("")
    return answer
