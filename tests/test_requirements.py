"""Pinned versions: every direct dependency has one, it satisfies pyproject.toml, and any index can serve it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = [
    line
    for line in (ROOT / "requirements/constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
INSTALLED_EXTRAS = ("export", "cpu", "validate", "dev")
DIRECT = [*PROJECT["dependencies"], *(d for extra in INSTALLED_EXTRAS for d in PROJECT["optional-dependencies"][extra])]


@pytest.mark.parametrize("pin", PINS)
def test_pin_is_a_plain_version(pin: str) -> None:
    """No address, and no local version such as +cpu, which only some indexes serve."""
    assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin)


@pytest.mark.parametrize("requirement", DIRECT)
def test_direct_dependency_is_pinned_to_what_it_admits(requirement: str) -> None:
    wanted = Requirement(requirement)
    pins = dict(pin.split("==") for pin in PINS)
    assert wanted.specifier.contains(Version(pins[canonicalize_name(wanted.name)]))


def test_set_up_installs_these_extras() -> None:
    assert f'".[{",".join(INSTALLED_EXTRAS)}]"' in (ROOT / "scripts/setup").read_text(encoding="utf-8")
