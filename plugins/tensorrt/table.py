"""Writes op_table_data.h: the op table as the C++ of the plugins knows it.

    python -m flashnext.plugins.tensorrt.table          # writes it beside this file; a test checks that it is current

One generic plugin class serves all ops, so everything that tells ops apart is in this table: attributes, forms, ports
with dtypes and shapes, aliases (all from the op table), and how ports and attributes get into the kernels' parameter
structs (from their headers, as plugins/params.py reads them). What neither of these says is written down here:
dtypes that kernels exist for, the numbers of text attributes, bounds of the integers that a kernel takes for indices.

Dimensions become programs of a stack machine over the op's sizes: `2*D` is {2, D, *}.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flashnext.export.ops import schema
from flashnext.export.ops.ports import Attribute, Dim, Form, Op, Port
from flashnext.plugins.params import FORMATS, Field, Params, field_of_port, read_params

FILE = Path(__file__).with_name("op_table_data.h")

COMBINATIONS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "GatedResidual": {"float32": (), "bfloat16": ()},
    "NgramInjection": {"float32": (), "bfloat16": ()},
    "GatedDeltaNet": {"float32": ("float32", "bfloat16"), "bfloat16": ("float32", "bfloat16")},
    "SparseAttention": {"float32": (), "bfloat16": ()},
    "SparseMoE": {"float32": ("float32", "bfloat16"), "bfloat16": ("bfloat16",)},
}
"""Dtypes that kernels exist for: of the first type variable, and with each of the second. A test tries all others."""
CHOICES = {("GatedDeltaNet", "gate"): ("silu_gate", ("sigmoid", "silu"))}
"""Text attributes: the field that takes the number of the choice."""
BOUNDS: Mapping[str, Mapping[str, tuple[Dim, Dim]]] = {
    "NgramInjection": {"slots": (0, "P+-1"), "past_len": (0, 1 << 24), "new_len": (0, "S")},
    "GatedDeltaNet": {"slots": (0, "P+-1"), "past_len": (0, 1 << 24), "accepted": (0, "W"), "new_len": (0, "S")},
    "SparseAttention": {
        "slots": (0, "P+-1"),
        "past_len": (0, "C1+-1"),
        "new_len": (0, "S"),
        "blocks": (-1, "C1//block+-1"),
        "blocks_len": (0, "C1+-1"),
    },
}
"""Smallest and largest value of the integer inputs. Only runs on memory that nobody filled are held to them."""
SUMS: Mapping[str, Mapping[str, tuple[str, Dim]]] = {"SparseAttention": {"new_len": ("past_len", "C1+-1")}}
"""An input that is added to another one, which comes before it, and the largest value of the sum."""
PER_CONTEXT = "tickets"
"""The field of counters that live as long as the execution context."""
NOT_SIZES = {"SparseAttention": ("block",)}
"""Integer attributes without a size of their own that bounds need."""


def digest() -> str:
    """Of all that an engine relies on: ops, attributes, forms, ports with dtypes and shapes, aliases."""
    described = [
        [
            op.name,
            [[a.name, a.kind, a.size] for a in op.attributes],
            [
                [f.name, [_port(p) for p in f.inputs], [_port(p) for p in f.outputs], sorted(f.aliases.items())]
                for f in op.forms
            ],
        ]
        for op in schema.OPS
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def _port(port: Port) -> list[object]:
    return [port.name, port.dtype, list(port.shape)]


def text() -> str:
    """The header."""
    names = [schema.snake_name(op.name) for op in schema.OPS]
    lines = [
        "// Made by `python -m flashnext.plugins.tensorrt.table` from the op table and the kernels' params.h.",
        "#pragma once",
        "",
        "#include <cstddef>",
        "",
        *(f'#include "{name}/params.h"' for name in sorted(names)),
        '#include "tensorrt/op_table.h"',
        "",
        f"#define FLASHNEXT_OP_VERSION {schema.VERSION}",
        f'#define FLASHNEXT_PLUGIN_VERSION "{schema.PLUGIN_VERSION}"',
        f'#define FLASHNEXT_PLUGIN_NAMESPACE "{schema.PLUGIN_NAMESPACE}"',
        f'#define FLASHNEXT_OP_TABLE "{digest()}"',
        "",
        "namespace flashnext::trt {",
        "",
        "inline constexpr int kOpVersion = FLASHNEXT_OP_VERSION;",
        "inline constexpr char kTableDigest[] = FLASHNEXT_OP_TABLE;",
        "",
    ]
    for op in schema.OPS:
        lines += [*_OpWriter(op).lines(), ""]
    lines += [f"inline constexpr OpRow kOps[] = {{{', '.join(f'{name}_op::kOp' for name in names)}}};"]
    return "\n".join([*lines, "", "}  // namespace flashnext::trt", ""])


class _OpWriter:
    """The lines of one op; collects its sizes and programs on the way."""

    def __init__(self, op: Op) -> None:
        self.op, self.name = op, schema.snake_name(op.name)
        self.params: Params = read_params(self.name)
        self.struct = f"{op.name}Params"
        self.sizes = _sizes(op)
        self.variables = [v for v in op.type_variables if v not in schema.PLUGIN_DTYPES]
        self.programs: dict[str, int] = {}
        self.code: list[str] = []

    def lines(self) -> list[str]:
        forms = [line for form in self.op.forms for line in self.form(form)]
        rows = [f"    {self.form_row(form)}," for form in self.op.forms]
        attributes = [f"    {self.attribute(a)}," for a in self.op.attributes]
        counters = self.counters()  # before kCode is written: what is asked for adds to it
        return [
            f"namespace {self.name}_op {{",
            "",
            f"inline constexpr const char* kSizes[] = {{{', '.join(map(_quoted, self.sizes))}}};",
            "inline constexpr Code kCode[] = {",
            *self.code,
            "};",
            "inline constexpr AttributeRow kAttributes[] = {",
            *attributes,
            "};",
            f"inline constexpr Combination kCombinations[] = {{{', '.join(self.combinations())}}};",
            *forms,
            "inline constexpr FormRow kForms[] = {",
            *rows,
            "};",
            f'inline constexpr OpRow kOp = {{"{self.op.name}", "{self.name}", kSizes, kCode, kAttributes,',
            f"                               kCombinations, kForms, sizeof({self.struct}),",
            f"                               {self.offset('workspace')}, {self.offset('stream')},",
            f"                               {counters}}};",
            "",
            f"}}  // namespace {self.name}_op",
        ]

    # --- what is in a form ----------------------------------------------------------------------------

    def form(self, form: Form) -> list[str]:
        prefix = _camel(form.name)
        inputs = [self.port(form, p, -1) for p in form.inputs]
        names = [p.name for p in form.inputs]
        outputs = [
            self.port(form, p, names.index(form.aliases[p.name]) if p.name in form.aliases else -1)
            for p in form.outputs
        ]
        bounds = BOUNDS.get(self.op.name, {})
        ranges = [
            f"    {{{i}, {self.program(bounds[p.name][0])}, {self.program(bounds[p.name][1])}, {self.sum(p, names)}}},"
            f"  // {p.name}"
            for i, p in enumerate(form.inputs)
            if p.name in bounds
        ]
        return [
            *_array("PortRow", f"k{prefix}Inputs", inputs),
            *_array("PortRow", f"k{prefix}Outputs", outputs),
            *_array("SizeField", f"k{prefix}Sizes", self.size_fields(form)),
            *_array("FormatField", f"k{prefix}Formats", self.format_fields(form)),
            *(_array("BoundRow", f"k{prefix}Bounds", ranges) if ranges else []),
        ]

    def form_row(self, form: Form) -> str:
        prefix = _camel(form.name)
        has_bounds = any(p.name in BOUNDS.get(self.op.name, {}) for p in form.inputs)
        bounds = f"k{prefix}Bounds" if has_bounds else "{}"
        return f'{{"{form.name}", k{prefix}Inputs, k{prefix}Outputs, k{prefix}Sizes, k{prefix}Formats, {bounds}}}'

    def port(self, form: Form, port: Port, alias: int) -> str:
        # A state is one field for input and output: the output's row leads to it.
        name = form.aliases.get(port.name, port.name)
        dims = ", ".join(str(self.program(d)) for d in port.shape)
        offset = self.offset(field_of_port(self.op.name, form.name, name))
        row = f'{{"{port.name}", {self.type(port.dtype)}, {len(port.shape)}, {{{dims}}}, {offset}, {alias}}}'
        return f"    {row},  // [{', '.join(map(str, port.shape))}]"

    def size_fields(self, form: Form) -> list[str]:
        found = size_expressions(self.op, form, self.params)
        return [f"    {{{self.offset(name)}, {self.program(dim)}}},  // {name} = {dim}" for name, dim in found.items()]

    def format_fields(self, form: Form) -> list[str]:
        found = format_dtypes(self.op, form, self.params)
        return [f"    {{{self.offset(name)}, {self.type(dtype)}}}," for name, dtype in found.items()]

    def sum(self, port: Port, inputs: Sequence[str]) -> str:
        """The input that the port's values are added to, or -1, and the largest sum."""
        other, largest = SUMS.get(self.op.name, {}).get(port.name, ("", 0))
        return f"{inputs.index(other)}, {self.program(largest)}" if other else "-1, 0"

    def attribute(self, attribute: Attribute) -> str:
        kind = {"int": "integer", "float": "number", "string": "text"}[attribute.kind]
        size = self.sizes.index(_size_name(self.op, attribute)) if _size_name(self.op, attribute) else -1
        field, choices = CHOICES.get((self.op.name, attribute.name), (attribute.name, ()))
        kinds = {f.name: f.kind for f in self.params.fields}
        # Those that are sizes reach the struct as such.
        offset = self.offset(field) if kinds.get(field) == "attribute" else "-1"
        return f'{{"{attribute.name}", Kind::{kind}, {size}, {offset}, {{{", ".join(map(_quoted, choices))}}}}}'

    def combinations(self) -> Iterable[str]:
        for first, others in COMBINATIONS[self.op.name].items():
            for second in others or (first,):
                yield f"{{{FORMATS[first]}, {FORMATS[second]}}}"

    def counters(self) -> str:
        """The offset of the field of counters, and the program of their number."""
        field = next((f for f in self.params.fields if f.name == PER_CONTEXT), None)
        if field is None:
            return "-1, -1"
        sizes = size_expressions(self.op, self.op.forms[0], self.params)
        return f"{self.offset(field.name)}, {self.program('*'.join(f'({sizes[d]})' for d in field.shape))}"

    # --- small things ---------------------------------------------------------------------------------

    def offset(self, field: str) -> str:
        return f"offsetof({self.struct}, {field})"

    def type(self, dtype: str) -> str:
        """{type variable or -1, fixed dtype}."""
        if dtype in self.variables:
            return f"{{{self.variables.index(dtype)}, 0}}"
        # Packed bytes are INT8 for TensorRT and uint8 for kernels, so only codes are typed here.
        typed = schema.PLUGIN_DTYPES[dtype] if dtype in self.op.type_variables else dtype
        return f"{{-1, {FORMATS[typed]}}}"

    def program(self, dim: Dim) -> int:
        """Number of the dimension's program in kCode, where each ends with kEnd."""
        key = str(dim)
        if key not in self.programs:
            self.programs[key] = sum(line.count("{") for line in self.code)
            steps = [*_steps(ast.parse(key, mode="eval").body, self.sizes), "{Step::end, 0}"]
            self.code.append(f"    {', '.join(steps)},  // {key}")
        return self.programs[key]


