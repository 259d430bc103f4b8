"""torch.library ops made from the op table: `torch.ops.flashnext.<op>_<form>`.

Tracing needs ops that change nothing in place and that can be shaped without data. Each op here clones its states,
calls the reference, and has a fake implementation whose output shapes come from the table. Eager code calls the
reference itself through `call`, so that states are updated in place and nothing is copied; `implemented_by` puts
something else in the reference's place, the kernels say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from flashnext.export.ops import schema
from flashnext.export.ops.reference import REFERENCES

NAMESPACE = schema.DOMAIN
_ATTRIBUTE_TYPES = {"int": "int", "float": "float", "string": "str"}


def torch_name(op: str, form: str) -> str:
    """`GatedResidual`, `pending` -> `gated_residual_pending`."""
    return f"{schema.snake_name(op)}_{form}"


Implementation = Callable[[str, str, Sequence[Tensor], Mapping[str, Any]], Any]
"""Runs an op (name, form, inputs, attributes) with states in place; returns as the reference does."""


def reference(op: str, form: str, inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> Any:
    """The implementation that `call` uses unless told otherwise."""
    return REFERENCES[op][form](*inputs, **attributes)


_IMPLEMENTATION: ContextVar[Implementation] = ContextVar("implementation of the ops", default=reference)


@contextmanager
def implemented_by(implementation: Implementation) -> Iterator[None]:
    """Inside, `call` runs ops by this (in this thread; exporting is not affected)."""
    before = _IMPLEMENTATION.set(implementation)
    try:
        yield
    finally:
        _IMPLEMENTATION.reset(before)


def call(op: str, form: str, *inputs: Tensor, **attributes: Any) -> Any:
    """Run an op: as a traced op while exporting, else at once with states in place."""
    if torch.compiler.is_exporting():
        return getattr(torch.ops.flashnext, torch_name(op, form))(*inputs, **attributes)
    return _IMPLEMENTATION.get()(op, form, inputs, attributes)


def empty_outputs(
    op: schema.Op,
    form: schema.Form,
    inputs: Sequence[Tensor],
    attributes: Mapping[str, Any],
    ports: Sequence[schema.Port],
) -> list[Tensor]:
    """Tensors of the shapes and dtypes of these outputs on the inputs' device, with nothing in them yet."""
    sizes = schema.bind_sizes(op, form, [t.shape for t in inputs], attributes)
    types = {p.dtype: t.dtype for p, t in zip(form.inputs, inputs, strict=True)}
    return [
        torch.empty(
            [schema.evaluate(d, sizes) for d in port.shape],  # type: ignore[misc]
            dtype=types[port.dtype] if port.dtype in types else getattr(torch, port.dtype),
            device=inputs[0].device,
        )
        for port in ports
    ]


def _signature(op: schema.Op, form: schema.Form) -> str:
    inputs = [f"Tensor {p.name}" for p in form.inputs]
    attributes = [f"{_ATTRIBUTE_TYPES[a.kind]} {a.name}" for a in op.attributes]
    returns = ", ".join("Tensor" for _ in form.outputs)
    return f"({', '.join([*inputs, '*', *attributes])}) -> {returns if len(form.outputs) == 1 else f'({returns})'}"


def _functional(op: schema.Op, form: schema.Form) -> Any:
    states = set(form.aliases.values())
    reference = REFERENCES[op.name][form.name]

    def run(*inputs: Tensor, **attributes: Any) -> Any:
        own = [t.clone() if p.name in states else t for p, t in zip(form.inputs, inputs, strict=True)]
        return reference(*own, **attributes)

    return run


def _fake(op: schema.Op, form: schema.Form) -> Any:
    def run(*inputs: Tensor, **attributes: Any) -> Any:
        outputs = empty_outputs(op, form, inputs, attributes, form.outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return run


def _register() -> None:
    library = torch.library.Library(NAMESPACE, "DEF")
    for op in schema.OPS:
        for form in op.forms:
            name = torch_name(op.name, form.name)
            library.define(name + _signature(op, form))
            library.impl(name, _functional(op, form), "CompositeExplicitAutograd")
            torch.library.register_fake(f"{NAMESPACE}::{name}", _fake(op, form), lib=library)
    globals()["_LIBRARY"] = library  # the registrations live as long as this object


_register()
