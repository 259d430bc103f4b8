"""SparseAttention's long steps in BF16, which run on tensor cores, against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import EXAMPLES, Case, assert_deterministic, assert_same_bits
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
from torch import Tensor

from flashnext.export.ops.reference.common import rms_norm, rotate
from flashnext.plugins.host_library import Execution, HostKernels

BF16 = torch.bfloat16
SCORE_EPSILON = 2.0**-15
"""Of the sum of a score's absolute products: what two BF16 parts of a query and sums in float leave uncertain."""


@EXAMPLES
@given(
    data=st.data(),
    form=st.sampled_from(FORMS),
    steps=st.sampled_from([9, 17, 40]),
    heads=st.sampled_from([(1, 1), (4, 2), (12, 1), (16, 1)]),
    head_dim=st.sampled_from([8, 24, 64]),
    index_heads=st.integers(1, 8),
    index_head_dim=st.sampled_from([8, 24]),
    block=st.sampled_from([1, 2, 4]),
    budget_blocks=st.sampled_from([1, 3, 16]),
    rope_scale=st.sampled_from([1.0, 1.2]),
    scores=st.sampled_from(["free", "zero", "equal", "crowded"]),
    score_bytes=st.sampled_from([0, 1]),
    seed=st.integers(0, 100),
)
def test_random_steps(
    kernels: HostKernels,
    data: st.DataObject,
    form: str,
    steps: int,
    heads: tuple[int, int],
    head_dim: int,
    index_heads: int,
    index_head_dim: int,
    block: int,
    budget_blocks: int,
    rope_scale: float,
    scores: str,
    score_bytes: int,
    seed: int,
) -> None:
    row = st.builds(Row, st.sampled_from([0, 1, 4, 5, 12, 63, 130]), st.sampled_from([0, 1, steps // 2, steps]))
    rows = data.draw(st.lists(row, min_size=1, max_size=3))
    sizes = {"heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "frequencies": 4}
    sizes |= {"index_heads": index_heads, "index_head_dim": index_head_dim}
    sizes |= {"block": block, "budget_blocks": budget_blocks}
    choice = {"rope_scale": rope_scale, "scores": scores, "score_bytes": score_bytes, "seed": seed}
    check(sparse_attention_case(form, rows, steps, dtype=BF16, **choice, **sizes), kernels)


@pytest.mark.parametrize("past", [0, 1, 2, 3, 4, 9, 10, 11, 12, 54, 55, 56, 62, 63, 64, 65])
@pytest.mark.parametrize("form", FORMS)
def test_lengths_around_every_edge(kernels: HostKernels, form: str, past: int) -> None:
    """Of blocks, the budget, and the 64 tokens of a round."""
    rows = [Row(past, 10), Row(past + 1, 9), Row(past, 0)]
    check(sparse_attention_case(form, rows, 10, dtype=BF16, **SMALL), kernels)


@pytest.mark.parametrize("past", [117, 118, 119, 127, 128, 250])
@pytest.mark.parametrize("budget_blocks", [3, 120, 300])
def test_keys_around_a_tile_of_scores(kernels: HostKernels, past: int, budget_blocks: int) -> None:
    """128 keys are scored at a time, 128 queries of one head together."""
    sizes = ONE_HEAD | {"block": 1, "budget_blocks": budget_blocks}
    check(sparse_attention_case("select_return", [Row(past, 12), Row(past, 9)], 12, dtype=BF16, **sizes), kernels)


@pytest.mark.parametrize("steps", [127, 128, 129])
def test_queries_around_a_tile_of_scores(kernels: HostKernels, steps: int) -> None:
    sizes = ONE_HEAD | {"block": 2, "budget_blocks": 9}
    rows = [Row(3, steps), Row(0, steps - 1)]
    for score_bytes in (0, 1):
        case = sparse_attention_case("select_return", rows, steps, dtype=BF16, score_bytes=score_bytes, **sizes)
        check(case, kernels)


@pytest.mark.parametrize("scores", ["zero", "crowded"])
def test_choice_among_many_blocks(kernels: HostKernels, scores: str) -> None:
    sizes = ONE_HEAD | {"block": 1, "budget_blocks": 200}
    check(
        sparse_attention_case("select_return", [Row(PART_BLOCKS - 2, 9)], 9, dtype=BF16, scores=scores, **sizes),
        kernels,
    )


@pytest.mark.parametrize("seed", range(3))
def test_choice_is_that_of_exact_scores(kernels: HostKernels, seed: int) -> None:
    """No block is chosen whose exact score is below an omitted one's by more than the stated epsilon."""
    rows = [Row(past, new) for past, new in ((1600, 9), (1201, 8), (1999, 9), (400, 1))]
    sizes = OFFICIAL | {"heads": 1, "kv_heads": 1, "head_dim": 8, "frequencies": 4, "budget_blocks": 64}
    case = sparse_attention_case("select_return", rows, 9, dtype=BF16, seed=seed, **sizes)
    outputs, _ = case.run(kernels)
    for row, (past, new) in enumerate(rows):
        complete = (past + new) // 4
        scores, sizes_of_sums = exact_scores(case, outputs["index_key_state"], row, past + new - 1, complete)
        chosen = torch.zeros(complete, dtype=torch.bool)
        chosen[outputs["blocks_out"][row].long()] = True
        assert chosen.sum() == 64
        epsilon = SCORE_EPSILON * sizes_of_sums.max()
        assert scores[chosen].min() >= scores[~chosen].max() - epsilon


def exact_scores(case: Case, index_keys: Tensor, row: int, position: int, complete: int) -> tuple[Tensor, Tensor]:
    """Of the row's last valid query, in double, and the sums of the absolute products behind them."""
    step, values = position - int(case.values["past_len"][row]), case.values
    queries = values["index_qk"][row, step].unflatten(-1, (-1, 128))[:-1]
    normed = rms_norm(queries, values["index_q_norm_weight"], 1e-6)
    query = rotate(normed[None], torch.tensor([position]), values["inv_freq"], 1.0)[0].double()
    keys = index_keys[values["slots"][row], :complete].double()
    scores = torch.relu(query @ keys.T).sum(0) / math.sqrt(128)
    return scores, (query.abs() @ keys.abs().T).sum(0) / math.sqrt(128)


def test_official_sizes(kernels: HostKernels) -> None:
    """Of the heads; the budget is exceeded by a few blocks for the last queries only."""
    check(sparse_attention_case("select", [Row(2043, 9)], 9, dtype=BF16, **OFFICIAL), kernels)


@pytest.mark.parametrize("form", FORMS)
def test_same_bits_under_every_schedule(kernels: HostKernels, form: str) -> None:
    """Several rounds of 64 tokens, of all (the second row) and of chosen ones."""
    sizes = SMALL | {"heads": 12, "kv_heads": 1, "budget_blocks": 24}
    assert_deterministic(sparse_attention_case(form, [Row(200, 10), Row(70, 9)], 10, dtype=BF16, **sizes), kernels)


def test_scores_in_several_turns_under_every_schedule(kernels: HostKernels) -> None:
    """So many tiles of queries that a block of threads scores several tiles of keys."""
    sizes = ONE_HEAD | {"block": 1, "index_heads": 8}
    rows = [Row(700, 9), *[Row(0, 0)] * 7]
    assert_deterministic(sparse_attention_case("select_return", rows, 128, dtype=BF16, **sizes), kernels, schedules=4)


@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_does_not_depend_on_its_neighbours(kernels: HostKernels, form: str) -> None:
    case = sparse_attention_case(form, [Row(20, 11), Row(0, 9), Row(141, 12)], 12, **SMALL, dtype=BF16)
    together, _ = case.run(kernels)
    for row in range(3):
        by_itself, _ = alone(case, row).run(kernels)
        assert_same_bits(by_itself, {"y": together["y"][row : row + 1].contiguous()})


def test_bytes_of_scores_do_not_change_a_bit(kernels: HostKernels) -> None:
    case = sparse_attention_case("select_return", [Row(41, 140), Row(0, 133)], 140, **SMALL, dtype=BF16)
    at_once, _ = case.run(kernels)
    case.values["score_bytes"] = 1
    in_turns, report = case.run(kernels, Execution(watch="sectors"))
    assert_same_bits(in_turns, at_once)
    assert report.launches == 2 + 3 * 2 + 2  # caches and ring, three times scores and choice, lists and attention


@pytest.mark.slow
def test_context_of_262144(kernels: HostKernels) -> None:
    """More blocks than a window of the lists has: 131,072."""
    sizes = ONE_HEAD | {"block": 1, "budget_blocks": 64, "index_heads": 4}
    check(sparse_attention_case("select_return", [Row(262135, 9)], 9, dtype=BF16, **sizes), kernels)


@pytest.mark.slow
def test_prefill_of_2048_tokens_moves_every_byte_once(kernels: HostKernels) -> None:
    case = sparse_attention_case("select", [Row(0, 2048)], 2048, dtype=BF16, **OFFICIAL)
    report = case.check(kernels, Execution(watch="sectors"))
    needed = sum(case.values[name].nbytes for name in ("q_gate", "k", "v", "y"))
    needed += case.values["index_qk"].nbytes // 5  # the index keys: nothing has to be scored
    needed += 2048 * 2 * case.values["key_state"][0, 0].nbytes + 512 * case.values["index_key_state"][0, 0].nbytes
    print(f"{report}, needed {needed // 32} sectors: {report.sectors * 32 / needed:.3f}")
    assert 1 <= report.sectors * 32 / needed <= 1.02
