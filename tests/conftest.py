"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` fills once per test run, whichever of pytest-xdist's workers comes first."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        done = folder.with_name(f"{name}.done")
        if not done.exists():
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`make_once` for folders that one file of tests alone needs."""
    return lambda name, make: make_once(tmp_path_factory, name, make)


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default small random checkpoint (BF16, fused experts, MTP, tokenizer). Read it, never write into it."""
    return make_once(tmp_path_factory, "random_checkpoint", write_random_checkpoint)


@pytest.fixture(scope="session")
def random_bundle(tmp_path_factory: pytest.TempPathFactory, random_checkpoint: Path) -> Path:
    """The random checkpoint, exported with small slots. Read it, never write into it."""
    from flashnext.export.graphs.bundle import ExportOptions, export_bundle

    options = ExportOptions(capacity=256, slots=3)
    return make_once(
        tmp_path_factory, "random_bundle", lambda folder: export_bundle(random_checkpoint, folder, options)
    )


@pytest.fixture(scope="session")
def quantized_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in BF16, FP8 and NVFP4, residual and caches in FP8. Read it, never write into it."""
    from flashnext.export.graphs.bundle import ExportOptions, export_bundle

    options = ExportOptions(capacity=64, slots=2, residual_form="fp8-dynamic", kv_cache_dtype="fp8")
    checkpoint = make_once(
        tmp_path_factory, "quantized_checkpoint", lambda folder: write_random_checkpoint(folder, quantization="mixed")
    )
    return make_once(tmp_path_factory, "quantized_bundle", lambda folder: export_bundle(checkpoint, folder, options))


@pytest.fixture(scope="session")
def small_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained `models/small`, exported. Read it, never write into it."""
    from flashnext.export.graphs.bundle import ExportOptions, export_bundle

    options = ExportOptions(capacity=512, slots=2, dtype="float32")
    small = Path(__file__).parents[1] / "models/small"
    return make_once(tmp_path_factory, "small_bundle", lambda folder: export_bundle(small, folder, options))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built once."""
    return next(make_once(tmp_path_factory, "wheel", _build_wheel).glob("*.whl"))


def _build_wheel(folder: Path) -> None:
    script = Path(__file__).parents[1] / "scripts/build_wheel"
    subprocess.run([script, folder], check=True, env={**os.environ, "PYTHON": sys.executable})
