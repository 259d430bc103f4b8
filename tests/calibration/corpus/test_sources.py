"""Archives of the corpus's sources are unpacked whole, and nowhere else."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from flashnext.calibration.corpus.sources import CorpusError, unpack


def archived(archive: Path, name: str) -> Path:
    archive.parent.mkdir()
    content = b"text"
    member = tarfile.TarInfo(name)
    member.size = len(content)
    with tarfile.open(archive, "w:gz") as file:
        file.addfile(member, io.BytesIO(content))
    return archive


def test_archive_of_pypi_is_unpacked(tmp_path: Path) -> None:
    unpack(archived(tmp_path / "source/a.tar.gz", "package/text.txt"))
    assert (tmp_path / "source/files/package/text.txt").read_bytes() == b"text"


def test_member_outside_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="tar"):
        unpack(archived(tmp_path / "source/a.tar.gz", "../../outside.txt"))
    assert not (tmp_path / "outside.txt").exists()
    assert not (tmp_path / "source/files").exists()


def test_damaged_archive_is_refused(tmp_path: Path) -> None:
    archive = archived(tmp_path / "source/a.tar.gz", "text.txt")
    archive.write_bytes(archive.read_bytes()[:40])
    with pytest.raises(CorpusError, match="tar"):
        unpack(archive)
    assert not (tmp_path / "source/files").exists()
