"""The forms with residual branches in FP8, made from the plain references: decode, the plain op in float32, encode.

The plain op computes in float32 and rounds only what it stores, so given float32 branches it returns them unrounded:
what is stored is one rounding away from what was read, whatever the activations' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from flashnext.export.ops import schema
from flashnext.export.ops.ports import split_form
from flashnext.export.ops.reference.common import wide
from flashnext.export.ops.reference.residual_store import StochasticRounding, dequantize, dynamic_scale, quantize

Reference = Callable[..., Any]


def references(op: str, plain: Mapping[str, Reference]) -> dict[str, Reference]:
    """The op's FP8 forms by name; `plain` has its plain forms."""
    forms = schema.op(op).forms
    return {f.name: _in_fp8(f, plain[split_form(f.name)[0]]) for f in forms if split_form(f.name)[1]}


def _in_fp8(form: schema.Form, plain: Reference) -> Reference:
    names = [p.name for p in form.inputs]
    activation = next(p.name for p in form.inputs if p.dtype == "T")
    given_out = [p.name for p in form.outputs if p.name != "r_out_token_scale"]

    def run(*inputs: Tensor, rounding: StochasticRounding | None = None, **attributes: Any) -> tuple[Tensor, ...]:
        """Rounds to nearest, as graphs do, unless `rounding` is given (kernels know it too)."""
        given = dict(zip(names, inputs, strict=True))
        dtype = given[activation].dtype
        scale, out_scale = _scale(given, "r"), given.pop("r_out_scale", None)
        given[names[0]] = wide(given[names[0]]) if scale is None else dequantize(given[names[0]], scale)
        results = dict(zip(given_out, plain(*given.values(), **attributes), strict=True))
        if "x" in results:
            results["x"] = results["x"].to(dtype)
        if "r_out" in results:
            branches = results["r_out"]
            store_scale = dynamic_scale(branches) if out_scale is None else out_scale
            results["r_out"] = quantize(branches, store_scale, rounding=rounding)
            results["r_out_token_scale"] = store_scale
        return tuple(results[p.name] for p in form.outputs)

    return run


def _scale(given: dict[str, Tensor], port: str) -> Tensor | None:
    """Takes the scale of a port out of the inputs; None where the form has none."""
    static, dynamic = given.pop(f"{port}_scale", None), given.pop(f"{port}_token_scale", None)
    return dynamic if static is None else static
