"""The stage of the execution providers runs on the CPU's, and leaves out what is not here."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_providers
import onnxruntime as ort
import pytest


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="there is a GPU's provider here")
def test_providers_that_are_not_here_are_left_out(
    random_bundle: Path, random_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exported(_: Path, folder: Path, __: object) -> None:
        folder.symlink_to(random_bundle)

    monkeypatch.setattr(gpu_providers, "export_bundle", exported)
    out = tmp_path / "facts.json"
    names = ["--provider", "CUDAExecutionProvider", "--provider", "CPUExecutionProvider"]
    assert gpu_providers.main([*names, "--output", str(out)]) == 0
    facts = json.loads(out.read_text())
    assert "is not available here" in facts["CUDAExecutionProvider"]["left_out"]
    found = facts["CPUExecutionProvider"]
    assert found["differing_outputs"] == found["differing_texts"] == 0
    assert found["outputs"] > 100
    assert 0 < found["largest_error"] < 1e-4


def test_what_fails_or_differs_is_told() -> None:
    good = {"a": {"left_out": "…"}, "b": {"differing_outputs": 0, "differing_texts": 0}}
    assert gpu_providers.passed(good)
    assert not gpu_providers.passed({**good, "c": {"failed": "…"}})
    assert not gpu_providers.passed({**good, "c": {"differing_outputs": 3}})
