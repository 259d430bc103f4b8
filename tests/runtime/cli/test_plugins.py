"""`flashnext plugins`: finding and checking library files. What nvcc builds is tested in tests/plugins/tensorrt."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

import pytest

from flashnext.plugins.tensorrt import library, table
from flashnext.runtime.cli.main import main


def library_file(path: Path, capabilities: str = "80 90", **said: object) -> Path:
    """A file that says what a library says, and holds nothing else."""
    info = {
        "op_version": 1,
        "op_table": table.digest(),
        "tensorrt_headers": "11.4.0",
        "capabilities": capabilities,
        "sources": library.source_digest(),
    } | said
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF".ljust(64, b"\0") + library.MARK + json.dumps(info).encode() + b"\0more")
    return path


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHNEXT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(library.VARIABLE, raising=False)


def test_check_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = library_file(tmp_path / "library.so")
    assert main(["plugins", "check", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["capabilities"] == ["80", "90"]
    assert found["is_current"]
    assert set(found) == {*(f.name for f in dataclasses.fields(library.LibraryInfo)), "is_current"}


def test_check_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", str(library_file(tmp_path / "library.so", sources="?"))]) == 0
    out = capsys.readouterr().out
    assert "sm_80, sm_90 (and later GPUs, by PTX)" in out
    assert "others than this installation has" in out


def test_path_is_the_named_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = library_file(tmp_path / "library.so")
    monkeypatch.setenv(library.VARIABLE, str(file))
    assert main(["plugins", "path", "--target", "90"]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    assert main(["plugins", "path", "--target", "75"]) == 2
    assert "is for sm_80, sm_90, not for sm_75" in capsys.readouterr().err


def test_path_is_the_newest_of_the_cache_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "cache/host-kernels/plugins"
    old = library_file(folder / "a" / library.FILE_NAME, sources="of an older installation")
    library_file(folder / "c" / library.FILE_NAME, op_table="of older ops")
    fits = library_file(folder / "b" / library.FILE_NAME, "120")
    assert main(["plugins", "path", "--target", "120", "--target", "121"]) == 0
    assert capsys.readouterr().out.strip() == str(fits)
    fits.unlink()
    assert old.exists()
    assert main(["plugins", "path"]) == 2
    assert "Build one with: flashnext plugins build" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (b"text", "does not say what it is"),
        (b"\x7fELF" + library.MARK, "does not say what it is"),
        (b"\x7fELF" + library.MARK + b"[" * 4000 + b"\0", "does not say what it is"),
        (b"\x7fELF" + library.MARK + b'{"op_version": 1}\0', "does not say what it is"),
        (b"\x7fELF" + library.MARK + b"{" + b" " * 9999 + b"}\0", "does not say what it is"),
    ],
)
def test_other_files_are_refused(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "library.so"
    file.write_bytes(content)
    assert main(["plugins", "check", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Build one with: flashnext plugins build" in error


def test_library_that_was_cut_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = library_file(tmp_path / "library.so")
    content = bytearray(file.read_bytes())
    content[40:64] = struct.pack("<Q10xHH2x", len(content), 64, 2)  # two section headers, at the end
    file.write_bytes(content + bytes(128))
    assert main(["plugins", "check", str(file)]) == 0
    file.write_bytes(content + bytes(127))
    assert main(["plugins", "check", str(file)]) == 2
    assert "is cut short" in capsys.readouterr().err


def test_library_of_other_ops_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", str(library_file(tmp_path / "library.so", op_table="0" * 16))]) == 2
    assert "(table 0000000000000000), this installation version 1" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["9", "sm90a", "hopper", "1²"])
def test_targets_are_compute_capabilities(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "build", "--target", target]) == 2
    assert "is no compute capability. Write it as 90 or 120." in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["plugins", "build", "--target", "90", "--out", str(tmp_path / "file/library.so")]) == 2
    assert "/file is no folder; make it first" in capsys.readouterr().err


def test_headers_folder_without_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "build", "--target", "90", "--headers", str(tmp_path)]) == 2
    assert "NvInferRuntime.h" in capsys.readouterr().err


def test_capabilities_that_run() -> None:
    info = library.LibraryInfo(Path("x"), "", 1, "", "", ("80", "89", "120"), "")
    runs = {c: info.runs_on(c) for c in ("75", "80", "86", "8.9", "sm_90", "100", "120", "121")}
    # 86 by sm_80's code, 121 by sm_120's; PTX only from 120 on.
    assert runs == {
        "75": False, "80": True, "86": True, "8.9": True, "sm_90": False, "100": False, "120": True, "121": True
    }  # fmt: skip
