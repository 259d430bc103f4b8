"""The kernels, built once per session.

$FLASHNEXT_HOST_KERNELS chooses the build for the whole suite: "plain" (the default), "address" or "thread" for the host
execution, "device" for the GPU at hand.
"""

from __future__ import annotations

import os

import pytest
from on_device import OnDevice

from flashnext.export.errors import PluginError
from flashnext.plugins.host_build import compiler
from flashnext.plugins.host_library import HostKernels


@pytest.fixture(scope="session", autouse=True)
def _host_compiler() -> None:
    try:
        compiler()
    except PluginError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kernels(_host_compiler: None) -> HostKernels:
    kind = os.environ.get("FLASHNEXT_HOST_KERNELS", "plain")
    return OnDevice() if kind == "device" else HostKernels.load(kind)
