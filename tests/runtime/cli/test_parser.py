"""Converters of option values."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from flashnext.runtime.cli.export import rope_scaling
from flashnext.runtime.cli.parser import UsageError, check_folder, token_ids


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
    for name in (None, str(tmp_path), str(tmp_path / "new" / "deep")):
        check_folder("--report", name)
    for name, message in (("file", "is a file; name a folder"), ("file/new/deep", f"below the file {tmp_path}/file")):
        with pytest.raises(UsageError, match=re.escape(message)):
            check_folder("--report", str(tmp_path / name))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("text", ["4", "yarn:", "yarn:x", "[1]", "{", "{}", '{"factor": 4}', "[" * 100_000])
def test_rope_scaling_of_another_form(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="yarn:FACTOR"):
        rope_scaling(text)
