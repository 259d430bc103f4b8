"""Parameter structs and the op table name the same things."""

from __future__ import annotations

import pytest

from flashnext.export.ops import schema
from flashnext.plugins.host_build import kernel_sources
from flashnext.plugins.params import field_of_port, read_params


def test_every_op_has_kernels() -> None:
    assert {schema.snake_name(op.name) for op in schema.OPS} <= {source.parent.name for source in kernel_sources()}


@pytest.mark.parametrize(("op", "form"), [(op.name, form.name) for op in schema.OPS for form in op.forms])
def test_every_port_has_a_field(op: str, form: str) -> None:
    fields = {f.name for f in read_params(schema.snake_name(op)).fields if f.kind == "tensor"}
    ports = schema.op(op).form(form)
    # A state is one field: it is read and written in place.
    names = [p.name for p in (*ports.inputs, *ports.outputs) if p.name not in ports.aliases]
    assert {field_of_port(op, form, name) for name in names} - fields == set()
