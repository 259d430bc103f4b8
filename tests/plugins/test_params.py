"""Parameter structs and the op table name the same things."""

from __future__ import annotations

import pytest

from flashnext.export.ops import schema
from flashnext.plugins.params import read_params

FOLDERS = {
    "GatedResidual": "gated_residual",
    "NgramInjection": "ngram_injection",
    "GatedDeltaNet": "gated_delta_net",
    "SparseAttention": "sparse_attention",
    "SparseMoE": "sparse_moe",
}
OTHER_NAMES = {
    ("SparseMoE", "nvfp4", "gate_up_scale"): "gate_up_group_scale",
    ("SparseMoE", "nvfp4", "down_scale"): "down_group_scale",
}
"""Ports that one form has in another format than the others: a field of its own."""


def test_every_op_has_kernels() -> None:
    assert {op.name for op in schema.OPS} == set(FOLDERS)


@pytest.mark.parametrize(("op", "form"), [(op.name, form.name) for op in schema.OPS for form in op.forms])
def test_every_port_has_a_field(op: str, form: str) -> None:
    fields = {f.name for f in read_params(FOLDERS[op]).fields if f.kind == "tensor"}
    ports = schema.op(op).form(form)
    # A state is one field: it is read and written in place.
    names = [p.name for p in (*ports.inputs, *ports.outputs) if p.name not in ports.aliases]
    assert {OTHER_NAMES.get((op, form, name), name) for name in names} - fields == set()
