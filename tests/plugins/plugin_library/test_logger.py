"""Messages reach TensorRT's logger, whose layout differs between TensorRT 10 and 11, whatever the headers were."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from flashnext.plugins import host_build
from flashnext.plugins.tensorrt.headers import Headers
from flashnext.plugins.tensorrt.library import FOLDER, LibraryInfo

SOURCE = Path(__file__).parent / "fake_tensorrt/fake.cpp"
NOBODY, FINDER, LIBRARY = range(3)


@pytest.mark.parametrize("major", [10, 11])
def test_logger_of_either_version(
    major: int, headers: Headers, host_plugins: LibraryInfo, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [*host_build.COMMON, f"-DMAJOR={major}", "-O1", f"-I{FOLDER / 'host'}", "-isystem", str(headers.folder)]
    fake = ctypes.CDLL(str(host_build.build_from([(SOURCE, [*flags, "-fvisibility=default"])], "plain", shared=True,
                                                 name=f"fake-tensorrt-{major}")))  # fmt: skip
    plugins = ctypes.CDLL(str(host_plugins.path))
    fake.provoke.restype = ctypes.c_char_p

    def logged(where: int) -> str:
        text: bytes = fake.provoke(plugins.setLoggerFinder, plugins.getCreators, where)
        return text.decode()

    reason = "flashnext: GatedResidual: 'layer' cannot be created: the creator was given no valid collection of fields"
    assert logged(FINDER) == f"1 {reason}"
    assert logged(LIBRARY) == f"1 {reason}"
    assert capfd.readouterr().err == ""
    assert logged(NOBODY) == ""
    assert capfd.readouterr().err.strip() == reason
    plugins.setLoggerFinder(None)
