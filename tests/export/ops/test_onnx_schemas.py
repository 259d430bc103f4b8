"""ONNX schemas made from the table: torch.onnx emits nodes by them, and they hold a graph's nodes to the table."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from flashnext.export.ops import onnx_schemas, schema, torch_ops

MODEL_SIZES = {
    "n": 4, "H": 32, "rank": 3, "P": 3, "Q": 9, "C1": 17, "NB1": 5, "W": 4, "K": 2, "V": 4, "Dk": 8, "Dv": 6, "Nq": 4,
    "Nkv": 2, "D": 8, "Di": 6, "Ni": 2, "F": 2, "experts": 6, "I": 16, "width": 3, "budget_blocks": 2,
}  # fmt: skip
OTHER_ATTRIBUTES = {
    "eps": 1e-6,
    "dilation": 3,
    "gate": "silu",
    "block": 4,
    "rope_scale": 1.0,
    "top_k": 2,
    "normalize": 1,
}
FORMS = [(op.name, form.name) for op in schema.OPS for form in op.forms]


def attributes(op: schema.Op) -> dict[str, Any]:
    return {a.name: MODEL_SIZES[a.size] if a.size else OTHER_ATTRIBUTES[a.name] for a in op.attributes}


def shape(port: schema.Port, **steps: int | str) -> list[Any]:
    return [d if d in ("B", "S") and not steps else schema.evaluate(d, {**MODEL_SIZES, **steps}) for d in port.shape]


def bare_model(op: schema.Op, form: schema.Form) -> onnx.ModelProto:
    """One node without a function; its outputs' types are for inference to find."""
    dtypes = {**onnx_schemas.DTYPES, "T": TensorProto.BFLOAT16, "E": TensorProto.FLOAT16, "C": TensorProto.UINT8}
    dtypes["U"] = TensorProto.BFLOAT16
    node = helper.make_node(
        op.name, [p.name for p in form.inputs], [p.name for p in form.outputs], domain=schema.DOMAIN, form=form.name,
        **attributes(op),
    )  # fmt: skip
    inputs = [helper.make_tensor_value_info(p.name, dtypes[p.dtype], shape(p)) for p in form.inputs]
    outputs = [helper.make_tensor_value_info(p.name, dtypes[p.dtype], [None] * len(p.shape)) for p in form.outputs]
    graph = helper.make_graph([node], "graph", inputs, outputs)
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(schema.DOMAIN, schema.VERSION)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.fixture(autouse=True)
def _registered() -> None:
    onnx_schemas.register()


@pytest.mark.parametrize(("op_name", "form_name"), FORMS)
def test_infers_the_outputs(op_name: str, form_name: str) -> None:
    op = schema.op(op_name)
    form = op.form(form_name)
    made = bare_model(op, form)
    onnx.checker.check_model(made, full_check=True)
    for info, port in zip(onnx.shape_inference.infer_shapes(made).graph.output, form.outputs, strict=True):
        assert [d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim] == shape(port), port.name


def _drop_an_input(model: onnx.ModelProto) -> None:
    del model.graph.node[0].input[-1]


def _drop_an_attribute(model: onnx.ModelProto) -> None:
    del model.graph.node[0].attribute[1]


def _invent_a_form(model: onnx.ModelProto) -> None:
    next(a for a in model.graph.node[0].attribute if a.name == "form").s = b"sideways"


def _change_a_dtype(model: onnx.ModelProto) -> None:
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.INT32


def _change_a_size(model: onnx.ModelProto) -> None:
    model.graph.input[3].type.tensor_type.shape.dim[0].dim_value = 7


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_drop_an_input, "has 7 inputs and 3 outputs, the node 6 and 3"),
        (_drop_an_attribute, "branches|eps"),
        (_invent_a_form, "GatedResidual has no form 'sideways'"),
        (_change_a_dtype, "y must be T, found INT32"),
        (_change_a_size, "norm_weight must have shape"),
    ],
)
def test_refuses_what_the_table_does_not_say(fault: Any, message: str) -> None:
    made = bare_model(schema.GATED_RESIDUAL, schema.GATED_RESIDUAL.form("pending"))
    fault(made)
    with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError), match=message):
        onnx.checker.check_model(made, full_check=True)


class OneOp(torch.nn.Module):
    """One op of the table as a module, for tracing."""

    def __init__(self, op: schema.Op, form: schema.Form) -> None:
        super().__init__()
        self.function = getattr(torch.ops.flashnext, torch_ops.torch_name(op.name, form.name)).default
        self.attributes = attributes(op)

    def forward(self, inputs: list[torch.Tensor]) -> Any:
        return self.function(*inputs, **self.attributes)


@pytest.mark.parametrize(("op_name", "form_name"), [("GatedResidual", "settled"), ("SparseAttention", "given")])
def test_torch_emits_the_node(op_name: str, form_name: str) -> None:
    op = schema.op(op_name)
    form = op.form(form_name)
    module = OneOp(op, form)
    inputs = [
        torch.zeros(shape(p, B=2, S=3), dtype=torch.int32 if p.dtype == "int32" else torch.float32) for p in form.inputs
    ]
    program = torch.onnx.export(
        module.eval(), (inputs,), custom_translation_table={module.function: onnx_schemas.emit(op, form)}, dynamo=True,
        optimize=False, verbose=False,
    )  # fmt: skip
    assert program is not None
    (node,) = [n for n in program.model.graph if n.domain == schema.DOMAIN]
    assert node.op_type == op_name
    assert node.attributes["form"].as_string() == form_name
    assert (len(node.inputs), len(node.outputs)) == (len(form.inputs), len(form.outputs))
