"""Numbers that a validation cannot use are refused before anything is opened, as on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashnext.export.errors import RequestError
from flashnext.runtime.golden.write import GoldenOptions, write_golden
from flashnext.runtime.validation.validator import validate

WRONG: list[dict[str, Any]] = [
    {"threads": 0},
    {"threads": 1025},
    {"threads": True},
    {"threads": "2"},
    {"tokens": -1},
    {"tokens": True},
    {"seed": -1},
    {"seed": 0.5},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_numbers_out_of_range(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """The bundle, which is not there, is not looked for."""
    with pytest.raises(RequestError, match=f"{next(iter(wrong))} = .* must be a whole number"):
        validate(tmp_path / "nothing", **wrong)


def test_golden_files_take_the_same_threads(random_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"threads = 1025 must be a whole number from 1 to 1,024"):
        write_golden(random_bundle, tmp_path / "golden", GoldenOptions(threads=1025))
