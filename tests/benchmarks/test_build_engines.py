"""Layers of the official sizes: real engines without a GPU, no custom node lost; and what lies between the plugins."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="needs tensorrt-rtx"),
]
SCRIPT = Path(__file__).parents[2] / "benchmarks/build_engines.py"


def plans(*words: str) -> list[dict[str, Any]]:
    run = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])["plans"]
    return found


def test_layers_of_official_sizes_become_engines() -> None:
    found = plans("--cases", "gdn", "qsa")
    assert [(p["case"], p["plan"]) for p in found] == [
        (case, f"body.{step}.plan") for case in ("gdn", "qsa") for step in ("decode", "prefill")
    ]
    for plan in found:
        assert (plan["custom_nodes"], plan["lost"]) == (5, [])
        assert plan["peak_bytes"] < plan["estimated_bytes"]


def test_their_plain_parts_can_be_built() -> None:
    assert [p["case"] for p in plans("--cases", "gdn", "qsa", "--plain-parts")] == ["gdn", "qsa"]
