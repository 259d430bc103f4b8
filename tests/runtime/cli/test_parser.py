"""Converters of option values."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from flashnext.runtime.cli.export import rope_scaling
from flashnext.runtime.cli.main import main
from flashnext.runtime.cli.parser import output_file, output_folder, token_ids


@pytest.mark.parametrize("text", ["1,2,3", "1 2 3", "[1, 2, 3]", " 1,2, 3 "])
def test_token_ids(text: str) -> None:
    assert token_ids(text) == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yarn:4", {"rope_type": "yarn", "factor": 4.0}),
        ('{"rope_type": "yarn", "factor": 2.0}', {"rope_type": "yarn", "factor": 2.0}),
    ],
)
def test_rope_scaling(text: str, value: dict[str, object]) -> None:
    assert rope_scaling(text) == value


def test_a_folder_for_results_is_looked_at_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("", "new"):
        assert output_folder(str(tmp_path / name)) == tmp_path / name
    for name, message in (
        ("file", f"{tmp_path}/file is a file; name a folder"),
        ("new/deep", f"{tmp_path}/new is no folder; make it first"),
        ("file/deep", f"{tmp_path}/file is no folder; make it first"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(message)):
            output_folder(str(tmp_path / name))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_for_results_is_looked_at_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "new"):
        assert output_file(str(tmp_path / name)) == tmp_path / name
    for name, message in (
        ("", f"{tmp_path} is a folder; name a file in it"),
        ("new/file", f"{tmp_path}/new is no folder; make it first"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(message)):
            output_file(str(tmp_path / name))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "words",
    [
        ["golden", "bundle", "--out", "{new}/golden"],
        ["calibrate", "checkpoint", "--text", "x", "--out", "{new}/scales.json"],
        ["calibrate", "checkpoint", "--text", "x", "--out", "scales.json", "--report", "{new}/report"],
        ["residual", "checkpoint", "--text", "x", "--report", "{new}/report"],
        ["validate", "bundle", "--report", "{new}/report.html"],
        ["bench", "bundle", "--plot", "{new}/bench.svg"],
        ["plugins", "build", "--out", "{new}/library.so"],
        ["build", "bundle", "--timing-cache", "{new}/timings.bin"],
    ],
    ids=lambda words: " ".join(words[:1] + words[-2:-1]),
)
def test_no_output_makes_the_folders_above_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(new=tmp_path / "new") for word in words]) == 2
    assert f"{tmp_path}/new is no folder; make it first, or name another place" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["4", "yarn:", "yarn:x", "[1]", "{", "{}", '{"factor": 4}', "[" * 100_000])
def test_rope_scaling_of_another_form(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="yarn:FACTOR"):
        rope_scaling(text)
