"""The wheel holds every source folder and nothing else, and works from a folder of its own.

An editable installation hides a subpackage that `pyproject.toml` forgets, so the wheel itself is built and looked at.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("export", "plugins", "builder", "runtime", "calibration")
SUFFIXES = (".py", ".h", ".cpp", ".cu")
DATA = ("py.typed", "CMakeLists.txt")


def test_wheel_holds_the_sources_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    held = {name.removeprefix("flashnext/") for name in names if name.startswith("flashnext/")}
    files = [f for name in SOURCES for f in (ROOT / name).rglob("*") if f.suffix in SUFFIXES or f.name in DATA]
    assert held == {f.relative_to(ROOT).as_posix() for f in files}
    assert {name.split("/")[0] for name in names if name.split("/")[0] != "flashnext"} == {
        f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"
    }


def test_every_module_of_the_wheel_imports_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import importlib, pathlib, sys\n"
        "site = pathlib.Path(sys.argv[1])\n"
        "for file in sorted(site.glob('flashnext/**/*.py')):\n"
        "    parts = file.relative_to(site).with_suffix('').parts\n"
        "    module = importlib.import_module('.'.join(p for p in parts if p != '__init__'))\n"
        "    assert pathlib.Path(module.__file__).is_relative_to(site), module.__file__\n"
    )
    # -S -E leave the editable installation's finder out; the installed packages are named instead.
    paths = [str(site), *(p for p in sys.path if p.endswith("site-packages"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-S", "-c", code, site], check=True, cwd=tmp_path, env=environment)


def test_wheel_offers_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    entry_points = next(n for n in archive.namelist() if n.endswith("entry_points.txt"))
    assert "flashnext = flashnext.runtime.cli.main:main" in archive.read(entry_points).decode()
