"""GatedDeltaNet's kernels for long steps, in chunks of 64 tokens, against the reference and against transformers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gated_delta_net_case import OFFICIAL, SMALL, STATE_TOLERANCE, STATES, Row, gated_delta_net_case
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import EXAMPLES, Case, assert_close, assert_deterministic, assert_same_bits
from torch import Tensor
from torch.nn import functional

from flashnext.plugins.host_library import Execution, HostKernels

F32, BF16 = torch.float32, torch.bfloat16
WINDOW = 4
EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129]
KEYS, DECAYS = ("free", "near", "equal"), ("normal", "strong", "infinite", "long", "none")
HEADS = {"key_heads": 1, "value_heads": 3, "key_dim": 128, "value_dim": 128, "width": 4}
"""A few of the official heads."""


@st.composite
def rows(draw: st.DrawFn, steps: int) -> list[Row]:
    found = []
    for _ in range(draw(st.integers(1, 2))):
        accepted = draw(st.integers(0, WINDOW))
        past = draw(st.sampled_from([accepted, accepted + 1, accepted + 100]))
        found.append(Row(past, accepted, draw(st.sampled_from([0, 1, steps // 2, steps, steps]))))
    return found


@EXAMPLES
@given(
    data=st.data(),
    steps=st.sampled_from([WINDOW + 1, *EDGES[3:]]),
    state=st.sampled_from([F32, BF16]),
    heads=st.sampled_from([(1, 1), (2, 4), (1, 3), (1, 5)]),
    dims=st.sampled_from([(8, 8), (16, 40), (32, 72), (40, 16), (128, 24)]),
    width=st.integers(1, 4),
    gate=st.sampled_from(["sigmoid", "silu"]),
    keys=st.sampled_from(KEYS),
    decay=st.sampled_from(DECAYS),
    ring=st.sampled_from([0, 3, 300]),
    seed=st.integers(0, 100),
)
def test_random_long_steps(
    kernels: HostKernels,
    data: st.DataObject,
    steps: int,
    state: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
    width: int,
    gate: str,
    keys: str,
    decay: str,
    ring: int,
    seed: int,
) -> None:
    sizes = {"key_heads": heads[0], "value_heads": heads[1], "key_dim": dims[0], "value_dim": dims[1], "width": width}
    formats = {"dtype": BF16, "state": state}
    kind = {"gate": gate, "keys": keys, "decay": decay, "ring": ring, "seed": seed}
    gated_delta_net_case(data.draw(rows(steps)), steps, **sizes, **formats, **kind).check(kernels)


@pytest.mark.parametrize("state", [F32, BF16])
def test_lengths_around_every_edge(kernels: HostKernels, state: torch.dtype) -> None:
    """Ragged: each length once for a sequence that starts on dirty memory and once for one with accepted tokens."""
    rows = [Row(0, 0, new) for new in EDGES] + [Row(9, i % (WINDOW + 1), new) for i, new in enumerate(EDGES)]
    sizes = SMALL | {"key_heads": 1, "value_heads": 2}
    gated_delta_net_case([*rows, Row(9, 1, 0)], max(EDGES), **sizes, dtype=BF16, state=state).check(kernels)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("decay", DECAYS)
def test_extreme_keys_and_gates(kernels: HostKernels, keys: str, decay: str) -> None:
    """Keys as wide as the model's: rounding them once, as plain BF16 products do, fails on those almost parallel."""
    sizes = {"key_heads": 1, "value_heads": 2, "key_dim": 128, "value_dim": 16, "width": 4}
    gated_delta_net_case([Row(9, 2, 200)], 200, **sizes, dtype=BF16, keys=keys, decay=decay).check(kernels)


