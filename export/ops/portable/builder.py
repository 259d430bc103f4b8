"""Builds ONNX functions from expressions, so that an op's body reads like the formula that it implements.

A `Value` is one tensor of a graph under construction; its operators and methods append nodes. A `Body` collects the
nodes, keeps one copy of every constant, and turns Python functions into the subgraphs of If and Loop. A size that is
known only at run time is an int64 vector with one element, and may stand wherever an integer may.

    body = Body({"x": "float32"})
    x = body.inputs["x"]
    function = body.function("flashnext", "Silu", "default", {"y": x * x.op("Sigmoid")}, ())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

OPSET = 23
"""Operator set of the functions and of every graph that carries them: the two must agree, or checkers and inliners
refuse the model. 18 would do for the functions (reductions and Pad that take their axes as an input)."""

DTYPES = {
    "float32": 1,
    "uint8": 2,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "bfloat16": 16,
    "float8_e4m3fn": 17,
}
FP8 = "float8_e4m3fn"
_NUMPY = {"float32": np.float32, "int32": np.int32, "int64": np.int64, "bool": np.bool_}
_OPEN_END = 2**63 - 1


class Value:
    """A tensor of the graph: its name and dtype (shapes stay with whoever writes the formula)."""

    def __init__(self, body: Body, name: str, dtype: str) -> None:
        self.body, self.name, self.dtype = body, name, dtype

    def op(self, op_type: str, *others: Operand, dtype: str | None = None, **attributes: Any) -> Value:
        """`op_type` applied to this value and others; a Python number takes this value's dtype."""
        operands = [o if isinstance(o, Value) else self.body.constant(o, self.dtype) for o in others]
        return self.body.node(op_type, (self, *operands), (dtype or self.dtype,), **attributes)[0]

    def _reflected(self, op_type: str, other: Operand) -> Value:
        return (other if isinstance(other, Value) else self.body.constant(other, self.dtype)).op(op_type, self)

    def __add__(self, other: Operand) -> Value:
        return self.op("Add", other)

    def __radd__(self, other: Operand) -> Value:
        return self._reflected("Add", other)

    def __sub__(self, other: Operand) -> Value:
        return self.op("Sub", other)

    def __rsub__(self, other: Operand) -> Value:
        return self._reflected("Sub", other)

    def __mul__(self, other: Operand) -> Value:
        return self.op("Mul", other)

    def __rmul__(self, other: Operand) -> Value:
        return self._reflected("Mul", other)

    def __truediv__(self, other: Operand) -> Value:
        return self.op("Div", other)

    def __floordiv__(self, other: Operand) -> Value:
        """Integer division; ONNX truncates, so both sides must not be negative."""
        return self.op("Div", other)

    def __mod__(self, other: Operand) -> Value:
        """Remainder of integers that are not negative (runtimes differ about the sign)."""
        return self.op("Mod", other)

    def __matmul__(self, other: Value) -> Value:
        return self.op("MatMul", other)

    def __neg__(self) -> Value:
        return self.op("Neg")

    def __lt__(self, other: Operand) -> Value:
        return self.op("Less", other, dtype="bool")

    def __le__(self, other: Operand) -> Value:
        return self.op("LessOrEqual", other, dtype="bool")

    def __gt__(self, other: Operand) -> Value:
        return self.op("Greater", other, dtype="bool")

    def __ge__(self, other: Operand) -> Value:
        return self.op("GreaterOrEqual", other, dtype="bool")

    def equal(self, other: Operand) -> Value:
        return self.op("Equal", other, dtype="bool")

    def __and__(self, other: Value) -> Value:
        return self.op("And", other)

    def __or__(self, other: Value) -> Value:
        return self.op("Or", other)

    def __getitem__(self, key: Any) -> Value:
        """Slices of step 1 (`x[:, a:b]`, `x[..., a:b]`); bounds are integers or sizes."""
        items = key if isinstance(key, tuple) else (key,)
        from_end = items[0] is Ellipsis
        axes = range(-len(items) + 1, 0) if from_end else range(len(items))
        cut = [(a, s) for a, s in zip(axes, items[1:] if from_end else items, strict=True) if s != slice(None)]
        starts = self.body.sizes([0 if s.start is None else s.start for _, s in cut])
        ends = self.body.sizes([_OPEN_END if s.stop is None else s.stop for _, s in cut])
        return self.op("Slice", starts, ends, self.body.sizes([a for a, _ in cut]))

    def cast(self, dtype: str) -> Value:
        if dtype == self.dtype:
            return self
        if self.body.quantizes and FP8 in (self.dtype, dtype):
            one = self.body.constant(1.0, "float32")
            if dtype == FP8:
                return self.op("QuantizeLinear", one, dtype=FP8, output_dtype=DTYPES[FP8])
            return self.op("DequantizeLinear", one, dtype="float32").cast(dtype)
        return self.op("Cast", dtype=dtype, to=DTYPES[dtype])

    def where(self, yes: Operand, no: Operand) -> Value:
        """`yes` where this (bool) holds, else `no`. Unlike a product with a mask it drops NaN."""
        like = yes if isinstance(yes, Value) else no
        assert isinstance(like, Value)
        both = [v if isinstance(v, Value) else self.body.constant(v, like.dtype) for v in (yes, no)]
        return self.op("Where", *both, dtype=like.dtype)

    def reshape(self, *shape: Size) -> Value:
        """ONNX Reshape: 0 keeps a dimension, -1 infers one."""
        return self.op("Reshape", self.body.sizes(shape))

    def expand(self, *shape: Size) -> Value:
        return self.op("Expand", self.body.sizes(shape))

    def unsqueeze(self, *axes: int) -> Value:
        return self.op("Unsqueeze", self.body.sizes(axes))

    def squeeze(self, *axes: int) -> Value:
        return self.op("Squeeze", self.body.sizes(axes))

    def transpose(self, *order: int) -> Value:
        return self.op("Transpose", perm=list(order))

    def dim(self, axis: int) -> Value:
        return self.op("Shape", dtype="int64", start=axis, end=axis + 1)

    def reduce(self, kind: str, axis: int, keep: bool = False) -> Value:
        """`kind` is Sum, Mean or Max."""
        return self.op(f"Reduce{kind}", self.body.sizes([axis]), keepdims=int(keep))

    def gather(self, indices: Value, axis: int) -> Value:
        return self.op("Gather", indices, axis=axis)

    def gather_nd(self, indices: Value, batch_dims: int = 0) -> Value:
        return self.op("GatherND", indices, batch_dims=batch_dims)

    def scatter_nd(self, indices: Value, updates: Value) -> Value:
        return self.op("ScatterND", indices, updates)

    def pad_end(self, axis: int, count: Size) -> Value:
        """Zeros after the last element of an axis."""
        return self.op("Pad", self.body.sizes([0, count]), self.body.constant(0, self.dtype), self.body.sizes([axis]))


