"""The portable functions in ONNX Runtime against the PyTorch reference, over random shapes and schedules.

Every call is compared in full: outputs of valid tokens, and every state except the places that take what goes
nowhere. States are bound in place (one buffer as input and output), as the runtime does, unless a test says otherwise.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext.export.ops import portable, schema
from flashnext.export.ops.portable.builder import DTYPES, OPSET
from flashnext.export.ops.reference import REFERENCES

os.environ.setdefault("OMP_NUM_THREADS", "1")
TOLERANCE = 1e-5
EXAMPLES = settings(max_examples=25, deadline=None)
Items = tuple[tuple[str, Any], ...]


# --- one node as a model --------------------------------------------------------------------------


def model(
    op: str, form: str, sizes: dict[str, int], attributes: dict[str, Any], dtypes: dict[str, str]
) -> onnx.ModelProto:
    """A graph of one node that carries the op, with the table's shapes."""
    ports = schema.op(op).form(form)
    known = {**sizes, **{a.size: attributes[a.name] for a in schema.op(op).attributes if a.size}}

    def info(port: schema.Port) -> onnx.ValueInfoProto:
        shape = [d if d in ("B", "S") else schema.evaluate(d, known) for d in port.shape]
        return onnx.helper.make_tensor_value_info(port.name, DTYPES[dtypes.get(port.dtype, port.dtype)], shape)

    node = onnx.helper.make_node(
        op, [p.name for p in ports.inputs], [p.name for p in ports.outputs], domain=schema.DOMAIN, overload=form,
        form=form, **attributes,
    )  # fmt: skip
    graph = onnx.helper.make_graph([node], op, [info(p) for p in ports.inputs], [info(p) for p in ports.outputs])
    imports = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(schema.DOMAIN, schema.VERSION)]
    function = portable.function(op, form, sizes, attributes, dtypes)
    return onnx.helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10)


@functools.cache
def session(op: str, form: str, sizes: Items, attributes: Items, dtypes: Items) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    made = model(op, form, dict(sizes), dict(attributes), dict(dtypes))
    return ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Case:
    """One (op, form) with its sizes; holds the states of two runs, the reference's and ONNX Runtime's."""

    def __init__(self, op: str, form: str, sizes: dict[str, int], attributes: dict[str, Any]) -> None:
        self.op, self.form, self.attributes = op, form, attributes
        self.ports = schema.op(op).form(form)
        self.sizes = {**sizes, **{a.size: attributes[a.name] for a in schema.op(op).attributes if a.size}}
        dtypes = dict.fromkeys(schema.op(op).type_variables, "float32")
        self.session = session(op, form, *(tuple(sorted(d.items())) for d in (sizes, attributes, dtypes)))

    def shape(self, port: str, **steps: int) -> list[int]:
        dims = next(p for p in self.ports.inputs if p.name == port).shape
        return [schema.evaluate(d, {**self.sizes, **steps}) for d in dims]  # type: ignore[misc]

    def reference(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors = [torch.from_numpy(inputs[p.name].copy()) for p in self.ports.inputs]
        out = REFERENCES[self.op][self.form](*tensors, **self.attributes)
        out = out if isinstance(out, tuple) else (out,)
        return {p.name: t.numpy() for p, t in zip(self.ports.outputs, out, strict=True)}

    def portable(self, inputs: dict[str, np.ndarray], in_place: bool = True) -> dict[str, np.ndarray]:
        if not in_place:
            names = [p.name for p in self.ports.outputs]
            return dict(zip(names, self.session.run(names, inputs), strict=True))
        binding = self.session.io_binding()
        values = {name: ort.OrtValue.ortvalue_from_numpy(a.copy()) for name, a in inputs.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for port in self.ports.outputs:
            if port.name in self.ports.aliases:
                binding.bind_ortvalue_output(port.name, values[self.ports.aliases[port.name]])
            else:
                binding.bind_output(port.name)
        self.session.run_with_iobinding(binding)
        return {p.name: v.numpy() for p, v in zip(self.ports.outputs, binding.get_outputs(), strict=True)}


def near(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Relative to the norm of the whole; memory that nobody wrote may be NaN on both sides."""
    assert got.shape == want.shape, what
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=what)
    error = np.linalg.norm(np.nan_to_num(got - want))
    assert error <= TOLERANCE * np.linalg.norm(np.nan_to_num(want)) + 1e-7, f"{what}: {error}"


# --- GatedResidual --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["embed", "pending", "settled", "last"])
@EXAMPLES
@given(batch=st.integers(1, 3), steps=st.integers(1, 5), seed=st.integers(0, 1000))
def test_gated_residual(form: str, batch: int, steps: int, seed: int) -> None:
    case = Case("GatedResidual", form, {"n": 4, "H": 16, "rank": 6}, {"branches": 4, "eps": 1e-6})
    inputs = normal(case, seed, B=batch, S=steps)
    got, want = case.portable(inputs), case.reference(inputs)
    for name in want:
        near(got[name], want[name], name)


# --- SparseMoE ------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [0, 1])
@EXAMPLES
@given(batch=st.integers(1, 3), steps=st.integers(1, 5), seed=st.integers(0, 1000), ties=st.booleans())
def test_sparse_moe(normalize: int, batch: int, steps: int, seed: int, ties: bool) -> None:
    case = Case("SparseMoE", "plain", {"H": 12, "I": 8, "experts": 16}, {"top_k": 3, "normalize": normalize})
    inputs = normal(case, seed, B=batch, S=steps)
    if ties:
        inputs["router_logits"] = np.round(inputs["router_logits"])
    near(case.portable(inputs)["y"], case.reference(inputs)["y"], "y")


def normal(case: Case, seed: int, **steps: int) -> dict[str, np.ndarray]:
    """Standard normal values for every float input."""
    random = np.random.default_rng(seed)
    ports = [p for p in case.ports.inputs if p.dtype != "int32"]
    return {p.name: random.standard_normal(case.shape(p.name, **steps), np.float32) for p in ports}
