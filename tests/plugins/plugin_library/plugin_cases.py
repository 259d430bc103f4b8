"""Cases of the kernel tests as a plugin sees them: inputs and outputs in the order of the op table's ports.

Every form of every op has one, in float32 and in bfloat16, with steps of different shapes where the op has several ways
of working. The expected outputs are the PyTorch reference's.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from gated_delta_net_case import SMALL as GDN
from gated_delta_net_case import Row as GdnRow
from gated_delta_net_case import gated_delta_net_case
from gated_residual_case import gated_residual_case
from kernel_checks import Case, assert_close
from ngram_injection_case import SMALL as NGRAM
from ngram_injection_case import Row as NgramRow
from ngram_injection_case import ngram_injection_case
from sparse_attention_case import ATTRIBUTES as ATTENTION_ATTRIBUTES
from sparse_attention_case import SMALL as ATTENTION
from sparse_attention_case import Row as AttentionRow
from sparse_attention_case import sparse_attention_case
from sparse_moe_case import FORMS as MOE_FORMS
from sparse_moe_case import sparse_moe_case

from flashnext.export.ops import schema
from flashnext.export.ops.ports import split_form
from flashnext.export.ops.reference import REFERENCES
from flashnext.plugins.params import field_of_port

KINDS = {
    torch.float32: 0, torch.float16: 1, torch.uint8: 2, torch.int32: 3, torch.float8_e4m3fn: 6, torch.bfloat16: 7
}  # fmt: skip
"""nvinfer1::DataType of a tensor; packed bytes come as INT8."""
INT32, FLOAT32, CHAR = 5, 1, 6
"""nvinfer1::PluginFieldType."""
F32, BF16 = torch.float32, torch.bfloat16
DTYPES = {"float32": F32, "bfloat16": BF16}


class Tensor(NamedTuple):
    """What the harness gets of a tensor; outputs come without data."""

    kind: int
    shape: tuple[int, ...]
    size: int
    data: bytes = b""


class Step(NamedTuple):
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass
class PluginCase:
    """One plugin, its profile, and the steps that it takes one after the other."""

    op: str
    form: str
    fields: list[tuple[str, int, int, bytes]]
    aliases: list[int]
    least: list[tuple[int, ...]]
    most: list[tuple[int, ...]]
    steps: list[Step]
    kernel_cases: list[Case] = field(repr=False)
    dtypes: dict[str, str] = field(default_factory=dict)
    in_place: int = 1

    @property
    def ports(self) -> schema.Form:
        return schema.op(self.op).form(self.form)

    def check(self, step: int, outputs: bytes) -> bytes:
        """Compare a step's outputs with what is expected; returns the bytes that follow them."""
        case = self.kernel_cases[step]
        for port, tensor in zip(self.ports.outputs, self.steps[step].outputs, strict=True):
            name = _field_name(self.op, self.ports, port.name)
            want = case.expected[name]
            got = torch.frombuffer(bytearray(outputs[: tensor.size]), dtype=torch.uint8)
            got = got.view(want.dtype).view(want.shape)
            outputs = outputs[tensor.size :]
            if name in case.ignored:
                got, want = (t.masked_fill(case.ignored[name], 0) for t in (got, want))
            if name == "blocks_out":  # a set: the reference lists them best first
                got, want = got.sort(-1).values, want.sort(-1).values
            what = f"{self.op} {self.form}, step {step}: {port.name}"
            if want.dtype == torch.float8_e4m3fn and self.op != "GatedResidual":
                assert_neighbours(got, want, what)
            else:
                assert_close(got, want, what, case.tolerances.get(name))
        return outputs