Operand = Value | float | int
Size = Value | int


class Body:
    """The nodes of one function.

    With `quantizes`, casts to and from FP8 are quantizations with a scale of 1, which round alike: TensorRT has no
    cast to FP8. What is quantized must be float32.
    """

    def __init__(self, inputs: Mapping[str, str], quantizes: bool = False) -> None:
        self.quantizes = quantizes
        self.inputs = {name: Value(self, name, dtype) for name, dtype in inputs.items()}
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[object, ...], Value] = {}
        self._constant_nodes: list[onnx.NodeProto] = []
        self._count = 0

    def node(self, op_type: str, inputs: Sequence[Value], dtypes: Sequence[str], **attributes: Any) -> list[Value]:
        """Append a node with one output per dtype."""
        outputs = [self._fresh(op_type.lower(), dtype) for dtype in dtypes]
        names = ([v.name for v in inputs], [v.name for v in outputs])
        self._nodes.append(helper.make_node(op_type, *names, name=outputs[0].name, **attributes))
        return outputs

    def constant(self, value: Any, dtype: str) -> Value:
        """A constant tensor; equal ones are made once, before everything else, so that subgraphs see them."""
        if dtype not in _NUMPY:  # a 16-bit float: kept as float32 and cast where it is used
            return self.constant(value, "float32").cast(dtype)
        array: np.ndarray[Any, Any] = np.asarray(value, _NUMPY[dtype])
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            made = self._constants[key] = self._fresh("constant", dtype)
            tensor = onnx.numpy_helper.from_array(array, made.name)
            self._constant_nodes.append(helper.make_node("Constant", [], [made.name], name=made.name, value=tensor))
        return self._constants[key]

    def sizes(self, dims: Sequence[Size]) -> Value:
        """An int64 vector of integers and run-time sizes."""
        if all(isinstance(d, int) for d in dims):
            return self.constant(list(dims), "int64")
        return self.concat([d if isinstance(d, Value) else self.constant([d], "int64") for d in dims], 0)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        return values[0] if len(values) == 1 else values[0].op("Concat", *values[1:], axis=axis)

    def arange(self, count: Size) -> Value:
        """0 … count - 1, int64."""
        if isinstance(count, int):
            return self.constant(np.arange(count), "int64")
        return self.constant(0, "int64").op("Range", count.squeeze(0), self.constant(1, "int64"))

    def if_(
        self, condition: Value, then: Callable[[], Sequence[Value]], otherwise: Callable[[], Sequence[Value]]
    ) -> list[Value]:
        """The results of one of two branches; `condition` holds one element."""
        yes, dtypes = self._graph("then", [], then)
        no, _ = self._graph("else", [], otherwise)
        return self.node("If", [condition.reshape()], dtypes, then_branch=yes, else_branch=no)

    def loop(
        self, count: Value, state: Sequence[Value], step: Callable[..., tuple[Sequence[Value], Sequence[Value]]]
    ) -> list[Value]:
        """`step(i, *state)` gives the next state and values to stack; results: final state, then stacked values."""
        index, going = self._fresh("index", "int64"), self._fresh("going", "bool")
        inner = [self._fresh("state", v.dtype) for v in state]

        def run() -> Sequence[Value]:
            carried, stacked = step(index, *inner)
            return [going, *carried, *stacked]

        graph, dtypes = self._graph("step", [index, going, *inner], run)
        for formal in graph.input[:2]:  # iteration number and condition are scalars
            formal.type.tensor_type.shape.SetInParent()
        graph.output[0].type.tensor_type.shape.SetInParent()
        operands = [count.reshape(), self.constant(True, "bool"), *state]
        return self.node("Loop", operands, dtypes[1:], body=graph)

    def function(
        self, domain: str, name: str, overload: str, outputs: Mapping[str, Value], attributes: Sequence[str]
    ) -> onnx.FunctionProto:
        """The finished function; each result takes the name of its output."""
        nodes = [*self._constant_nodes, *self._nodes]
        names = {value.name: name for name, value in outputs.items()}
        if len(names) != len(outputs) or names.keys() & self.inputs.keys():
            raise ValueError(f"{name} {overload}: every output must be a result of its own")
        _rename(nodes, names)
        imports = [helper.make_opsetid("", OPSET)]
        return helper.make_function(
            domain, name, list(self.inputs), list(outputs), nodes, imports, list(attributes), overload=overload
        )

    def _fresh(self, stem: str, dtype: str) -> Value:
        self._count += 1
        return Value(self, f"{stem}_{self._count}", dtype)

    def _graph(
        self, name: str, inputs: Sequence[Value], make: Callable[[], Sequence[Value]]
    ) -> tuple[onnx.GraphProto, list[str]]:
        outer, self._nodes = self._nodes, []
        # A result may be a value of the enclosing graph, which ONNX allows only through a node.
        results = [value.op("Identity") for value in make()]
        nodes, self._nodes = self._nodes, outer
        return helper.make_graph(nodes, name, _infos(inputs), _infos(results)), [v.dtype for v in results]


def _infos(values: Sequence[Value]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(v.name, DTYPES[v.dtype], None) for v in values]


def _rename(nodes: Sequence[onnx.NodeProto], names: Mapping[str, str]) -> None:
    for node in nodes:
        for ports in (node.input, node.output):
            ports[:] = [names.get(port, port) for port in ports]
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(attribute.g.node, names)
