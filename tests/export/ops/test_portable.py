"""The portable functions in ONNX Runtime against the PyTorch reference, over random shapes and schedules.

Every call is compared in full: outputs of valid tokens, and every state except the places that take what goes
nowhere. States are bound in place (one buffer as input and output), as the runtime does, unless a test says otherwise.

`FLASHNEXT_EXAMPLES=500` runs that many random cases of each test instead of 25.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashnext.export import number_formats
from flashnext.export.ops import schema
from flashnext.export.ops.portable import fp8_codes
from flashnext.export.ops.portable.builder import DTYPES, OPSET, Body
from flashnext.export.ops.reference import REFERENCES
from flashnext.export.ops.reference.residual_store import quantize

from .portable_model import EXAMPLES, TOLERANCE, dtypes_with, model, near, session


class Case:
    """One (op, form) with its sizes, in ONNX Runtime and as the reference."""

    def __init__(
        self, op: str, form: str, sizes: dict[str, int], attributes: dict[str, Any], steps: str = "any"
    ) -> None:
        self.op, self.form, self.attributes = op, form, attributes
        self.ports = schema.op(op).form(form)
        self.sizes = {**sizes, **{a.size: attributes[a.name] for a in schema.op(op).attributes if a.size}}
        self.dtypes = dtypes_with(op, "float32")
        described = (tuple(sorted(d.items())) for d in (sizes, attributes, self.dtypes))
        self.session = session(op, form, *described, steps)

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
        memory = {name: a.copy() for name, a in inputs.items()}
        values = {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in memory.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for port in self.ports.outputs:
            if port.name in self.ports.aliases:
                binding.bind_ortvalue_output(port.name, values[self.ports.aliases[port.name]])
            else:
                binding.bind_output(port.name)
        self.session.run_with_iobinding(binding)
        out = {p.name: v.numpy().copy() for p, v in zip(self.ports.outputs, binding.get_outputs(), strict=True)}
        return {**out, **{state: memory[name] for state, name in self.ports.aliases.items()}}


E4M3_NAN = 0x7F
MOST_OTHER_CODES = 2
OTHER_CODES = 5e-2
"""Largest error of what is computed from another code."""


def dirty(shape: list[int], dtype: str) -> np.ndarray:
    """What memory holds before a sequence: NaN, in floats and in codes."""
    return np.full(shape, E4M3_NAN, np.uint8) if dtype == "C" else np.full(shape, np.nan, np.float32)


def normal(case: Case, seed: int, **steps: int) -> dict[str, np.ndarray]:
    """Standard normal values for every float input."""
    random = np.random.default_rng(seed)
    ports = [p for p in case.ports.inputs if p.dtype != "int32"]
    return {p.name: random.standard_normal(case.shape(p.name, **steps), np.float32) for p in ports}


# --- steps of sequences in slots --------------------------------------------------------------------


@dataclasses.dataclass
class Schedule:
    """Sequences in slots that grow step by step, some tokens of a short step being dropped by the next one.

    Both runs keep states of their own, at first all NaN; a slot that starts again is filled with NaN once more.
    """

    case: Case
    slots: int
    window: int
    random: np.random.Generator
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        ports = {p.name: p for p in self.case.ports.inputs}
        states = [ports[name] for name in self.case.ports.aliases.values()]
        self.states = [{p.name: dirty(self.case.shape(p.name), p.dtype) for p in states} for _ in "ab"]
        self.cache_scales = 2 ** self.random.uniform(-12, 1, (2, 1)).astype(np.float32)  # the smallest ones saturate
        self.past = np.zeros(self.slots, np.int32)
        self.pending = np.zeros(self.slots, np.int32)

    def restart(self, slot: int) -> None:
        self.past[slot] = self.pending[slot] = 0
        for states in self.states:
            for state in states.values():
                state[slot] = E4M3_NAN if state.dtype == np.uint8 else np.nan

    def rows(self, batch: int, steps: int) -> dict[str, np.ndarray]:
        """Slots and lengths of a step: distinct slots in any order, the rest of the rows padding; ragged."""
        slots = np.full(batch, self.slots, np.int32)
        count = min(batch, self.slots)
        slots[self.random.permutation(batch)[:count]] = self.random.permutation(self.slots)[:count]
        real = slots < self.slots
        choices = np.where(self.random.random(batch) < 0.5, steps, self.random.integers(0, steps + 1, batch))
        accepted = np.zeros(batch, np.int32)
        accepted[real] = self.random.integers(0, self.pending[slots[real]] + 1)
        past = np.zeros(batch, np.int32)
        past[real] = self.past[slots[real]] + accepted[real]
        new = np.where(real, choices, 0).astype(np.int32)
        return {"slots": slots, "past_len": past, "accepted": accepted, "new_len": new}

    def step(self, inputs: dict[str, np.ndarray], in_place: bool = True) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Run both, compare states and the outputs of valid tokens; returns the reference's outputs and that mask."""
        case = self.case
        names = [p.name for p in case.ports.inputs]
        want, got = (
            run({name: {**inputs, **states}[name] for name in names})
            for run, states in zip(
                (case.reference, partial(case.portable, in_place=in_place)), self.states, strict=True
            )
        )
        steps = inputs[case.ports.inputs[0].name].shape[1]
        valid = np.arange(steps) < inputs["new_len"][:, None]
        tolerance = self.tolerance if self.same_codes(got, want) else OTHER_CODES
        for port in case.ports.outputs:
            name = port.name
            if name in case.ports.aliases:
                near(self.readable(got[name], port), self.readable(want[name], port), name)
                for states, out in zip(self.states, (want, got), strict=True):
                    states[case.ports.aliases[name]] = out[name]
            elif port.shape[:2] == ("B", "S"):
                assert np.isfinite(got[name]).all(), f"{name} at tokens that are padding"
                near(got[name][valid], want[name][valid], name, tolerance)
            else:
                np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        for slot, past, new in zip(inputs["slots"], inputs["past_len"], inputs["new_len"], strict=True):
            if new:
                self.past[slot] = past if steps <= self.window else past + new
                self.pending[slot] = new if steps <= self.window else 0
        return want, valid

    def same_codes(self, got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> bool:
        """A value between two codes may become either of them; then both runs go on with the reference's."""
        same = True
        for port in self.case.ports.outputs:
            if port.dtype == "C":
                codes, wanted = (self.readable(out[port.name], port).astype(int) for out in (got, want))
                differ = codes != wanted
                assert (np.abs(codes - wanted)[differ] == 1).all(), port.name
                assert differ.sum() <= MOST_OTHER_CODES, port.name
                got[port.name] = want[port.name].copy()
                same = same and not differ.any()
        return same

    def readable(self, state: np.ndarray, port: schema.Port) -> np.ndarray:
        """Without the places that take what goes nowhere."""
        return state[:-1, :-1] if port.shape[1] in ("C1", "NB1") else state[:-1]


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


def code_inputs(case: Case, seed: int, **steps: int) -> dict[str, np.ndarray]:
    """Inputs of a quantized form: any codes but NaN, scales over three orders of magnitude."""
    random = np.random.default_rng(seed)
    inputs = {}
    for port in case.ports.inputs:
        shape = case.shape(port.name, **steps)
        inputs[port.name] = random.standard_normal(shape, np.float32)
        if "scale" in port.name:
            inputs[port.name] = 10 ** random.uniform(-4, -1, shape).astype(np.float32)
        if (port.dtype, "weight" in port.name) == ("C", False):  # E4M3 scales: 2^-6 … 2^3
            inputs[port.name] = random.integers(0x08, 0x51, shape).astype(np.uint8)
        elif port.dtype in ("C", "uint8"):
            codes = random.integers(0, 256, shape).astype(np.uint8)
            inputs[port.name] = np.where((codes & 0x7F == 0x7F) & (port.dtype == "C"), np.uint8(1), codes)
    return inputs


@pytest.mark.parametrize(("form", "sizes"), [("fp8_block", (130, 7)), ("fp8_block", (24, 129)), ("nvfp4", (144, 32))])
@EXAMPLES
@given(batch=st.integers(1, 3), steps=st.integers(1, 5), seed=st.integers(0, 1000))
def test_quantized_sparse_moe(form: str, sizes: tuple[int, int], batch: int, steps: int, seed: int) -> None:
    hidden, inner = sizes
    attributes = {"top_k": 3, "normalize": 1}
    case = Case("SparseMoE", form, {"H": hidden, "I": inner, "experts": 16}, attributes)
    inputs = code_inputs(case, seed, B=batch, S=steps)
    want = case.reference(inputs)["y"]
    near(case.portable(inputs)["y"], want, "y")
    typed = [torch.from_numpy(inputs[p.name]) for p in case.ports.inputs]  # a plugin's dtypes: the same meaning
    typed = [
        t.view(torch.float8_e4m3fn) if p.dtype == "C" else t for p, t in zip(case.ports.inputs, typed, strict=True)
    ]
    np.testing.assert_array_equal(REFERENCES["SparseMoE"][form](*typed, **attributes).numpy(), want)


# --- GatedDeltaNet --------------------------------------------------------------------------------

GDN_SIZES = {"P": 4, "Q": 7, "W": 4, "V": 4, "Dk": 8, "Dv": 6, "width": 4}
GDN_SMALL = {"P": 3, "Q": 2, "W": 1, "V": 2, "Dk": 4, "Dv": 4, "width": 2}
"""A window of one token, one value head for each key head, the shortest convolution and ring."""
GDN_ATTRIBUTES = {"eps": 1e-6, "key_heads": 2, "gate": "sigmoid"}


def gdn_inputs(schedule: Schedule, batch: int, steps: int, keys: str, decay: str) -> dict[str, np.ndarray]:
    case, random = schedule.case, schedule.random
    inputs = normal(case, int(random.integers(1 << 30)), B=batch, S=steps)
    if keys == "equal":  # the product form of the inverse fails on these
        inputs["qkv"][:] = inputs["qkv"][:1, :1]
        inputs["b"] += 20
    if decay == "strong":
        inputs["a"] += np.where(random.random(inputs["a"].shape) < 0.3, 1e4, 0).astype("f4")
    elif decay == "none":
        inputs["a"] -= 30
    return {**inputs, **schedule.rows(batch, steps)}


@EXAMPLES
@given(
    seed=st.integers(0, 1000),
    plan=st.lists(st.sampled_from([1, 2, 3, 4, 4, 5, 63, 64, 65, 130]), min_size=1, max_size=5),
    batch=st.integers(1, 4),
    keys=st.sampled_from(["free", "equal"]),
    decay=st.sampled_from(["normal", "strong", "none"]),
    gate=st.sampled_from(["sigmoid", "silu"]),
    sizes=st.sampled_from([GDN_SIZES, GDN_SMALL]),
    in_place=st.booleans(),
)
def test_gated_delta_net(
    seed: int, plan: list[int], batch: int, keys: str, decay: str, gate: str, sizes: dict[str, int], in_place: bool
) -> None:
    case = Case("GatedDeltaNet", "default", sizes, {**GDN_ATTRIBUTES, "gate": gate})
    # Where heads nearly cancel, their RMSNorm magnifies rounding: to 3e-5 at most against float64 in 3,000 runs with
    # equal keys, by this form and by the float32 reference alike (2e-7 on average).
    schedule = Schedule(case, sizes["P"] - 1, sizes["W"], np.random.default_rng(seed), tolerance=2e-4)
    for steps in plan:
        if schedule.random.random() < 0.2:
            schedule.restart(int(schedule.random.integers(schedule.slots)))
        schedule.step(gdn_inputs(schedule, batch, steps, keys, decay), in_place)


@pytest.mark.parametrize("steps", [3, 70])
def test_gated_delta_net_with_a_state_in_bf16(steps: int) -> None:
    """The state is widened when it is read and rounded once when it is written; the graph's edges cast it for NumPy."""
    made = model("GatedDeltaNet", "default", GDN_SIZES, GDN_ATTRIBUTES, {"T": "float32", "U": "bfloat16"})
    for values, name in ((made.graph.input, "recurrent_state"), (made.graph.output, "recurrent_state_out")):
        port = next(v for v in values if v.name == name)
        port.name, port.type.tensor_type.elem_type = f"wide_{name}", onnx.TensorProto.FLOAT
    narrow = onnx.helper.make_node("Cast", ["wide_recurrent_state"], ["recurrent_state"], to=onnx.TensorProto.BFLOAT16)
    wide = onnx.helper.make_node(
        "Cast", ["recurrent_state_out"], ["wide_recurrent_state_out"], to=onnx.TensorProto.FLOAT
    )
    nodes = [narrow, *made.graph.node, wide]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    case = Case("GatedDeltaNet", "default", GDN_SIZES, GDN_ATTRIBUTES)
    schedule = Schedule(case, 3, 4, np.random.default_rng(steps))
    inputs = gdn_inputs(schedule, 2, steps, "free", "normal") | {"past_len": np.array([9, 0], np.int32)}
    inputs |= {"accepted": np.array([2, 0], np.int32), "new_len": np.array([steps, steps - 1], np.int32)}
    tensors = {name: torch.from_numpy(a.copy()) for name, a in inputs.items()}
    tensors["recurrent_state"] = tensors["recurrent_state"].bfloat16()
    ordered = [tensors[p.name] for p in case.ports.inputs]
    y, _, want, _ = REFERENCES["GatedDeltaNet"]["default"](*ordered, **GDN_ATTRIBUTES)
    fed = {f"wide_{name}" if name == "recurrent_state" else name: a for name, a in inputs.items()}
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    got_y, got = session.run(["y", "wide_recurrent_state_out"], fed)
    valid = np.arange(steps) < inputs["new_len"][:, None]
    near(got_y[valid], y.numpy()[valid], "y", tolerance=2e-4)
    slots = inputs["slots"]
    rounded, exact = torch.from_numpy(got[slots]), want[slots].float()
    assert ((rounded - exact).abs() <= 2**-7 * exact.abs() + 1e-6).all()
    assert (rounded == exact).float().mean() > 0.99


# --- NgramInjection -------------------------------------------------------------------------------

NGRAM_SIZES = {"P": 4, "Q": 10, "n": 4, "H": 6, "width": 3}
NGRAM_ATTRIBUTES = {"branches": 4, "eps": 1e-6, "dilation": 3}


@pytest.mark.parametrize("form", ["embed", "pending"])
@EXAMPLES
@given(
    seed=st.integers(0, 1000),
    plan=st.lists(st.sampled_from([1, 2, 4, 5, 11, 30]), min_size=1, max_size=6),
    batch=st.integers(1, 4),
    in_place=st.booleans(),
)
def test_ngram_injection(form: str, seed: int, plan: list[int], batch: int, in_place: bool) -> None:
    case = Case("NgramInjection", form, NGRAM_SIZES, NGRAM_ATTRIBUTES)
    schedule = Schedule(case, NGRAM_SIZES["P"] - 1, 4, np.random.default_rng(seed))
    for steps in plan:
        if schedule.random.random() < 0.2:
            schedule.restart(int(schedule.random.integers(schedule.slots)))
        inputs = normal(case, int(schedule.random.integers(1 << 30)), B=batch, S=steps)
        schedule.step({**inputs, **schedule.rows(batch, steps)}, in_place)


# --- SparseAttention ------------------------------------------------------------------------------

QSA_ATTRIBUTES = {
    "eps": 1e-6, "heads": 4, "kv_heads": 2, "head_dim": 8, "index_heads": 2, "index_head_dim": 6, "block": 4,
    "budget_blocks": 3, "rope_scale": 1.1,
}  # fmt: skip
QSA_SIZES = {"P": 4, "C1": 401, "NB1": 101, "Q": 8, "F": 2, "W": 4}


def qsa_inputs(schedule: Schedule, batch: int, steps: int, ties: bool) -> dict[str, np.ndarray]:
    inputs = normal(schedule.case, int(schedule.random.integers(1 << 30)), B=batch, S=steps)
    inputs["inv_freq"] = np.geomspace(1.0, 0.01, schedule.case.sizes["F"]).astype(np.float32)
    if "k_scale" in inputs:
        inputs["k_scale"], inputs["v_scale"] = schedule.cache_scales
    if ties:  # a query of zeros scores every block the same, exactly
        inputs["index_qk"][schedule.random.random((batch, steps)) < 0.7] = 0
    return {**inputs, **schedule.rows(batch, steps)}


@pytest.mark.parametrize("form", ["select", "select_return", "select_fp8_cache", "select_return_fp8_cache"])
@EXAMPLES
@given(
    seed=st.integers(0, 1000),
    plan=st.lists(st.sampled_from([1, 2, 3, 4, 4, 5, 17, 63, 64, 65]), min_size=1, max_size=5),
    batch=st.integers(1, 4),
    block=st.sampled_from([1, 4]),
    budget=st.sampled_from([1, 3, 30]),
    ties=st.booleans(),
    in_place=st.booleans(),
)
def test_sparse_attention(
    form: str, seed: int, plan: list[int], batch: int, block: int, budget: int, ties: bool, in_place: bool
) -> None:
    # Blocks of one token have no unfinished tail; there all columns of the indexer turn.
    sizes = {**QSA_SIZES, "NB1": 400 // block + 1, "F": 3 if block == 1 else 2}
    case = Case("SparseAttention", form, sizes, {**QSA_ATTRIBUTES, "block": block, "budget_blocks": budget})
    schedule = Schedule(case, sizes["P"] - 1, sizes["W"], np.random.default_rng(seed))
    for steps in plan:
        if schedule.random.random() < 0.2:
            schedule.restart(int(schedule.random.integers(schedule.slots)))
        schedule.step(qsa_inputs(schedule, batch, steps, ties), in_place)


@pytest.mark.parametrize("cache", ["", "_fp8_cache"])
@EXAMPLES
@given(
    seed=st.integers(0, 1000),
    plan=st.lists(st.sampled_from([1, 2, 5, 17, 64]), min_size=1, max_size=3),
    drafts=st.lists(st.sampled_from([1, 1, 2, 6]), min_size=1, max_size=3),
    batch=st.integers(1, 4),
    in_place=st.booleans(),
)
def test_sparse_attention_with_given_blocks(
    cache: str, seed: int, plan: list[int], drafts: list[int], batch: int, in_place: bool
) -> None:
    first = Case("SparseAttention", f"select_return{cache}", QSA_SIZES, QSA_ATTRIBUTES)
    schedule = Schedule(first, QSA_SIZES["P"] - 1, 0, np.random.default_rng(seed))
    blocks, lengths = np.full((4, 3), -1, np.int32), np.zeros(4, np.int32)
    for steps in plan:
        inputs = qsa_inputs(schedule, batch, steps, False)
        out, _ = schedule.step(inputs, in_place)
        fed = inputs["new_len"] > 0
        blocks[inputs["slots"][fed]] = out["blocks_out"][fed]
        lengths[inputs["slots"][fed]] = (inputs["past_len"] + inputs["new_len"])[fed]
    schedule.case = Case("SparseAttention", f"given{cache}", QSA_SIZES, QSA_ATTRIBUTES)
    for steps in drafts:
        inputs = qsa_inputs(schedule, batch, steps, False)
        inputs.update(blocks=blocks[inputs["slots"]], blocks_len=lengths[inputs["slots"]])
        schedule.step(inputs, in_place)


def test_codes_are_those_of_the_reference() -> None:
    """Every code, what lies between two, beyond them, and values of every exponent."""
    grid = np.abs(number_formats.E4M3[:E4M3_NAN])
    between = np.concatenate([(grid[1:] + grid[:-1]) / 2, np.nextafter((grid[1:] + grid[:-1]) / 2, np.float32(np.inf))])
    random = np.random.default_rng(0).standard_normal(4096, np.float32)
    spread = random * np.float32(2.0) ** np.arange(-140, 116, 0.0625).astype(np.float32)
    odd = np.array([0.0, np.inf, 448.0, 463.9, 464.0, 480.0, 1e-45], np.float32)
    x = np.concatenate([grid, between.astype(np.float32), spread, odd])
    x = np.concatenate([x, -x, [np.float32(np.nan)]]).astype(np.float32)
    body = Body({"x": "float32"})
    function = body.function(
        "test", "Codes", "", {"y": fp8_codes.packed(fp8_codes.rounded(body.inputs["x"]), "uint8", 0)}, ()
    )
    infos = [onnx.helper.make_tensor_value_info(n, t, [None]) for n, t in (("x", 1), ("y", 2))]
    node = onnx.helper.make_node("Codes", ["x"], ["y"], domain="test")
    imports = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid("test", 1)]
    graph = onnx.helper.make_graph([node], "codes", infos[:1], infos[1:])
    made = onnx.helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session.run(["y"], {"x": x})[0]
    want = quantize(torch.from_numpy(x), torch.tensor(1.0)).view(torch.uint8).numpy()
    np.testing.assert_array_equal(got[:-1], want[:-1])
    assert got[-1] & 0x7F == E4M3_NAN


# --- functions for few or many tokens only --------------------------------------------------------


@pytest.mark.parametrize("steps", ["few", "many"])
@pytest.mark.parametrize("op", ["GatedDeltaNet", "SparseAttention", "SparseMoE"])
def test_without_a_branch_on_the_step_size(op: str, steps: str) -> None:
    case = Case(op, schema.op(op).forms[0].name, *MODELS[op], steps)
    schedule = Schedule(case, 3, 4, np.random.default_rng(0), tolerance=2e-4)
    for size in (3, 1, 4) if steps == "few" else (70, 5, 64):
        inputs = {**normal(case, size, B=2, S=size), **schedule.rows(2, size)}
        inputs["inv_freq"] = np.array([1.0, 0.01], np.float32)
        schedule.step(inputs)


# --- every function as a model --------------------------------------------------------------------

MODELS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "GatedResidual": ({"n": 4, "H": 16, "rank": 6}, {"branches": 4, "eps": 1e-6}),
    "SparseMoE": ({"H": 32, "I": 16, "experts": 16}, {"top_k": 3, "normalize": 1}),
    "GatedDeltaNet": (GDN_SIZES, GDN_ATTRIBUTES),
    "NgramInjection": (NGRAM_SIZES, NGRAM_ATTRIBUTES),
    "SparseAttention": (QSA_SIZES, QSA_ATTRIBUTES),
}
FORMS = [(op.name, form.name) for op in schema.OPS for form in op.forms]


