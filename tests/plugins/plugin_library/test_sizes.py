"""Workspace of profiles, and dtypes that plugins accept, against the kernels themselves."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import plugin_harness as harness
import pytest
from plugin_cases import KINDS, PluginCase, Step, Tensor, plugin_fields

from flashnext.export.ops import schema
from flashnext.plugins.host_library import HostKernels
from flashnext.plugins.kernel_library import REJECTED
from flashnext.plugins.params import FORMATS
from flashnext.plugins.tensorrt import table
from flashnext.plugins.tensorrt.headers import Headers

OFFICIAL: Mapping[str, Mapping[str, int]] = {
    "GatedResidual": {"n": 4, "H": 2560, "rank": 320},
    "NgramInjection": {"n": 4, "H": 2560, "width": 4, "P": 5, "Q": 17},
    "GatedDeltaNet": {"K": 16, "V": 48, "Dk": 128, "Dv": 128, "width": 4, "P": 5, "Q": 11, "W": 8},
    "SparseAttention": {
        "Nq": 24, "Nkv": 2, "D": 256, "Ni": 4, "Di": 128, "F": 32, "budget_blocks": 512, "block": 4,
        "P": 5, "C1": 65537, "Q": 11, "NB1": 16385,
    },
    "SparseMoE": {"H": 2560, "experts": 512, "I": 640},
}  # fmt: skip
ATTRIBUTES: Mapping[str, Mapping[str, Any]] = {
    "GatedResidual": {"branches": 4},
    "NgramInjection": {"branches": 4, "dilation": 3},
    "GatedDeltaNet": {"key_heads": 16, "gate": "sigmoid"},
    "SparseAttention": {
        "heads": 24, "kv_heads": 2, "head_dim": 256, "index_heads": 4, "index_head_dim": 128, "block": 4,
        "budget_blocks": 512, "rope_scale": 1.0,
    },
    "SparseMoE": {"top_k": 10, "normalize": 1},
}  # fmt: skip
FORMS = [
    ("GatedResidual", "pending"),
    ("GatedResidual", "last_fp8_dynamic"),
    ("NgramInjection", "pending"),
    ("GatedDeltaNet", "default"),
    ("SparseAttention", "select_return"),
    ("SparseAttention", "given"),
    ("SparseMoE", "fp8_block"),
]
PROFILES = [((1, 64), (1, 8)), ((1, 1), (1, 2048)), ((1, 3), (100, 1500)), ((2, 2), (33, 33))]
"""Least and most B, least and most S: decoding, prefill, several prompts at once, one shape."""


class KernelSizes:
    """A kernel's parameter struct for sizes of the op table; every pointer leads to zeros."""

    def __init__(self, kernels: HostKernels, op: str, form: str, dtypes: Mapping[str, str]) -> None:
        self.op, self.kernel = schema.op(op), schema.snake_name(op)
        self.form, self._library = self.op.form(form), kernels._library
        self._params = kernels.params(self.kernel)
        self._zeros = np.zeros(1 << 20, np.uint8)
        values = {f.name: self._zeros.ctypes.data for f, _ in table.ports_of_fields(self.op, self.form, self._params)}
        values |= {table.PER_CONTEXT: self._zeros.ctypes.data}
        given = {**ATTRIBUTES[op], "eps": 1e-6}
        kinds = {f.name: f.kind for f in self._params.fields}
        values |= {name: value for name, value in given.items() if kinds.get(name) == "attribute"}
        found = table.format_dtypes(self.op, self.form, self._params)
        known = {**dtypes, "C": "float8_e4m3fn"}
        values |= {name: FORMATS[known.get(dtype, dtype)] for name, dtype in found.items()}
        self.struct = self._params.struct(**{n: v for n, v in values.items() if n in kinds})
        self._sizes = table.size_expressions(self.op, self.form, self._params)

    def set(self, sizes: Mapping[str, int]) -> None:
        for name, dim in self._sizes.items():
            setattr(self.struct, name, schema.evaluate(dim, sizes))

    def workspace(self) -> int:
        return int(self._library.flashnext_workspace(self.kernel.encode(), ctypes.byref(self.struct)))

    def launch(self) -> int:
        workspace = np.zeros(self.workspace() + 16, np.uint8)
        self.struct.workspace = workspace.ctypes.data
        return int(self._library.flashnext_launch(self.kernel.encode(), ctypes.byref(self.struct)))


