"""The graphs of a bundle as files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from flashnext.export.errors import EngineError
from flashnext.export.graphs.manifest import GraphSpec


def read_graph(path: Path, spec: GraphSpec) -> bytes:
    """The graph's bytes, if they are those that the export wrote.

    Raises:
        EngineError: they are not.
    """
    model = path.read_bytes()
    if hashlib.sha256(model).hexdigest() != spec.sha256:
        raise EngineError(f"{path} is not the graph that its manifest describes: it was damaged or exchanged. "
                          "Export the bundle again.")  # fmt: skip
    return model