def size_expressions(op: Op, form: Form, params: Params) -> dict[str, Dim]:
    """What each size field of the struct is, as a dimension of the op table; what the form leaves at 0 is absent."""
    found: dict[str, Dim] = {a.name: a.size for a in op.attributes if a.size}
    for field, shape in _bound_tensors(op, form, params):
        for name, dim in zip(field.shape, shape, strict=True):
            if name.isidentifier():
                found.setdefault(name, dim)
    return {f.name: found[f.name] for f in params.fields if f.kind == "size" and f.name in found}


def format_dtypes(op: Op, form: Form, params: Params) -> dict[str, str]:
    """What each format field of the struct is: a dtype, or a type variable of the op."""
    dtypes = {p.name: p.dtype for p in (*form.outputs, *form.inputs)}
    found: dict[str, str] = {}
    for field, port in ports_of_fields(op, form, params):
        if field.format not in FORMATS:
            found.setdefault(field.format, dtypes[port.name])
    return {f.name: found[f.name] for f in params.fields if f.kind == "format" and f.name in found}


def _bound_tensors(op: Op, form: Form, params: Params) -> Iterable[tuple[Field, Sequence[Dim]]]:
    """Tensor fields with the shape of their port; B and S are one dimension where the struct knows tokens only."""
    for field, port in ports_of_fields(op, form, params):
        flat = field.shape[0] == "tokens" and port.shape[:2] == ("B", "S")
        yield field, ("B*S", *port.shape[2:]) if flat else port.shape


