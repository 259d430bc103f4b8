"""ONNX operator schemas made from the op table, for tracing and for checking graphs whose nodes carry no functions.

A form has a schema with exactly its inputs and outputs: torch.onnx emits nodes from it (`emit`). All forms of an op
share one operator in a graph, whose schema (`register`) can only say "some tensors"; its inference rule reads the
node's `form` and holds the node to the table: number of inputs, dtypes, shapes, and the outputs that follow. Graphs
in the form for plugins (`plugin_graph.py` of the builder) are held to it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import onnx
from onnx.defs import OpSchema
from onnx.shape_inference import InferenceContext, InferenceError
from onnxscript.values import Op, Opset

from flashnext.export.ops import schema

DTYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "float16": 10, "bfloat16": 16, "float8_e4m3fn": 17}
"""ONNX TensorProto.DataType of the table's dtypes."""
_TYPE_NAMES = {
    "float32": "tensor(float)",
    "uint8": "tensor(uint8)",
    "int8": "tensor(int8)",
    "int32": "tensor(int32)",
    "float16": "tensor(float16)",
    "bfloat16": "tensor(bfloat16)",
    "float8_e4m3fn": "tensor(float8e4m3fn)",
}


def emit(op: schema.Op, form: schema.Form) -> Callable[..., Any]:
    """What torch.onnx's `custom_translation_table` calls: emits the op's node with the attribute `form`."""
    operator = Op(Opset(schema.DOMAIN, schema.VERSION), op.name, form_schema(op, form))

    def node(*inputs: Any, **attributes: Any) -> Any:
        return operator(*inputs, form=form.name, **attributes)

    return node


@cache
def register() -> None:
    """Make the ops known to onnx.checker and onnx.shape_inference in this process."""
    for op in schema.OPS:
        onnx.defs.register_schema(op_schema(op))


def form_schema(op: schema.Op, form: schema.Form) -> OpSchema:
    """Schema of one form: its inputs and outputs by name and type."""

    def typed(port: schema.Port) -> OpSchema.FormalParameter:
        return OpSchema.FormalParameter(port.name, _TYPE_NAMES.get(port.dtype, port.dtype), port.doc)

    used = {p.dtype for p in (*form.inputs, *form.outputs)}
    return OpSchema(
        op.name,
        schema.DOMAIN,
        schema.VERSION,
        doc=f"{op.doc} {form.doc}",
        inputs=[typed(p) for p in form.inputs],
        outputs=[typed(p) for p in form.outputs],
        type_constraints=[
            (variable, [_TYPE_NAMES[d] for d in dtypes], "")
            for variable, dtypes in op.type_variables.items()
            if variable in used
        ],
        attributes=_attributes(op),
    )


def op_schema(op: schema.Op) -> OpSchema:
    """Schema of an op in all its forms; the inference rule tells them apart."""

    def some(name: str, counts: list[int]) -> OpSchema.FormalParameter:
        variadic = OpSchema.FormalParameterOption.Variadic
        return OpSchema.FormalParameter(
            name, "any", "as its form says", param_option=variadic, is_homogeneous=False, min_arity=min(counts)
        )

    made = OpSchema(
        op.name,
        schema.DOMAIN,
        schema.VERSION,
        doc=op.doc,
        inputs=[some("inputs", [len(f.inputs) for f in op.forms])],
        outputs=[some("outputs", [len(f.outputs) for f in op.forms])],
        type_constraints=[("any", list(_TYPE_NAMES.values()), "any tensor of the table")],
        attributes=[*_attributes(op), *_plugin_attributes()],
    )
    made.set_type_and_shape_inference_function(lambda context: _infer(op, context))
    return made


def _attributes(op: schema.Op) -> list[OpSchema.Attribute]:
    kinds = OpSchema.AttrType
    form = OpSchema.Attribute("form", kinds.STRING, "which of the op's forms the node is", required=True)
    return [form] + [
        OpSchema.Attribute(a.name, getattr(kinds, a.kind.upper()), a.doc, required=True) for a in op.attributes
    ]


def _plugin_attributes() -> list[OpSchema.Attribute]:
    """How a node in plugin form names its creator; other nodes have neither."""
    return [
        OpSchema.Attribute(name, OpSchema.AttrType.STRING, "of the plugin's creator", required=False)
        for name in ("plugin_version", "plugin_namespace")
    ]


# --- inference ------------------------------


def _infer(op: schema.Op, context: InferenceContext) -> None:
    name = context.get_attribute("form").s.decode()
    try:
        form = op.form(name)
    except KeyError as unknown:
        raise InferenceError(unknown.args[0]) from None
    found = context.get_num_inputs(), context.get_num_outputs()
    if found != (len(form.inputs), len(form.outputs)):
        wanted = f"{len(form.inputs)} inputs and {len(form.outputs)} outputs"
        raise InferenceError(f"{op.name} {name} has {wanted}, the node {found[0]} and {found[1]}")
    types = [context.get_input_type(i) for i in range(found[0])]
    dtypes = _bind_dtypes(op, form, types)
    sizes = _bind_sizes(op, form, types, context)
    for i, port in enumerate(form.outputs):
        dtype = dtypes.get(port.dtype, DTYPES.get(port.dtype))
        if dtype is not None:
            dims = [_known(schema.evaluate(d, sizes)) for d in port.shape] if sizes else None
            context.set_output_type(i, onnx.helper.make_tensor_type_proto(dtype, dims))


def _bind_dtypes(op: schema.Op, form: schema.Form, types: Sequence[onnx.TypeProto | None]) -> dict[str, int]:
    """ONNX dtype of each type variable that the inputs with a known type bind."""
    bound: dict[str, int] = {}
    for port, found in zip(form.inputs, types, strict=True):
        dtype = found.tensor_type.elem_type if found else 0
        if dtype and dtype not in _expected(port.dtype, bound, dtype):
            name = onnx.TensorProto.DataType.Name(dtype)
            raise InferenceError(f"{op.name} {form.name}: {port.name} must be {port.dtype}, found {name}")
    return bound


def _expected(dtype: str, bound: dict[str, int], found: int) -> tuple[int, ...]:
    """ONNX dtypes that a port may have; a type variable that is not bound yet takes what was found."""
    if dtype in DTYPES:
        return DTYPES[dtype], DTYPES[schema.PLUGIN_DTYPES.get(dtype, dtype)]
    return (bound.setdefault(dtype, found),)


def _bind_sizes(
    op: schema.Op, form: schema.Form, types: Sequence[onnx.TypeProto | None], context: InferenceContext
) -> dict[str, object]:
    """Sizes that the inputs bind; none at all while an input's shape or one of the model's own sizes is unknown."""
    if any(t is None or not t.tensor_type.HasField("shape") for t in types):
        return {}
    shapes = [[d.dim_value or d.dim_param for d in t.tensor_type.shape.dim] for t in types if t is not None]
    attributes = {a.name: context.get_attribute(a.name).i for a in op.attributes if a.kind == "int"}
    try:
        return schema.bind_sizes(op, form, shapes, attributes)
    except ValueError as misfit:
        raise InferenceError(f"{op.name} {form.name}: {misfit}") from None
    except TypeError:  # a sum with a size that is only a name
        return {}


def _known(size: object) -> int | str | None:
    """A size for a type: None where it is neither a number nor a name."""
    return size if isinstance(size, int) or (isinstance(size, str) and size.isidentifier()) else None
