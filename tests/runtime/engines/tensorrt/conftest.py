"""Fixtures: a machine with a GPU and TensorRT, both played (host_device.py, onnxruntime_plans.py)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import onnxruntime_plans
import pytest
from engine_folder import PLUGINS, Machine, library_info, write_engine

from flashnext.export.errors import PluginError
from flashnext.plugins import host_build
from flashnext.runtime.engines.tensorrt import opening
from flashnext.runtime.engines.tensorrt.host_device import HostDevice
from flashnext.runtime.engines.tensorrt.plan import MODULES, Library


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Gives this process a GPU; arguments are those of HostDevice. Returns the device that is opened next."""
    for kind in MODULES:
        monkeypatch.setitem(MODULES, kind, (onnxruntime_plans.__name__,))
    Library.open.cache_clear()

    def make(seed: int | None = None, **settings: int) -> HostDevice:
        device = HostDevice(seed, **settings)
        monkeypatch.setattr(onnxruntime_plans, "device", device)
        monkeypatch.setattr(opening, "new_device", lambda: device)
        return device

    yield make
    Library.open.cache_clear()


@pytest.fixture(scope="session")
def kernel_library() -> Path:
    """A library of the engine's own kernels for the played GPU: the host execution, without plugins."""
    try:
        return host_build.build("plain", [host_build.SOURCES / op / "kernel.cu" for op in ("candidates", "ngram_rows")])
    except PluginError as error:
        pytest.skip(str(error))


@pytest.fixture
def bundle(random_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the random bundle (its weights stay in the checkpoint), to build engines for."""
    return Path(shutil.copytree(random_bundle, tmp_path / "bundle"))


@pytest.fixture
def engine(bundle: Path) -> Path:
    """The same bundle, with an engine as it is built with plugins."""
    write_engine(bundle)
    return bundle


@pytest.fixture
def engine_with_kernels(bundle: Path, kernel_library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, with the plugin library at hand, whose kernels the engine launches itself."""
    monkeypatch.setattr(opening, "find_plugins", lambda *_: library_info(kernel_library))
    write_engine(bundle, plugins=PLUGINS)
    return bundle