@pytest.mark.parametrize("activation", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("op", "form"), FORMS)
def test_is_a_valid_model(op: str, form: str, activation: str) -> None:
    dtypes = dtypes_with(op, activation)
    made = model(op, form, *MODELS[op], dtypes)
    onnx.checker.check_model(made, full_check=True)
    inlined = onnx.inliner.inline_local_functions(made)
    onnx.checker.check_model(inlined, full_check=True)
    assert not inlined.functions
    found = onnx.shape_inference.infer_shapes(inlined, strict_mode=True, data_prop=True)
    assert [o.type.tensor_type.elem_type for o in found.graph.output] == [
        DTYPES[dtypes.get(p.dtype, p.dtype)] for p in schema.op(op).form(form).outputs
    ]


def used(node: onnx.NodeProto) -> set[str]:
    """Values that a node needs, those that its subgraphs take from outside included."""
    inner = [n for a in node.attribute if a.HasField("g") for n in a.g.node]
    return set(node.input).union(*(used(n) for n in inner))


@pytest.mark.parametrize("steps", ["any", "few", "many"])
@pytest.mark.parametrize(("op", "form"), [f for f in FORMS if schema.op(f[0]).form(f[1]).aliases])
def test_a_state_is_read_before_it_is_written(op: str, form: str, steps: Any) -> None:
    """One buffer is input and output: each node that reads the state must be an ancestor of the one that writes it."""
    function = model(op, form, *MODELS[op], dtypes_with(op, "float32"), steps).functions[0]
    makers = {name: node for node in function.node for name in node.output}
    for state_out, state in schema.op(op).form(form).aliases.items():
        write = makers[state_out]
        assert (write.op_type, write.input[0]) == ("ScatterND", state)
        ancestors, open_ = set(), list(write.input[1:])
        while open_:
            node = makers.get(open_.pop())
            if node is not None and node.name not in ancestors:
                ancestors.add(node.name)
                open_ += used(node)
        readers = [n for n in function.node if state in used(n) and n.name != write.name]
        assert [n.name for n in readers if n.name not in ancestors] == [], state
