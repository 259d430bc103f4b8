"""The plugin library over the host execution of the kernels, built once."""

from __future__ import annotations

import pytest

from flashnext.export.errors import PluginError
from flashnext.plugins.tensorrt import library
from flashnext.plugins.tensorrt.headers import Headers, find_headers


@pytest.fixture(scope="session")
def headers() -> Headers:
    try:
        return find_headers()
    except PluginError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def host_plugins(headers: Headers) -> library.LibraryInfo:
    return library.build_host(headers.folder)
