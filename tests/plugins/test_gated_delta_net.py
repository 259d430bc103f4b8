"""GatedDeltaNet's kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from gated_delta_net_case import OFFICIAL, SMALL, Row, gated_delta_net_case
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import EXAMPLES, assert_deterministic, assert_same_bits

from flashnext.export.errors import PluginError
from flashnext.plugins.host_library import Execution, HostKernels

F32, BF16 = torch.float32, torch.bfloat16
WINDOW = 4


@st.composite
def rows(draw: st.DrawFn, steps: int) -> list[Row]:
    """Sequences at any point of their life: new, short, with none or all of their pending tokens accepted."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        accepted = draw(st.integers(0, WINDOW))
        past = draw(st.sampled_from([accepted, accepted + 1, accepted + 2, accepted + 9, accepted + 100]))
        found.append(Row(past, accepted, draw(st.sampled_from([0, 1, steps // 2, steps, steps]))))
    return found


@EXAMPLES
@given(
    data=st.data(),
    steps=st.sampled_from([1, 2, 4, 5, 8, 9, 19]),
    dtype=st.sampled_from([F32, BF16]),
    state=st.sampled_from([F32, BF16]),
    heads=st.sampled_from([(1, 1), (2, 4), (1, 3)]),
    key_dim=st.sampled_from([8, 16, 24, 40, 128]),
    value_dim=st.sampled_from([8, 16, 40, 128]),
    width=st.integers(1, 4),
    gate=st.sampled_from(["sigmoid", "silu"]),
    keys=st.sampled_from(["free", "equal"]),
    decay=st.sampled_from(["normal", "strong", "none"]),
    seed=st.integers(0, 100),
)
def test_random_steps(
    kernels: HostKernels,
    data: st.DataObject,
    steps: int,
    dtype: torch.dtype,
    state: torch.dtype,
    heads: tuple[int, int],
    key_dim: int,
    value_dim: int,
    width: int,
    gate: str,
    keys: str,
    decay: str,
    seed: int,
) -> None:
    sizes = {"key_heads": heads[0], "value_heads": heads[1], "key_dim": key_dim, "value_dim": value_dim, "width": width}
    case = gated_delta_net_case(
        data.draw(rows(steps)), steps, **sizes, dtype=dtype, state=state, gate=gate, keys=keys, decay=decay, seed=seed
    )
    case.check(kernels)


@pytest.mark.parametrize("accepted", range(WINDOW + 1))
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("state", [F32, BF16])
def test_every_number_of_accepted_tokens(
    kernels: HostKernels, accepted: int, dtype: torch.dtype, state: torch.dtype
) -> None:
    rows = [Row(10, accepted, 3), Row(accepted, accepted, 4)]
    gated_delta_net_case(rows, 4, **SMALL, dtype=dtype, state=state).check(kernels)


@pytest.mark.parametrize("steps", [WINDOW + 1, 8, 9, 40])
def test_a_long_step_commits_at_once(kernels: HostKernels, steps: int) -> None:
    rows = [Row(7, 2, steps), Row(0, 0, steps - 3), Row(50, 0, 1), Row(0, 0, 0)]
    gated_delta_net_case(rows, steps, **SMALL, window=WINDOW).check(kernels)


def test_rows_without_tokens_touch_nothing(kernels: HostKernels) -> None:
    gated_delta_net_case([Row(0, 0, 0), Row(9, 1, 0), Row(9, 1, 2)], 2, **SMALL).check(kernels)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_official_sizes(kernels: HostKernels, dtype: torch.dtype) -> None:
    gated_delta_net_case([Row(20, 1, 2)], 2, **OFFICIAL, dtype=dtype).check(kernels)


@pytest.mark.parametrize("steps", [3, 9])
def test_same_bits_under_every_schedule(kernels: HostKernels, steps: int) -> None:
    assert_deterministic(gated_delta_net_case([Row(20, 3, steps), Row(2, 2, 1)], steps, **SMALL), kernels)


def test_a_sequence_does_not_depend_on_its_neighbours(kernels: HostKernels) -> None:
    case = gated_delta_net_case([Row(20, 3, 2), Row(2, 2, 1), Row(9, 1, 2)], 2, **SMALL, dtype=BF16)
    together, _ = case.run(kernels)
    per_row = ("qkv", "z", "a", "b", "slots", "past_len", "accepted", "new_len", "y", "tickets")
    case.values |= {name: case.values[name][2:].contiguous() for name in per_row}
    alone, _ = case.run(kernels)
    slot = int(case.values["slots"][0])
    for name in ("conv_state", "recurrent_state", "pending_state"):
        assert_same_bits({name: alone[name][slot]}, {name: together[name][slot]})
    assert_same_bits({"y": alone["y"]}, {"y": together["y"][2:].contiguous()})


@pytest.mark.parametrize("state", [F32, BF16])
def test_official_sizes_move_every_byte_once(kernels: HostKernels, state: torch.dtype) -> None:
    case = gated_delta_net_case([Row(20, 1, 1)], 1, **OFFICIAL, dtype=BF16, state=state, window=1)
    report = case.check(kernels, Execution(watch="sectors"))
    whole = sum(case.values[n].nbytes for n in ("qkv", "z", "a", "b", "conv_weight", "A_log", "dt_bias", "y"))
    slot = sum(case.values[n][0].nbytes for n in ("conv_state", "recurrent_state", "pending_state"))
    assert report.launches == 1
    assert report.sectors <= 1.10 * (whole + slot) / 32
    state = case.values["recurrent_state"][0].nbytes / 32
    assert report.stored_sectors <= 1.10 * state


@pytest.mark.parametrize(
    ("change", "message"),
    [({"key_dim": 136}, "at most 128"), ({"value_dim": 12}, "multiple of 8"), ({"width": 5}, "1 to 4")],
)
def test_sizes_without_a_kernel_are_refused(kernels: HostKernels, change: dict[str, int], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        gated_delta_net_case([Row(0, 0, 1)], 1, **(SMALL | change)).run(kernels)
