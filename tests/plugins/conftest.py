"""The kernels for the host execution, built once per session.

$FLASHNEXT_HOST_KERNELS chooses the build for the whole suite: "plain" (the default), "address" or "thread".
"""

from __future__ import annotations

import os

import pytest

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
    return HostKernels.load(os.environ.get("FLASHNEXT_HOST_KERNELS", "plain"))
