"""The check of a new engine: a right one passes and says what was compared, a wrong one is refused with its graph."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_folder import Machine, write_engine
from onnxruntime_plans import IExecutionContext

from flashnext.export.errors import EngineError
from flashnext.runtime.engines.tensorrt import golden_prompt
from flashnext.runtime.validation.validator import validate


@pytest.mark.parametrize("kind", ["tensorrt", "tensorrt-rtx"])
def test_a_right_engine_passes(kind: str, bundle: Path, machine: Machine) -> None:
    folder = write_engine(bundle, kind)
    machine(4)
    check = golden_prompt.find_check(bundle)
    assert check is not None
    said = check(bundle, folder)
    assert "outputs compared with torch:reference, seed 0; largest error" in said


def test_a_wrong_engine_is_refused(bundle: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value in a thousand of what the body hands on is a hundredth too large."""
    folder = write_engine(bundle)
    right = IExecutionContext._work

    def wrong(context: Any, device: Any, addresses: dict[str, int], sizes: dict[str, int], scratch: int) -> None:
        from onnxruntime_plans import view

        right(context, device, addresses, sizes, scratch)
        if "logits" in addresses and "slots" in addresses and context._engine.spec.file == "body.onnx":
            spec = next(t for t in context._engine.spec.outputs if t.name == "hidden")
            shape = [sizes[d] if isinstance(d, str) else d for d in spec.shape]
            values = view(addresses["hidden"], shape, np.dtype(np.float32)).reshape(-1)
            values[::1000] += np.float32(0.01) * values.std()

    monkeypatch.setattr(IExecutionContext, "_work", wrong)
    machine()
    with pytest.raises(
        EngineError, match=r"is wrong: it differs from onnxruntime by up to .* hidden in body, tolerance"
    ):
        golden_prompt.golden_check(bundle, folder, "onnxruntime")


def test_without_a_reference_there_is_no_check(random_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"polygraphy", "onnxruntime"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in present else None)
    check = golden_prompt.find_check(random_bundle)
    assert check is not None
    assert check.keywords["reference"] == "onnxruntime"  # type: ignore[attr-defined]
    present.remove("polygraphy")
    assert golden_prompt.find_check(random_bundle) is None


def test_a_plan_shows_nothing_of_its_inside(engine: Path, machine: Machine) -> None:
    machine()
    with pytest.raises(EngineError, match="A plan of tensorrt does not show what happens inside"):
        validate(engine, "tensorrt", per_layer=True)
