"""The runtime and its command line start without PyTorch, which takes seconds and a gigabyte to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "onnx", "onnxscript", "polygraphy", "transformers")


@pytest.mark.parametrize("module", ["flashnext.runtime", "flashnext.export", "flashnext.export.graphs.manifest"])
def test_module_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.split() == []
