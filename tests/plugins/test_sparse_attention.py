"""SparseAttention's kernels against the reference. Long steps in BF16: test_sparse_attention_tiles.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import EXAMPLES, assert_deterministic, assert_same_bits
from sparse_attention_case import (
    FORMS,
    OFFICIAL,
    ONE_HEAD,
    PART_BLOCKS,
    SMALL,
    Row,
    alone,
    check,
    sparse_attention_case,
)

from flashnext.export.errors import PluginError
from flashnext.plugins.host_library import Execution, HostKernels

F32, BF16 = torch.float32, torch.bfloat16


@EXAMPLES
@given(
    data=st.data(),
    form=st.sampled_from(FORMS),
    steps=st.sampled_from([1, 2, 4, 5, 9]),
    dtype=st.sampled_from([F32, BF16]),
    heads=st.sampled_from([(1, 1), (4, 2), (12, 1)]),
    head_dim=st.sampled_from([8, 24, 64]),
    index_heads=st.integers(1, 4),
    index_head_dim=st.sampled_from([8, 24]),
    block=st.sampled_from([1, 2, 4]),
    budget_blocks=st.sampled_from([1, 3, 16]),
    rope_scale=st.sampled_from([1.0, 1.2]),
    seed=st.integers(0, 100),
)
def test_random_steps(
    kernels: HostKernels,
    data: st.DataObject,
    form: str,
    steps: int,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    index_heads: int,
    index_head_dim: int,
    block: int,
    budget_blocks: int,
    rope_scale: float,
    seed: int,
) -> None:
    row = st.builds(Row, st.sampled_from([0, 1, 3, 4, 5, 11, 12, 63]), st.sampled_from([0, 1, steps // 2, steps]))
    rows = data.draw(st.lists(row, min_size=1, max_size=3))
    sizes = {"heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "frequencies": 4}
    sizes |= {"index_heads": index_heads, "index_head_dim": index_head_dim}
    sizes |= {"block": block, "budget_blocks": budget_blocks}
    # A BF16 score may round to another order than the reference's; ties and zeros are tested on their own.
    scores = "free" if dtype == F32 else "zero"
    check(
        sparse_attention_case(form, rows, steps, dtype=dtype, rope_scale=rope_scale, scores=scores, seed=seed, **sizes),
        kernels,
    )


@pytest.mark.parametrize("past", [0, 1, 2, 3, 4, 10, 11, 12, 13, 30, 31, 32, 33])
@pytest.mark.parametrize("form", FORMS)
def test_lengths_around_every_edge(kernels: HostKernels, form: str, past: int) -> None:
    rows = [Row(past, 3), Row(past + 1, 1), Row(past, 0)]
    check(sparse_attention_case(form, rows, 3, **SMALL), kernels)


@pytest.mark.parametrize("scores", ["zero", "equal", "crowded"])
@pytest.mark.parametrize("blocks", [600, 1023])
def test_ties_go_to_the_lower_block(kernels: HostKernels, scores: str, blocks: int) -> None:
    sizes = SMALL | {"budget_blocks": 200}
    check(sparse_attention_case("select_return", [Row(4 * blocks + 1, 1)], 1, scores=scores, **sizes), kernels)


@pytest.mark.parametrize("scores", ["zero", "equal", "crowded", "free"])
@pytest.mark.parametrize("blocks", [PART_BLOCKS + extra for extra in (-1, 0, 1, PART_BLOCKS, PART_BLOCKS + 9)])
def test_choice_among_many_blocks(kernels: HostKernels, scores: str, blocks: int) -> None:
    """Several blocks of threads choose."""
    sizes = ONE_HEAD | {"block": 1, "budget_blocks": 200}
    check(sparse_attention_case("select_return", [Row(blocks - 2, 2)], 2, scores=scores, **sizes), kernels)


def test_choice_of_more_blocks_than_a_part_has(kernels: HostKernels) -> None:
    sizes = ONE_HEAD | {"block": 1, "budget_blocks": PART_BLOCKS + 9}
    rows = [Row(2 * PART_BLOCKS + 5, 1), Row(PART_BLOCKS + 5, 1)]
    check(sparse_attention_case("select_return", rows, 1, **sizes), kernels)


@pytest.mark.parametrize("form", FORMS)
def test_official_sizes(kernels: HostKernels, form: str) -> None:
    """Of the heads; the budget is exceeded by a few blocks."""
    check(sparse_attention_case(form, [Row(2100, 1)], 1, dtype=F32, **OFFICIAL), kernels)


def test_official_sizes_in_bf16(kernels: HostKernels) -> None:
    check(sparse_attention_case("select", [Row(1000, 2)], 2, dtype=BF16, **OFFICIAL), kernels)


@pytest.mark.slow
def test_context_of_262144(kernels: HostKernels) -> None:
    sizes = OFFICIAL | {"heads": 4, "kv_heads": 1, "head_dim": 64}
    check(sparse_attention_case("select_return", [Row(262143, 1)], 1, **sizes), kernels)


@pytest.mark.parametrize("form", FORMS)
def test_same_bits_under_every_schedule(kernels: HostKernels, form: str) -> None:
    assert_deterministic(sparse_attention_case(form, [Row(40, 2), Row(0, 1)], 2, **SMALL), kernels)


def test_a_sequence_does_not_depend_on_its_neighbours(kernels: HostKernels) -> None:
    case = sparse_attention_case("select", [Row(20, 2), Row(0, 1), Row(41, 2)], 2, **SMALL, dtype=BF16)
    together, _ = case.run(kernels)
    for row in range(3):
        by_itself, _ = alone(case, row).run(kernels)
        assert_same_bits(by_itself, {"y": together["y"][row : row + 1].contiguous()})


def test_official_sizes_move_every_byte_once(kernels: HostKernels) -> None:
    """Keys and values of the chosen tokens, once per key head; pooled keys of every block."""
    case = sparse_attention_case("select", [Row(4000, 1)], 1, dtype=BF16, **OFFICIAL)
    _, report = case.run(kernels, Execution(watch="sectors"))
    whole = ("q_gate", "k", "v", "index_qk", "y", "inv_freq")
    needed = sum(case.values[name].nbytes for name in whole)
    token = case.values["key_state"][0, 0].nbytes
    needed += (2048 + 1) * 2 * token + 1000 * case.values["index_key_state"][0, 0].nbytes
    assert report.launches == 5
    assert report.sectors <= 1.10 * needed / 32


@pytest.mark.parametrize(
    ("change", "message"),
    [({"head_dim": 264}, "at most 256"), ({"index_head_dim": 136}, "at most 128"), ({"heads": 34}, "at most 16")],
)
def test_sizes_without_a_kernel_are_refused(kernels: HostKernels, change: dict[str, int], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        sparse_attention_case("select", [Row(0, 1)], 1, **(SMALL | change)).run(kernels)