def shapes_only(op: str, form: str, dtypes: Mapping[str, str], sizes: Mapping[str, int], batch: Any, steps: Any
                ) -> PluginCase:  # fmt: skip
    """A case without data: the profile's ends, and one step at the upper one."""
    ports = schema.op(op).form(form)
    kinds = {str(dtype).removeprefix("torch."): kind for dtype, kind in KINDS.items()}
    known = {**dtypes, "C": "float8_e4m3fn"}

    def shape(port: schema.Port, b: int, s: int) -> tuple[int, ...]:
        return tuple(int(schema.evaluate(d, {**sizes, "B": b, "S": s})) for d in port.shape)  # type: ignore[call-overload]

    def tensor(port: schema.Port) -> Tensor:
        return Tensor(kinds[known.get(port.dtype, port.dtype)], shape(port, batch[1], steps[1]), 0)

    step = Step(tuple(map(tensor, ports.inputs)), tuple(map(tensor, ports.outputs)))
    least = [shape(p, batch[0], steps[0]) for p in ports.inputs]
    most = [shape(p, batch[1], steps[1]) for p in ports.inputs]
    fields = plugin_fields(schema.op(op), form, {**ATTRIBUTES[op], "eps": 1e-6})
    return PluginCase(op, form, fields, [-1] * len(ports.outputs), least, most, [step], [])


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("op", "form"), FORMS)
def test_workspace_is_the_largest_of_the_profile(
    op: str, form: str, profile: Any, kernels: HostKernels, headers: Headers, tmp_path: Path
) -> None:
    """At official sizes, of all shapes of the profile one by one."""
    batch, steps = profile
    dtypes = {"T": "bfloat16", "U": "float32"}
    case = shapes_only(op, form, dtypes, OFFICIAL[op], batch, steps)
    run = harness.run(harness.build(headers), "workspace", case, tmp_path)
    assert run.returncode == 0, run.stderr
    sizes = KernelSizes(kernels, op, form, dtypes)
    largest = 0
    for b, s in itertools.product(range(batch[0], batch[1] + 1), range(steps[0], steps[1] + 1)):
        sizes.set({**OFFICIAL[op], "B": b, "S": s})
        largest = max(largest, sizes.workspace())
    assert f"workspace {largest}\n" in run.stdout


SMALL: Mapping[str, Mapping[str, int]] = {
    "GatedResidual": {"n": 4, "H": 8, "rank": 8},
    "NgramInjection": {"n": 4, "H": 8, "width": 2, "P": 1, "Q": 9},
    "GatedDeltaNet": {"K": 16, "V": 16, "Dk": 8, "Dv": 8, "width": 2, "P": 1, "Q": 4, "W": 2},
    "SparseAttention": {
        "Nq": 24, "Nkv": 2, "D": 256, "Ni": 4, "Di": 128, "F": 2, "budget_blocks": 512, "block": 4,
        "P": 1, "C1": 9, "Q": 4, "NB1": 2,
    },
    "SparseMoE": {"H": 16, "experts": 12, "I": 16},
}  # fmt: skip


@pytest.mark.parametrize("op", [op.name for op in schema.OPS])
def test_there_is_a_kernel_for_what_plugins_accept_and_for_nothing_else(op: str, kernels: HostKernels) -> None:
    """Every combination of the op table's dtypes, on zeros."""
    form = schema.op(op).forms[0]
    variables = {v: d for v, d in schema.op(op).type_variables.items() if v in {p.dtype for p in form.inputs}}
    for dtypes in itertools.product(*variables.values()):
        chosen = dict(zip(variables, dtypes, strict=True))
        first, second = dtypes[0], dtypes[-1]
        listed = table.COMBINATIONS[op]
        is_listed = first in listed and second in (listed[first] or (first,))
        sizes = KernelSizes(kernels, op, form.name, chosen)
        sizes.set({**SMALL[op], "B": 1, "S": 1})
        assert sizes.launch() == (0 if is_listed else REJECTED), chosen