def test_official_heads(kernels: HostKernels) -> None:
    gated_delta_net_case([Row(20, 1, 130)], 130, **HEADS, dtype=BF16).check(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("state", [F32, BF16])
def test_official_sizes(kernels: HostKernels, state: torch.dtype) -> None:
    gated_delta_net_case([Row(20, 1, 300), Row(0, 0, 64)], 300, **OFFICIAL, dtype=BF16, state=state).check(kernels)


@pytest.mark.slow
def test_errors_do_not_grow_with_length(kernels: HostKernels) -> None:
    sizes = {"key_heads": 1, "value_heads": 2, "key_dim": 128, "value_dim": 32, "width": 4}
    gated_delta_net_case([Row(0, 0, 2048)], 2048, **sizes, dtype=BF16, keys="near", decay="none").check(kernels)


def test_three_launches_and_no_tickets(kernels: HostKernels) -> None:
    case = gated_delta_net_case([Row(7, 2, 70)], 70, **SMALL, dtype=BF16)
    case.values["tickets"] = None
    del case.expected["tickets"]
    assert case.check(kernels, Execution(watch="sectors")).launches == 3


def test_float_goes_token_by_token(kernels: HostKernels) -> None:
    """Held to the tolerance of float, which no product of BF16 numbers meets."""
    gated_delta_net_case([Row(7, 2, 70)], 70, **SMALL, dtype=F32).check(kernels)


def test_same_bits_under_every_schedule(kernels: HostKernels) -> None:
    sizes = SMALL | {"key_heads": 1, "value_heads": 2}
    assert_deterministic(gated_delta_net_case([Row(20, 3, 66), Row(2, 2, 5)], 66, **sizes, dtype=BF16), kernels)


def test_a_sequence_does_not_depend_on_its_neighbours(kernels: HostKernels) -> None:
    case = gated_delta_net_case([Row(20, 3, 66), Row(2, 2, 9), Row(9, 1, 65)], 66, **SMALL, dtype=BF16)
    together, _ = case.run(kernels)
    per_row = ("qkv", "z", "a", "b", "slots", "past_len", "accepted", "new_len", "y", "tickets")
    case.values |= {name: case.values[name][2:].contiguous() for name in per_row}
    alone, _ = case.run(kernels)
    slot = int(case.values["slots"][0])
    for name in ("conv_state", "recurrent_state"):
        assert_same_bits({name: alone[name][slot]}, {name: together[name][slot]})
    assert_same_bits({"y": alone["y"]}, {"y": together["y"][2:].contiguous()})


@pytest.mark.parametrize("first", [63, 64, 70, 98])
def test_two_steps_make_the_same_as_one(kernels: HostKernels, first: int) -> None:
    """The second step (also a short one) takes over the first one's state and conv inputs."""
    whole = gated_delta_net_case([Row(0, 0, 100)], 100, **SMALL, dtype=BF16)
    start = _cut(whole, 0, first)
    one, _ = start.run(kernels)
    rest = _cut(whole, first, 100)
    rest.values |= {name: one[name] for name in STATES}
    two, _ = rest.run(kernels)
    y = torch.cat([one["y"], two["y"]], 1)
    assert_close(y, whole.expected["y"], "y")
    if 100 - first > WINDOW:
        slot = int(whole.values["slots"][0])
        state = whole.expected["recurrent_state"][slot]
        assert_close(two["recurrent_state"][slot], state, "recurrent_state", STATE_TOLERANCE)


def _cut(case: Case, begin: int, end: int) -> Case:
    """The step of tokens begin … end - 1 alone."""
    values = dict(case.values)
    values |= {name: values[name][:, begin:end].contiguous() for name in ("qkv", "z", "a", "b", "y")}
    values |= {"past_len": torch.full_like(values["past_len"], begin)}
    values |= {"new_len": torch.full_like(values["new_len"], end - begin)}
    return dataclasses.replace(case, values=values)


# --- somebody else's chunks -------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ["free", "near"])
def test_agrees_with_transformers(kernels: HostKernels, keys: str) -> None:
    """Convolution, gates and norm in plain PyTorch, the rule by transformers' chunked form in float."""
    case = gated_delta_net_case([Row(0, 0, 130)], 130, **HEADS, dtype=BF16, keys=keys)
    y, state = _transformers(case)
    out, _ = case.run(kernels)
    assert_close(out["y"], y, "y")
    assert_close(out["recurrent_state"][int(case.values["slots"][0])], state, "recurrent_state", STATE_TOLERANCE)


def _transformers(case: Case) -> tuple[Tensor, Tensor]:
    """y [1, S, V*Dv] and the state [V, Dk, Dv] of one sequence that starts with this step."""
    model = pytest.importorskip(
        "transformers.models.qwen3_next.modeling_qwen3_next"
    )  # a machine with a GPU may lack it
    v = {name: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in case.values.items()}
    channels = v["qkv"].shape[2]
    mixed = functional.conv1d(functional.pad(v["qkv"].mT, (3, 0)), v["conv_weight"], groups=channels)
    q, k, value = functional.silu(mixed).mT.split([128, 128, 384], -1)
    query, key = (t.unflatten(-1, (1, 128)).repeat_interleave(3, dim=2) for t in (q, k))
    g = -v["A_log"].exp() * functional.softplus(v["a"] + v["dt_bias"])
    out, state = model.torch_chunk_gated_delta_rule(
        query,
        key,
        value.unflatten(-1, (3, 128)),
        g,
        v["b"].sigmoid(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert state is not None
    normed = v["norm_weight"] * out * torch.rsqrt(out.square().mean(-1, keepdim=True) + v["eps"])
    return (normed.flatten(-2) * v["z"].sigmoid()).to(BF16), state[0]
