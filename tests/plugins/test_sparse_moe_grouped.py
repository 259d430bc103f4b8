"""SparseMoE's form for long steps: pairs of token and expert sorted by expert, products on tensor cores."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import EXAMPLES, assert_deterministic, assert_same_bits
from sparse_moe_case import OFFICIAL, sparse_moe_case
from torch import Tensor

from flashnext.export import number_formats
from flashnext.export.ops.reference import REFERENCES
from flashnext.plugins.host_library import Execution, HostKernels

F32, BF16 = torch.float32, torch.bfloat16
WEIGHTS = ("plain", "fp8", "nvfp4")
UNIT = {"plain": 8, "fp8": 16, "nvfp4": 32}
"""Rows of weights are multiples of it."""
VALUE_BYTES = {"plain": 2.0, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16}
SMALL = {"hidden": 64, "inner": 32, "experts": 16, "top_k": 3, "dtype": BF16}
TILE = 64
GROUPED, PER_TOKEN = 6, 2
"""Launches of the two forms."""


def choosing(rows: Sequence[int], seed: int = 0) -> Tensor:
    """Logits [sum of rows, experts] of which `rows[e]` prefer expert e, shuffled."""
    g = torch.Generator().manual_seed(seed)
    experts = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))
    experts = experts[torch.randperm(len(experts), generator=g)]
    return torch.rand(len(experts), len(rows), generator=g) + 3 * torch.eye(len(rows))[experts]


@pytest.mark.parametrize("weights", WEIGHTS)
@EXAMPLES
@given(
    tokens=st.integers(17, 80),
    hidden=st.integers(1, 6),
    inner=st.integers(1, 5),
    experts=st.sampled_from([5, 31, 33]),
    top_k=st.integers(2, 4),
    normalize=st.integers(0, 1),
    logits=st.sampled_from(["free", "tied", "equal", "extreme"]),
    seed=st.integers(0, 100),
)
def test_random_shapes(
    kernels: HostKernels,
    weights: str,
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    normalize: int,
    logits: str,
    seed: int,
) -> None:
    sizes = {"tokens": tokens, "hidden": (2 * hidden + 1) * UNIT[weights], "inner": inner * UNIT[weights]}
    routing = {"experts": experts, "top_k": top_k, "normalize": normalize, "logits": logits}
    sparse_moe_case(weights, **sizes, **routing, dtype=BF16, seed=seed).check(kernels)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_tiles_that_are_almost_and_just_full(kernels: HostKernels, weights: str) -> None:
    logits = choosing([0, 1, TILE - 1, TILE, TILE + 1, 0, 7, 8, 9])
    sizes = {"tokens": len(logits), "hidden": 96, "inner": 160, "experts": 9}
    sparse_moe_case(weights, **sizes, top_k=1, dtype=BF16, logits=logits).check(kernels)


@pytest.mark.parametrize("top_k", [1, 3])
def test_all_tokens_take_the_same_experts(kernels: HostKernels, top_k: int) -> None:
    logits = torch.zeros(150, 12)
    logits[:, [11, 4, 7][:top_k]] = torch.tensor([4.0, 3.0, 2.0])[:top_k]
    sizes = {"tokens": 150, "hidden": 48, "inner": 80, "experts": 12, "top_k": top_k}
    sparse_moe_case("fp8", **sizes, dtype=BF16, logits=logits).check(kernels)


def test_more_weight_rows_and_columns_than_a_block_takes(kernels: HostKernels) -> None:
    """Several blocks of both halves, the last of them partly and fully empty, and a ring of windows that turns."""
    for weights in WEIGHTS:
        sparse_moe_case(weights, tokens=20, hidden=416, inner=352, experts=3, top_k=2, dtype=BF16).check(kernels)


@pytest.mark.parametrize("logits", ["free", "tied", "equal"])
def test_as_many_experts_and_choices_as_there_can_be(kernels: HostKernels, logits: str) -> None:
    """Three groups of tokens to sort."""
    sizes = {"tokens": 70, "hidden": 16, "inner": 8, "experts": 512, "top_k": 16}
    sparse_moe_case("plain", **sizes, dtype=BF16, logits=logits).check(kernels)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_same_bits_under_every_schedule(kernels: HostKernels, weights: str) -> None:
    assert_deterministic(sparse_moe_case(weights, tokens=40, **SMALL), kernels)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_token_does_not_depend_on_its_neighbours(kernels: HostKernels, weights: str) -> None:
    case = sparse_moe_case(weights, tokens=90, **SMALL)
    together, _ = case.run(kernels)
    case.values |= {name: case.values[name][50:70].contiguous() for name in ("x", "router_logits", "y")}
    alone, _ = case.run(kernels)
    assert_same_bits(alone, {"y": together["y"][50:70].contiguous()})


# --- numbers ----------------------------------------------------------------------------------------


def test_codes_times_group_scales_are_exact_in_bf16() -> None:
    """So the products on tensor cores round nothing but their sums."""
    codes = torch.from_numpy(number_formats.E2M1_PAIRS).flatten().unique()
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    products = codes[:, None] * scales[~scales.isnan()]
    assert torch.equal(products.bfloat16().float(), products)


def test_every_group_scale(kernels: HostKernels) -> None:
    """From 2^-9 to 448."""
    case = sparse_moe_case("nvfp4", tokens=40, **SMALL)
    g = torch.Generator().manual_seed(1)
    for name in ("gate_up", "down"):
        scales = case.values[f"{name}_group_scale"]
        codes = torch.randint(0, 0x7F, scales.shape, generator=g, dtype=torch.uint8)
        case.values[f"{name}_group_scale"] = codes.view(torch.float8_e4m3fn)
        case.values[f"{name}_scale_2"] /= 100
    ports = [f"{name}_{part}" for name in ("gate_up", "down") for part in ("weight", "group_scale", "scale_2")]
    inputs = [case.values[name][None] for name in ("x", "router_logits")] + [case.values[name] for name in ports]
    case.expected["y"] = REFERENCES["SparseMoE"]["nvfp4"](*inputs, top_k=SMALL["top_k"], normalize=1)[0]
    case.check(kernels)


def test_a_code_that_is_no_number_reaches_the_tokens_that_take_it(kernels: HostKernels) -> None:
    case = sparse_moe_case("fp8", tokens=40, **SMALL)
    case.values["gate_up_weight"].view(torch.uint8)[2, 1, 5, 40] = 0x7F
    taken = case.values["router_logits"].float().topk(SMALL["top_k"]).indices.eq(2).any(1)
    assert 0 < taken.sum() < len(taken)
    case.expected["y"][taken] = torch.nan
    case.check(kernels)


# --- which form a launch takes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "launches"),
    [
        ({"tokens": 17}, GROUPED),
        ({"tokens": 16}, PER_TOKEN),
        ({"tokens": 40, "dtype": F32}, PER_TOKEN),
        ({"tokens": 17, "experts": 512, "top_k": 1, "hidden": 16, "inner": 8}, PER_TOKEN),
    ],
    ids=["long", "short", "float", "hardly an expert twice"],
)
def test_form(kernels: HostKernels, change: dict[str, int], launches: int) -> None:
    case = sparse_moe_case("plain", **(SMALL | change))
    assert case.check(kernels, Execution(watch="sectors")).launches == launches


def test_forms_agree(kernels: HostKernels) -> None:
    """Up to the rounding of what lies between the launches."""
    case = sparse_moe_case("fp8", tokens=17, **SMALL)
    grouped, _ = case.run(kernels)
    case.values |= {name: case.values[name][:16].contiguous() for name in ("x", "router_logits", "y")}
    single, _ = case.run(kernels)
    difference = single["y"].float() - grouped["y"][:16].float()
    assert 0 < difference.norm() < 1e-2 * single["y"].float().norm()


# --- memory traffic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_tile_reads_its_expert_once(kernels: HostKernels, weights: str) -> None:
    """Rows that fill a tile cost their own values only; one more row costs the expert's weights again."""
    if kernels.kind == "thread":
        pytest.skip("the build with ThreadSanitizer counts nothing")
    hidden, inner = 256, 192
    expert = 3 * hidden * inner * VALUE_BYTES[weights]
    row = 2 * (hidden * 3 + inner * 2 + hidden)  # of the first product, for 3 blocks; of the second, for 2; to combine

    def loaded(rows: int) -> int:
        sizes = {"tokens": rows, "hidden": hidden, "inner": inner, "experts": 3, "top_k": 1}
        case = sparse_moe_case(weights, **sizes, dtype=BF16, logits=choosing([0, rows, 0]))
        return case.run(kernels, Execution(watch="sectors"))[1].loaded_bytes

    few, full, over = loaded(17), loaded(TILE), loaded(TILE + 1)
    assert (TILE - 17) * row <= full - few <= 1.2 * (TILE - 17) * row
    assert expert <= over - full <= 1.2 * expert


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [512, 2048])
def test_random_routing_reads_an_expert_once(kernels: HostKernels, tokens: int) -> None:
    """At a tenth of the official width, with as many experts. Prints what was read (pytest -s)."""
    hidden, inner, experts, top_k = 256, 64, 512, 10
    sizes = {"tokens": tokens, "hidden": hidden, "inner": inner, "experts": experts, "top_k": top_k}
    case = sparse_moe_case("fp8", **sizes, dtype=BF16)
    report = case.check(kernels, Execution(watch="sectors"))
    rows = torch.bincount(case.values["router_logits"].float().topk(top_k).indices.flatten(), minlength=experts)
    tiles, chosen = int((-(-rows // TILE)).sum()), int((rows > 0).sum())
    print(f"{tokens} tokens: {chosen} experts in {tiles} tiles, {report.loaded_bytes:,} bytes loaded")
    weights, others = tiles * 3 * hidden * inner, 2 * tokens * top_k * (hidden + 2 * inner + hidden)
    assert tiles <= 1.01 * chosen
    assert weights + others <= report.loaded_bytes <= 1.3 * (weights + others)


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS)
def test_official_sizes(kernels: HostKernels, weights: str) -> None:
    sparse_moe_case(weights, tokens=24, experts=24, **OFFICIAL, dtype=BF16).check(kernels)
