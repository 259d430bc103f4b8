"""Parameter structs and the op table name the same things."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gated_residual_case import gated_residual_case

from flashnext.export.errors import PluginError
from flashnext.export.ops import schema
from flashnext.plugins.host_build import kernel_sources
from flashnext.plugins.params import Array, field_of_port, fill, read_params


def test_every_op_has_kernels() -> None:
    assert {schema.snake_name(op.name) for op in schema.OPS} <= {source.parent.name for source in kernel_sources()}


@pytest.mark.parametrize(("op", "form"), [(op.name, form.name) for op in schema.OPS for form in op.forms])
def test_every_port_has_a_field(op: str, form: str) -> None:
    fields = {f.name for f in read_params(schema.snake_name(op)).fields if f.kind == "tensor"}
    ports = schema.op(op).form(form)
    # A state is one field: it is read and written in place.
    names = [p.name for p in (*ports.inputs, *ports.outputs) if p.name not in ports.aliases]
    assert {field_of_port(op, form, name) for name in names} - fields == set()


# --- what memory may look like ----------------------------------------------------------------------


def shifted(array: torch.Tensor) -> torch.Tensor:
    """The same values, from one element behind a multiple of 16 bytes on."""
    memory = torch.empty(array.numel() + 1, dtype=array.dtype)
    return memory[1:].view(array.shape).copy_(array)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (lambda r: r.transpose(1, 2).contiguous().transpose(1, 2), "r is not contiguous. Pass a contiguous copy"),
        (lambda r: torch.stack([r, r], -1)[..., 0], "r is not contiguous"),
        (lambda r: r[:1].expand(r.shape), "r is not contiguous"),
        (lambda r: np.asfortranarray(r.numpy()), "r is not contiguous"),
        (lambda r: r.numpy()[::-1], "r is not contiguous"),
        (shifted, "r does not start at a multiple of 16 bytes. Pass a copy"),
    ],
)
def test_a_view_is_refused(view: Callable[[torch.Tensor], Array], message: str) -> None:
    """Before anything is launched, by the name of the tensor."""
    values = gated_residual_case("pending", tokens=3, branches=2, hidden=16, rank=8).values
    params = read_params("gated_residual")
    fill(params, values)
    with pytest.raises(PluginError, match=f"gated_residual: {message}"):
        fill(params, values | {"r": view(values["r"])})
