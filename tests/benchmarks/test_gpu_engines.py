"""Without TensorRT the stage says so and fails nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpu_engines
import pytest

from flashnext.runtime.engines.tensorrt.plan import MODULES, Library


def test_without_tensorrt_the_stage_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in MODULES["tensorrt"]:
        monkeypatch.setitem(sys.modules, name, None)
    Library.open.cache_clear()
    assert gpu_engines.main(["--output", str(tmp_path / "facts.json")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["left_out"].startswith("The tensorrt engine needs TensorRT, which is not installed")
    assert json.loads((tmp_path / "facts.json").read_text()) == facts
