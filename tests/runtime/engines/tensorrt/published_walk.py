"""Walks everything that the engine calls of TensorRT 11 against the signatures that its bindings publish.

The published API is that of the builder's tests (published_api.py), whose results are made here such that the walk gets
everywhere: a plan with one tensor, a profile, values of the real enumerations.

    python tests/runtime/engines/tensorrt/published_walk.py      # prints the version and the calls, one a line
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "builder"))

import published_api
from published_api import Module, import_bindings

from flashnext.runtime.engines.tensorrt.device import Memory
from flashnext.runtime.engines.tensorrt.plan import Library


class RuntimeModule(Module):
    """The module with results that lead on."""

    def _result(self, annotation: str) -> Any:
        if annotation == "int":
            return 1
        kind = None if "tensorrt." not in annotation else self._class(annotation.rpartition("tensorrt.")[2])
        if kind is not None and hasattr(kind, "__members__"):
            return next(iter(kind.__members__.values()))
        return (1, 1) if annotation.endswith(".Dims") else super()._result(annotation)


def main() -> None:
    published_api.PLAIN |= {"tuple": tuple, "list": list}
    with tempfile.TemporaryDirectory() as folder:
        module = RuntimeModule(import_bindings(Path(folder)))
        plan = Library("tensorrt", module).load(b"plan", "body.plan")
        (name,) = plan.tensors()
        assert (plan.profiles, plan.scratch_bytes(), plan.layers(), plan.host_tensors()) == (1, 1, "", [])
        context = plan.context(0, 2)
        context.set_scratch(Memory(256, 1))
        context.set_shape(name, (1, 1))
        context.set_address(name, 256)
        context.execute(2)
        assert context.capturable(2)
    print(module.__version__, *module.calls, sep="\n")


if __name__ == "__main__":
    main()