def assert_neighbours(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Sums run in another order than the reference's: a code may be its neighbour where the value lies between."""
    distance = (got.view(torch.uint8).int() - want.view(torch.uint8).int()).abs()
    assert (distance <= 1).all(), what
    assert (distance > 0).float().mean() < 0.01, what


def plugin_case(
    op: str, form: str, cases: Sequence[tuple[Case, int, int]], attributes: Mapping[str, Any], in_place: bool = True
) -> PluginCase:
    """`cases`: a launch, with the B and S that its tokens are for the plugin, for each step."""
    table, ports = schema.op(op), schema.op(op).form(form)
    steps = [_step(op, ports, case, batch, steps) for case, batch, steps in cases]
    sizes = schema.bind_sizes(table, ports, [t.shape for t in steps[0].inputs], attributes)
    batches, lengths = [batch for _, batch, _ in cases], [steps for _, _, steps in cases]
    names = [p.name for p in ports.inputs]
    return PluginCase(
        op,
        form,
        plugin_fields(table, form, attributes),
        [names.index(ports.aliases[p.name]) if p.name in ports.aliases else -1 for p in ports.outputs],
        [_shape(p, sizes | {"B": 1, "S": 1}) for p in ports.inputs],
        [_shape(p, sizes | {"B": max(batches), "S": max(lengths)}) for p in ports.inputs],
        steps,
        [case for case, _, _ in cases],
        in_place=int(in_place),
    )


def _step(op: str, ports: schema.Form, case: Case, batch: int, steps: int) -> Step:
    def tensor(port: schema.Port, with_data: bool) -> Tensor:
        value = case.values[_field_name(op, ports, port.name)].contiguous()
        shape = tuple(value.shape)
        if port.shape[:2] == ("B", "S") and len(shape) < len(port.shape):
            shape = (batch, steps, *shape[1:])
        data = value.view(torch.uint8).numpy().tobytes()
        return Tensor(KINDS[value.dtype], shape, len(data), data if with_data else b"")

    return Step(tuple(tensor(p, True) for p in ports.inputs), tuple(tensor(p, False) for p in ports.outputs))


def _field_name(op: str, form: schema.Form, port: str) -> str:
    return field_of_port(op, form.name, form.aliases.get(port, port))


def _shape(port: schema.Port, sizes: Mapping[str, object]) -> tuple[int, ...]:
    return tuple(int(schema.evaluate(d, sizes)) for d in port.shape)  # type: ignore[call-overload]


def plugin_fields(op: schema.Op, form: str, attributes: Mapping[str, Any]) -> list[tuple[str, int, int, bytes]]:
    """What the parser sends: name, PluginFieldType, number of entries, data."""
    return [_text_field("form", form), *(_field(a, attributes[a.name]) for a in op.attributes)]


def _field(attribute: schema.Attribute, value: Any) -> tuple[str, int, int, bytes]:
    if attribute.kind == "string":
        return _text_field(attribute.name, value)
    if attribute.kind == "int":
        return attribute.name, INT32, 1, struct.pack("i", value)
    return attribute.name, FLOAT32, 1, struct.pack("f", value)


def _text_field(name: str, value: str) -> tuple[str, int, int, bytes]:
    data = value.encode() + b"\0"
    return name, CHAR, len(data), data


# --- the ops ------------------------------------------------------------------------------------------


def case_of(op: str, form: str, dtype: str, in_place: bool = True) -> PluginCase:
    """The case of a form."""
    makers = {
        "GatedResidual": _gated_residual,
        "NgramInjection": _ngram_injection,
        "GatedDeltaNet": _gated_delta_net,
        "SparseAttention": _sparse_attention,
        "SparseMoE": _sparse_moe,
    }
    case = makers[op](form, DTYPES[dtype], in_place)
    case.dtypes = {"T": dtype}
    if op == "GatedDeltaNet":
        case.dtypes["U"] = _state_of(dtype)
    if form == "plain":
        case.dtypes["E"] = "bfloat16" if dtype == "bfloat16" else "float32"
    return case


def _gated_residual(form: str, dtype: torch.dtype, in_place: bool) -> PluginCase:
    plain, mode = split_form(form)
    sizes = {"branches": 3, "hidden": 40, "rank": 24}
    made = [
        (gated_residual_case(plain, tokens=b * s, **sizes, dtype=dtype, state=mode or "plain", seed=b * s), b, s)
        for b, s in ((2, 3), (1, 34), (1, 1))
    ]
    return plugin_case("GatedResidual", form, made, {"branches": 3, "eps": 1e-6}, in_place)


def _ngram_injection(form: str, dtype: torch.dtype, in_place: bool) -> PluginCase:
    plain, mode = split_form(form)
    rows = ([NgramRow(9, 2), NgramRow(0, 1), NgramRow(3, 0)], [NgramRow(0, 20), NgramRow(30, 17), NgramRow(0, 0)])
    made = [
        (ngram_injection_case(plain, row, steps, **NGRAM, dtype=dtype, state=mode or "plain"), 3, steps)
        for row, steps in zip(rows, (2, 20), strict=True)
    ]
    attributes = {"branches": NGRAM["branches"], "eps": 1e-6, "dilation": NGRAM["dilation"]}
    if mode:
        for case, _, _ in made:
            _expect_from_reference(case, "NgramInjection", form, attributes)
    return plugin_case("NgramInjection", form, made, attributes, in_place)


def _expect_from_reference(case: Case, op: str, form: str, attributes: Mapping[str, Any]) -> None:
    """What the reference of this very form gives: a case in bfloat16 rounds new branches twice, to it and to E4M3."""
    ports = schema.op(op).form(form)
    inputs = [case.values[_field_name(op, ports, p.name)].clone() for p in ports.inputs]
    outputs = REFERENCES[op][form](*inputs, **attributes)
    case.expected |= {
        _field_name(op, ports, port.name): value for port, value in zip(ports.outputs, outputs, strict=True)
    }


def _state_of(dtype: str) -> str:
    """Each activation dtype with the other format of the state."""
    return {"float32": "bfloat16", "bfloat16": "float32"}[dtype]


def _gated_delta_net(form: str, dtype: torch.dtype, in_place: bool) -> PluginCase:
    rows = ([GdnRow(20, 3, 2), GdnRow(0, 0, 1), GdnRow(3, 0, 0)], [GdnRow(20, 2, 70), GdnRow(0, 0, 5), GdnRow(4, 1, 0)])
    state = DTYPES[_state_of(str(dtype).removeprefix("torch."))]
    made = [
        (gated_delta_net_case(row, steps, **GDN, dtype=dtype, state=state, gate="silu"), 3, steps)
        for row, steps in zip(rows, (2, 70), strict=True)
    ]
    attributes = {"eps": 1e-6, "key_heads": GDN["key_heads"], "gate": "silu"}
    return plugin_case("GatedDeltaNet", form, made, attributes, in_place)


def _sparse_attention(form: str, dtype: torch.dtype, in_place: bool) -> PluginCase:
    plain, mode = split_form(form)
    # E4M3 codes are loaded 16 at a time.
    sizes = ATTENTION | ({"head_dim": 16, "fp8_scales": (0.1, 0.05)} if mode else {})
    # One sequence ends with the capacity, before the step's padding does.
    rows = ([AttentionRow(22, 2), AttentionRow(0, 1)], [AttentionRow(31, 9), AttentionRow(0, 9)])
    made = [
        (sparse_attention_case(plain, row, steps, capacity=40, **sizes, dtype=dtype), 2, steps)
        for row, steps in zip(rows, (2, 10), strict=True)
    ]
    attributes = {name: ATTENTION[name] for name in ATTENTION_ATTRIBUTES} | {"eps": 1e-6, "rope_scale": 1.0}
    return plugin_case("SparseAttention", form, made, attributes, in_place)


def _sparse_moe(form: str, dtype: torch.dtype, in_place: bool) -> PluginCase:
    weights = next(name for name, known in MOE_FORMS.items() if known == form)
    sizes = {"hidden": 64, "inner": 32, "experts": 5, "top_k": 2}
    made = [(sparse_moe_case(weights, tokens=b * s, **sizes, dtype=dtype, seed=1), b, s) for b, s in ((2, 2), (1, 20))]
    # One set of weights for all steps, as an engine has.
    return plugin_case("SparseMoE", form, made, {"top_k": 2, "normalize": 1}, in_place)
