"""The README is true: paths, links and command lines exist, the map is complete, and the Python example runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from flashnext.runtime.cli.main import parsers

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCES = ("export", "plugins", "builder", "runtime", "calibration")
SUFFIXES = (".py", ".h", ".cpp", ".cu")
MAP = re.findall(r"^\| `([^`]+)` \| .+ \|$", README, re.MULTILINE)


@pytest.mark.parametrize("path", MAP)
def test_path_of_the_map_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_source_folder_is_in_the_map() -> None:
    assert len(MAP) == len(set(MAP)), "a path that the README's map names twice"
    files = [file for name in SOURCES for file in ROOT.glob(f"{name}/**/*") if file.suffix in SUFFIXES]
    folders = {file.parent.relative_to(ROOT).as_posix() + "/" for file in files}
    assert folders - set(MAP) == set(), "folders that the README's map does not name"


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#:]+)\)", README))
def test_link_leads_to_a_file(target: str) -> None:
    assert (ROOT / target).is_file()


@pytest.mark.parametrize("script", sorted(set(re.findall(r"\./(scripts/\w+)", README))))
def test_script_is_executable(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o100


def blocks(language: str) -> list[str]:
    """The README's fenced code of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMAND_LINES = [
    line for block in blocks("console") for line in re.findall(r"^\$ flashnext (.+)$", block, re.MULTILINE)
]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_command_line_is_understood(line: str) -> None:
    parser, _ = parsers()
    arguments, leftovers = parser.parse_known_args(shlex.split(line))
    assert arguments.command
    assert leftovers == []


def test_python_example_runs(random_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bundle").symlink_to(random_bundle)
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {})
