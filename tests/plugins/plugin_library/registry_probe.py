"""Loads a plugin library into the real registry of TensorRT and tries its creators; a process of its own.

    python registry_probe.py LIBRARY REQUESTS.json       # prints one JSON object

A request is {"op", "phase", "fields": [[name, type, value], …]}; its result says whether there is a plugin, and what
was logged about it. Without a GPU there is no builder and no runtime, and so TensorRT has no logger: messages are on
standard error, which goes to a file here.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt_lean_bindings as trt

DTYPES = {"INT32": np.int32, "INT64": np.int64, "FLOAT32": np.float32, "FLOAT64": np.float64, "INT8": np.int8}


class Errors:
    """Standard error, whoever writes to it."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115 (for the process's whole life)
        os.dup2(self._file.fileno(), 2)

    def take(self) -> list[str]:
        """What was written since the last time."""
        self._file.seek(0)
        lines = self._file.read().splitlines()
        self._file.seek(0)
        self._file.truncate()
        return lines


def content(kind: str, value: Any) -> Any:
    """The data of a field, which does not keep it; text gets the terminating zero that the ONNX parser gives it."""
    if kind == "CHAR":
        return np.frombuffer(value.encode() + b"\0", np.int8)
    return np.atleast_1d(np.array(value, DTYPES[kind]))


def field(name: str, kind: str, data: Any) -> Any:
    return trt.PluginField(name, data, getattr(trt.PluginFieldType, kind))


def create(registry: Any, errors: Errors, request: dict[str, Any]) -> dict[str, Any]:
    """Ask a creator for a plugin."""
    creator = registry.get_creator(request["op"], request.get("version", "1"), request.get("namespace", ""))
    data = [content(kind, value) for _, kind, value in request["fields"]]
    fields = [field(name, kind, d) for (name, kind, _), d in zip(request["fields"], data, strict=True)]
    phase = getattr(trt.TensorRTPhase, request["phase"])
    plugin = creator.create_plugin("probe", trt.PluginFieldCollection(fields), phase)
    return {"made": plugin is not None, "log": errors.take()}


def main() -> None:
    """Print what the registry has, and the results of the requests."""
    library, requests = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    errors = Errors()
    registry = trt.get_plugin_registry()
    before = {(c.name, c.plugin_version, c.plugin_namespace) for c in registry.all_creators}
    handle = registry.load_library(library)
    creators = [c for c in registry.all_creators if (c.name, c.plugin_version, c.plugin_namespace) not in before]
    found = {
        "tensorrt": trt.__version__,
        "creators": [
            {
                "name": c.name,
                "version": c.plugin_version,
                "namespace": c.plugin_namespace,
                "fields": [[f.name, f.type.name] for f in c.field_names],
            }
            for c in creators
        ],
        "results": [create(registry, errors, r) for r in requests],
    }
    del creators
    registry.deregister_library(handle)
    found["left"] = len([c for c in registry.all_creators if c.name in {x["name"] for x in found["creators"]}])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
