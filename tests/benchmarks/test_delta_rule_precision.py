"""The error table of the chunked delta rule, over few tokens."""

from __future__ import annotations

import json

import delta_rule_precision
import pytest


def test_only_what_the_kernels_split_needs_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert delta_rule_precision.main(["--tokens", "200"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    exact, chosen, keys = (found[name] for name in ("S and v twice too", "the kernels' choice", "k once"))
    assert all(error["y"] < 5e-4 and error["state"] < 5e-4 for error in exact.values())  # of the chunked form itself
    assert all(error["y"] < 3e-3 and error["state"] < 5e-3 for error in chosen.values())
    assert keys["near 0.01"]["y"] > 10 * chosen["near 0.01"]["y"]
