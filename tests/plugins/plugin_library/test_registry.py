"""The plugin library in the real registry of TensorRT 11.4 (the lean runtime's wheels): creators, fields, refusals.

On the host execution of the kernels here; test_device_library.py puts what nvcc builds into the same registry. For the
headers of another TensorRT: TENSORRT_INCLUDE_DIR=… pytest tests/plugins/plugin_library
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashnext.export.ops import schema
from flashnext.plugins.tensorrt import library, table

pytest.importorskip("tensorrt_lean_bindings")

PROBE = Path(__file__).with_name("registry_probe.py")
KINDS = {"int": "INT32", "float": "FLOAT32", "string": "CHAR"}
VALUES: dict[str, Any] = {"gate": "silu", "eps": 1e-6, "rope_scale": 1.0, "normalize": 1}
FIELDS = [["form", "CHAR"], ["aliased", "INT32"]]
TABLE = [["op_version", "INT32", schema.VERSION], ["op_table", "CHAR", table.digest()]]


def fields(op: schema.Op, form: str) -> list[list[Any]]:
    """What TensorRT's ONNX parser sends for a node: the attributes that the creator lists and the node has."""
    return [["form", "CHAR", form], *([a.name, KINDS[a.kind], VALUES.get(a.name, 2)] for a in op.attributes)]


def without(given: list[list[Any]], name: str) -> list[list[Any]]:
    return [f for f in given if f[0] != name]


def probe(path: Path, requests: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Run the probe in a process of its own."""
    file = folder / "requests.json"
    file.write_text(json.dumps(requests))
    run = subprocess.run([sys.executable, PROBE, path, file], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def requests_that_succeed() -> list[dict[str, Any]]:
    built = [
        {"op": op.name, "phase": "BUILD", "fields": fields(op, form.name)} for op in schema.OPS for form in op.forms
    ]
    planned = [{**r, "phase": "RUNTIME", "fields": [*r["fields"], *TABLE]} for r in built]
    aliased = [{**r, "fields": [*r["fields"], ["aliased", "INT32", 1]]} for r in built]
    gdn = schema.op("GatedDeltaNet")
    wide = [["form", "CHAR", "default"], ["eps", "FLOAT64", 1e-6], ["key_heads", "INT64", 16], ["gate", "CHAR", "silu"]]
    return [*built, *planned, *aliased, {"op": gdn.name, "phase": "BUILD", "fields": wide}]


def refusals() -> list[tuple[str, dict[str, Any], str]]:
    """Name, request, and a part of the reason that is to be logged."""
    gdn = fields(schema.op("GatedDeltaNet"), "default")
    moe = fields(schema.op("SparseMoE"), "plain")

    def ask(given: list[list[Any]], phase: str = "BUILD", op: str = "GatedDeltaNet") -> dict[str, Any]:
        return {"op": op, "phase": phase, "fields": given}

    missing = [
        (f"{op.name} without {name}", ask(without(given, name), op=op.name), f"attributes are missing: {name}")
        for op in schema.OPS
        for given in [fields(op, op.forms[0].name)]
        for name, _, _ in given
    ]
    return [
        *missing,
        ("nothing", ask([]), "attributes are missing: form, eps, key_heads, gate"),
        ("unknown form", ask([["form", "CHAR", "middle"], *gdn[1:]]), "'form' must be one of default, found 'middle'"),
        ("form of another op", ask([["form", "CHAR", "nvfp8"], *moe[1:]], op="SparseMoE"), "plain, fp8_block, nvfp4"),
        ("form as number", ask([["form", "INT32", 1], *gdn[1:]]), "'form' must be CHARs"),
        ("eps as int", ask([*without(gdn, "eps"), ["eps", "INT32", 1]]), "'eps' must be one FLOAT32 or FLOAT64"),
        ("eps twice", ask([*gdn, ["eps", "FLOAT32", 1.0]]), "'eps' comes twice"),
        ("two eps", ask([*without(gdn, "eps"), ["eps", "FLOAT32", [1, 2]]]), "found field type 1 with 2 entries"),
        ("eps NaN", ask([*without(gdn, "eps"), ["eps", "FLOAT32", float("nan")]]), "'eps' is not finite"),
        ("heads as float", ask([*without(gdn, "key_heads"), ["key_heads", "FLOAT32", 2]]), "one INT32 or INT64"),
        ("no heads", ask([*without(gdn, "key_heads"), ["key_heads", "INT32", 0]]), "must be positive, found 0"),
        ("negative", ask([*without(gdn, "key_heads"), ["key_heads", "INT32", -4]]), "from 0 to 2147483647, found -4"),
        ("too large", ask([*without(gdn, "key_heads"), ["key_heads", "INT64", 1 << 40]]), "found 1099511627776"),
        ("heads as bytes", ask([*without(gdn, "key_heads"), ["key_heads", "INT8", 2]]), "found field type 3"),
        ("unknown gate", ask([*without(gdn, "gate"), ["gate", "CHAR", "relu"]]), "one of sigmoid, silu, found 'relu'"),
        ("long text", ask([*without(gdn, "gate"), ["gate", "CHAR", "s" * 999]]), "'gate' must be CHARs"),
        ("unknown attribute", ask([*gdn, ["colour", "INT32", 1]]), "no attribute 'colour'"),
        ("aliased twice over", ask([*gdn, ["aliased", "INT32", 2]]), "'aliased' must be 0 or 1, found 2"),
        ("plan without table", ask(gdn, "RUNTIME"), "attributes are missing: op_version, op_table"),
        ("plan of other ops", ask([*gdn, TABLE[0], ["op_table", "CHAR", "0"]], "RUNTIME"), "Build the engine again"),
        ("plan of old ops", ask([*gdn, ["op_version", "INT32", 0], TABLE[1]], "RUNTIME"), "was built with version 0"),
    ]  # fmt: skip


def check_registry(path: Path, folder: Path) -> dict[str, Any]:
    """Creators, plugins and refusals of one library."""
    good, bad = requests_that_succeed(), refusals()
    found = probe(path, [*good, *(request for _, request, _ in bad)], folder)
    assert [c["name"] for c in found["creators"]] == [op.name for op in schema.OPS]
    for creator, op in zip(found["creators"], schema.OPS, strict=True):
        assert (creator["version"], creator["namespace"]) == (schema.PLUGIN_VERSION, schema.PLUGIN_NAMESPACE)
        assert creator["fields"] == [*FIELDS, *([a.name, KINDS[a.kind]] for a in op.attributes)]
    for request, result in zip(good, found["results"], strict=False):
        assert result == {"made": True, "log": []}, request
    for (name, request, reason), result in zip(bad, found["results"][len(good) :], strict=True):
        assert not result["made"], name
        # TensorRT itself may add a line.
        line = next((x for x in result["log"] if x.startswith(f"flashnext: {request['op']}: ")), "")
        assert "'probe' cannot be created" in line, (name, result["log"])
        assert reason in line, (name, line)
    assert found["left"] == 0
    return found


def test_host_library(host_plugins: library.LibraryInfo, tmp_path: Path) -> None:
    found = check_registry(host_plugins.path, tmp_path)
    assert found["tensorrt"].startswith("11.")
