"""The README's map of the code: every path in it exists, and every folder of the package is in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCES = ("export", "plugins", "runtime", "calibration")
MAP = re.findall(r"^\| `([^`]+)` \| .+ \|$", README, re.MULTILINE)


@pytest.mark.parametrize("path", MAP)
def test_path_of_the_map_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_source_folder_is_in_the_map() -> None:
    folders = {
        file.parent.relative_to(ROOT).as_posix() + "/" for name in SOURCES for file in ROOT.glob(f"{name}/**/*.py")
    }
    assert folders - set(MAP) == set(), "folders that the README's map does not name"


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_link_leads_to_a_file(target: str) -> None:
    assert (ROOT / target).is_file()


@pytest.mark.parametrize("script", sorted(set(re.findall(r"\./(scripts/\w+)", README))))
def test_script_is_executable(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o100
