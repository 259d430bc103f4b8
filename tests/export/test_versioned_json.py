"""Files of this project's own: of this version, or one sentence with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flashnext.export.errors import GoldenError
from flashnext.export.versioned_json import VersionedJson

FILE = VersionedJson("samples", 3, 100, GoldenError, "Draw them again.")


@pytest.mark.parametrize("version", ["2", "3.0", "true", '"3"', "null", "[3]"])
def test_another_version(tmp_path: Path, version: str) -> None:
    (tmp_path / "file").write_text(f'{{"format_version": {version}}}')
    with pytest.raises(GoldenError, match=r"has format version .*, this release reads 3\. Draw them again\."):
        FILE.read(tmp_path / "file")


@pytest.mark.parametrize("content", ["", "[3]", "{", '{"format_version": 3}' + " " * 100])
def test_what_is_no_such_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(GoldenError):
        FILE.read(tmp_path / "file")


@pytest.mark.parametrize(
    "take", [lambda raw: raw["lacks"], lambda raw: int(raw["x"]), lambda raw: raw["x"].y, lambda raw: len(raw["n"])]
)
def test_damage(tmp_path: Path, take: Callable[..., object]) -> None:
    (tmp_path / "file").write_text('{"format_version": 3, "x": "\\\\n", "n": 1}')
    raw = FILE.read(tmp_path / "file")
    with (
        pytest.raises(GoldenError, match=r"file is damaged \(.*\)\. Draw them again\.") as caught,
        FILE.parsing(Path("file")),
    ):
        take(raw)
    assert "\n" not in str(caught.value)