def ports_of_fields(op: Op, form: Form, params: Params) -> Iterable[tuple[Field, Port]]:
    """The ports of a form with their fields; a state once."""
    fields = {f.name: f for f in params.fields}
    for port in (*form.inputs, *form.outputs):
        if port.name not in form.aliases:
            yield fields[field_of_port(op.name, form.name, port.name)], port


def _sizes(op: Op) -> list[str]:
    """The op's sizes: names in its shapes, attributes, and what bounds need beside them. B and S come first."""
    names = ["B", "S"]
    shapes = [p.shape for f in op.forms for p in (*f.inputs, *f.outputs)]
    names += [name for shape in shapes for name in names_in(shape)]
    names += [name for a in op.attributes if (name := _size_name(op, a))]
    return list(dict.fromkeys(names))


def names_in(shape: Sequence[Dim]) -> list[str]:
    """The sizes that a shape is made of."""
    return [n.id for d in shape for n in ast.walk(ast.parse(str(d))) if isinstance(n, ast.Name)]


def _size_name(op: Op, attribute: Attribute) -> str:
    return attribute.size or (attribute.name if attribute.name in NOT_SIZES.get(op.name, ()) else "")


def _steps(node: ast.expr, sizes: Sequence[str]) -> Iterable[str]:
    """Postfix steps of an expression."""
    if isinstance(node, ast.BinOp):
        names: dict[type[ast.operator], str] = {ast.Add: "add", ast.Mult: "multiply", ast.FloorDiv: "divide"}
        yield from _steps(node.left, sizes)
        yield from _steps(node.right, sizes)
        yield f"{{Step::{names[type(node.op)]}, 0}}"
    elif isinstance(node, ast.Name):
        yield f"{{Step::size, {sizes.index(node.id)}}}"
    else:
        yield f"{{Step::constant, {ast.literal_eval(node)}}}"


def _array(kind: str, name: str, rows: Sequence[str]) -> list[str]:
    return [f"inline constexpr {kind} {name}[] = {{", *rows, "};"]


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _quoted(name: str) -> str:
    return f'"{name}"'


def main() -> int:
    """Write the header."""
    FILE.write_text(text(), encoding="utf-8")
    print(FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
