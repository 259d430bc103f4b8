"""Portable functions with residual branches in FP8, in ONNX Runtime, against the reference.

Where both compute the same float32 branches (nothing but products and sums, one by one) the stored codes and scales
are equal bit for bit. After an n-gram injection, whose sums run in another order, a code may be its neighbour.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashnext.export.model.loading import to_torch
from flashnext.export.ops import schema
from flashnext.export.ops.ports import CODES
from flashnext.export.ops.reference import REFERENCES
from flashnext.export.ops.reference.residual_store import dynamic_scale, quantize

from .portable_model import EXAMPLES, near, session

E4M3 = ml_dtypes.float8_e4m3fn
RESIDUAL = {"n": 4, "H": 16, "rank": 6}
NGRAM = {"n": 4, "H": 16, "P": 3, "Q": 13, "width": 4}
FP8_FORMS = {op.name: [f.name for f in op.forms if "_fp8_" in f.name] for op in schema.OPS}
SIZES = {"B": 2, "S": 3}


class Case:
    """One FP8 form with its inputs."""

    def __init__(self, op: str, form: str, seed: int, **steps: int) -> None:
        self.op, self.form, self.ports = op, form, schema.op(op).form(form)
        self.attributes: dict[str, Any] = {"branches": 4, "eps": 1e-6}
        if op == "NgramInjection":
            self.attributes["dilation"] = 3
        self.model_sizes = RESIDUAL if op == "GatedResidual" else NGRAM
        self.sizes = {**self.model_sizes, **SIZES, **steps}
        self.random = np.random.default_rng(seed)
        self.inputs = {p.name: self.values(p) for p in self.ports.inputs}

    def values(self, port: schema.Port) -> np.ndarray:
        shape = [schema.evaluate(d, self.sizes) for d in port.shape]
        if port.dtype == CODES:
            return (
                quantize(torch.from_numpy(self.normal(shape)) * 50, torch.ones(4)).view(torch.uint8).numpy().view(E4M3)
            )
        if port.dtype == "int32":
            fixed = {"slots": [1, 0], "past_len": [17, 0], "new_len": [3, 2]}
            return np.array(fixed[port.name], np.int32)
        if port.name.endswith("scale"):
            return self.random.uniform(0.01, 0.05, shape).astype(np.float32)  # type: ignore[arg-type]
        return self.normal(shape)

    def normal(self, shape: Any) -> np.ndarray:
        return self.random.standard_normal(shape, np.float32)

    def reference(self) -> dict[str, np.ndarray]:
        out = REFERENCES[self.op][self.form](
            *(to_torch(self.inputs[p.name].copy()) for p in self.ports.inputs), **self.attributes
        )
        return {
            p.name: t.view(torch.uint8).numpy() if p.dtype == CODES else t.numpy()
            for p, t in zip(self.ports.outputs, out, strict=True)
        }

    def portable(self) -> dict[str, np.ndarray]:
        sizes, attributes = (tuple(sorted(d.items())) for d in (self.model_sizes, self.attributes))
        runner = session(self.op, self.form, sizes, attributes, (("T", "float32"),), "any")
        binding = runner.io_binding()
        for name, array in self.inputs.items():
            binding.bind_ortvalue_input(name, _ort_value(array))
        outputs = {p.name: np.empty(*self.shape_of(p)) for p in self.ports.outputs}
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, _ort_value(array))
        runner.run_with_iobinding(binding)
        return {n: a.view(np.uint8) if a.dtype == E4M3 else a for n, a in outputs.items()}

    def shape_of(self, port: schema.Port) -> tuple[list[Any], Any]:
        return [schema.evaluate(d, self.sizes) for d in port.shape], E4M3 if port.dtype == CODES else np.float32


def _ort_value(array: np.ndarray) -> ort.OrtValue:
    if array.dtype == E4M3:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint8), 17)
    return ort.OrtValue.ortvalue_from_numpy(array)


@pytest.mark.parametrize("form", FP8_FORMS["GatedResidual"])
@EXAMPLES
@given(seed=st.integers(0, 1000), batch=st.integers(1, 3), steps=st.integers(1, 4))
def test_gated_residual(form: str, seed: int, batch: int, steps: int) -> None:
    case = Case("GatedResidual", form, seed, B=batch, S=steps)
    got, want = case.portable(), case.reference()
    for name in want:
        if name.startswith("r_out"):
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        else:
            near(got[name], want[name], name)


@pytest.mark.parametrize("form", FP8_FORMS["NgramInjection"])
@EXAMPLES
@given(seed=st.integers(0, 1000), quiet=st.booleans())
def test_ngram_injection(form: str, seed: int, quiet: bool) -> None:
    case = Case("NgramInjection", form, seed)
    if quiet:  # nothing to inject: then the float32 branches are equal
        case.inputs["value"][:] = 0
        case.inputs["conv_state"][:] = 0
    got, want = case.portable(), case.reference()
    valid = np.arange(case.sizes["S"]) < case.inputs["new_len"][:, None]
    near(got["conv_state_out"][:-1], want["conv_state_out"][:-1], "conv_state_out")
    codes, wanted = (out["r_out"][valid].astype(int) for out in (got, want))
    differ = codes != wanted
    assert (np.abs(codes - wanted)[differ] == 1).all()
    assert differ.mean() < (1e-9 if quiet else 0.01)
    if "r_out_token_scale" in want:
        scales = (out["r_out_token_scale"][valid] for out in (got, want))
        np.testing.assert_allclose(*scales, rtol=0 if quiet else 1e-6)


@pytest.mark.parametrize("mode", ["static", "dynamic"])
@given(
    seed=st.integers(0, 1000),
    exponents=st.lists(st.integers(-149, 127), min_size=4, max_size=4),
    odd=st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45]),
)
def test_states_of_every_size(mode: str, seed: int, exponents: list[int], odd: float) -> None:
    """Saturation, subnormals and what is no number: as the reference has them."""
    case = Case("GatedResidual", f"start_fp8_{mode}", seed)
    start = case.inputs["start"]
    with np.errstate(over="ignore", under="ignore"):
        start *= np.float32(2.0) ** np.array(exponents, np.float32)[:, None]
    start[0, 0, :, 3] = odd
    got, want = case.portable(), case.reference()
    is_nan = np.isnan(start)
    np.testing.assert_array_equal(got["r_out"][~is_nan], want["r_out"][~is_nan])
    assert ((got["r_out"][is_nan] & 0x7F) == 0x7F).all()
    if mode == "dynamic":
        np.testing.assert_array_equal(got["r_out_token_scale"], want["r_out_token_scale"])
        np.testing.assert_array_equal(want["r_out_token_scale"], dynamic_scale(torch.from_numpy(start)).numpy())
