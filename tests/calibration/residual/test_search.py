"""Each method on cases that can be computed by hand, and on planted outliers, where the methods part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from residual_events import feed, seeded
from torch import Tensor

from flashnext.calibration.residual.observers import Several, Statistics
from flashnext.calibration.residual.sample import Tokens, TokenSample
from flashnext.calibration.residual.search import METHODS, Rounding, ScaleSearch, best_scale, scale_of
from flashnext.calibration.residual.stream import ResidualModel
from flashnext.export.ops.reference.gated_residual import read
from flashnext.export.ops.reference.residual_store import E4M3, E5M2
from flashnext.export.residual_scales import store_names

STORE, BRANCH = "layers.2.mlp", 1


def tokens_of(r: Tensor, reader: Callable[[Tensor], Tensor] | None = None, weights: Tensor | None = None) -> Tokens:
    """Branches [N, 1, H] that are read as they are, each token standing for itself."""
    weights = torch.ones(len(r), dtype=torch.float64) if weights is None else weights
    return Tokens(r, None, r, reader or (lambda b: b[:, 0]), weights, torch.arange(len(r)))


def test_scale_of_a_magnitude() -> None:
    assert scale_of(896, E4M3) == 2.0
    assert scale_of(28672, E5M2) == 0.5
    assert scale_of(0, E4M3) == 1.0
    assert scale_of(1e-45, E4M3) == 2.0**-126


def test_errors_by_hand() -> None:
    """17 lies between 16 and 18 (ties to even: 16); 3 is on the grid; 1000 saturates to 448."""
    tokens = tokens_of(torch.tensor([[[17.0, 3.0]], [[1000.0, 0.0]]]))
    one = torch.ones(1)
    expected = ((1 + 552**2) / (17**2 + 3**2 + 1000**2)) ** 0.5
    assert Rounding().error_of_values(tokens, 0, one) == pytest.approx(expected)
    assert Rounding().error_of_input(tokens, 0, one) == pytest.approx(expected)
    weighted = tokens_of(tokens.r, weights=torch.tensor([3.0, 1.0], dtype=torch.float64))
    expected = ((3 + 552**2) / (3 * (17**2 + 3**2) + 1000**2)) ** 0.5
    assert Rounding().error_of_values(weighted, 0, one) == pytest.approx(expected)
    normed = tokens_of(tokens.r, lambda b: b[:, 0] / b[:, 0].norm(dim=-1, keepdim=True))
    length = (17**2 + 3**2) ** 0.5
    off = torch.tensor([16.0, 3.0]) / 265**0.5 - torch.tensor([17.0, 3.0]) / length
    assert Rounding().error_of_input(normed, 0, one) == pytest.approx(float(off.norm()) / 2**0.5, rel=1e-5)
    assert Rounding().error_of_input(Tokens(tokens.r, None, None, None, tokens.weights, tokens.positions), 0, one) == 0


def test_stochastic_rounding_repeats_and_depends_on_its_key() -> None:
    tokens = tokens_of(torch.full((2000, 1, 1), 17.0))
    changes = [Rounding(E4M3, seed, site).change(tokens, 0, torch.ones(1)) for seed, site in ((1, 0), (1, 0), (1, 3))]
    assert torch.equal(changes[0], changes[1])
    assert not torch.equal(changes[0], changes[2])
    assert set(changes[0].flatten().tolist()) == {-1.0, 1.0}  # 16 or 18
    assert abs(float(changes[0].mean())) < 0.1


def test_best_scale_by_hand() -> None:
    """448 * 2^13 once and 0.5 a thousand times. Stored values are multiples of 2^-9 scales, and 0.5 / scale vanishes
    at half of that (ties to even), so from the scale 2^9 on; the largest candidate below is 2^8.75."""
    large = 448.0 * 2**13
    r = torch.full((1001, 1, 1), 0.5)
    r[0] = large
    tried = []

    def vanished(tokens: Tokens, branch: int, scale: Tensor) -> float:
        tried.append(float(scale))
        return float((tokens.r[:, 0] + Rounding().change(tokens, branch, scale) == 0).double().mean())

    assert best_scale(tokens_of(r), 0, large, E4M3, vanished) == pytest.approx(2**8.75)
    assert max(tried) == 2.0**13
    # The squared error is ruled by the one large value: it asks for the maximum's scale.
    assert best_scale(tokens_of(r), 0, large, E4M3, Rounding().error_of_values) == 2.0**13


def test_a_branch_of_zeros_has_scale_one() -> None:
    assert best_scale(tokens_of(torch.zeros(5, 1, 3)), 0, 0.0, E4M3, Rounding().error_of_values) == 1.0


def observed(model: ResidualModel, r: Tensor, update: Tensor, form=E4M3, seed: int | None = None) -> ScaleSearch:
    """Statistics and sample of branches r [N, n, H], read by the model's own weights after a further write."""
    module = model._runner._engines["body"].module.layers["3"].attn_hyper_connection.inner  # type: ignore[attr-defined]
    weights = [module.hc_norm.weight, module.input_mix_weight_down.weight, module.input_mix_weight_up.weight]
    reader = lambda b: read(b, *weights, b.shape[-2], 1e-6)[0]  # noqa: E731
    statistics = Statistics(model.config)
    sample = TokenSample(model.config, store_names(model.config), len(r), 0)
    for part, more in zip(r.split(512), update.split(512), strict=True):
        feed(Several([statistics, sample]), part, more, part + 0.1 * more, reader, STORE)
    search = ScaleSearch(statistics, sample, form, seed)
    search.stores = (STORE,)
    return search


def planted(model: ResidualModel, times: float, whole_branch: bool) -> tuple[Tensor, Tensor]:
    """Branches of 4,096 tokens, 1 typically; one token has `times` as much in a branch, in all channels or one."""
    c = model.config
    r, update = (torch.randn(4096, c.hc_count, c.hidden_size, generator=seeded(s)) for s in (5, 6))
    if whole_branch:
        r[1234, BRANCH] *= times
    r[1234, BRANCH, 11] = times
    return r, update


@pytest.mark.parametrize("whole_branch", [True, False])
def test_planted_outliers(model: ResidualModel, whole_branch: bool) -> None:
    search = observed(model, *planted(model, 2.0**17, whole_branch))
    errors = {m: search.errors(search.scales(m))[STORE] for m in METHODS}
    plain, found, dynamic = errors["max"][BRANCH], errors["input"][BRANCH], search.errors(None)[STORE][BRANCH]
    print("error of x:", *(f"{m} {e[BRANCH]:.4f}" for m, e in errors.items()), f"dynamic {dynamic:.4f}")
    assert plain > 4 * found
    assert plain > 4 * errors["percentile-99.9"][BRANCH]
    assert errors["mse"][BRANCH] == pytest.approx(plain, rel=0.05)  # it serves the outlier
    assert dynamic < found
    for branch in {0, 1, 2, 3} - {BRANCH}:
        assert errors["max"][branch] == pytest.approx(errors["input"][branch], rel=0.1)


@pytest.mark.parametrize("times", [1.0, 30.0, 1000.0])
def test_maximum_is_as_good_for_milder_outliers(model: ResidualModel, times: float) -> None:
    search = observed(model, *planted(model, times, False))
    plain, found = (search.errors(search.scales(m))[STORE][BRANCH] for m in ("max", "input"))
    assert found <= plain <= 1.1 * found


def test_five_bits_of_exponent_need_no_search(model: ResidualModel) -> None:
    search = observed(model, *planted(model, 2.0**17, True), form=E5M2)
    plain, found = (search.errors(search.scales(m))[STORE][BRANCH] for m in ("max", "input"))
    assert plain <= 1.1 * found


def test_the_search_repeats_to_the_digit(model: ResidualModel) -> None:
    r, update = (t[1000:1400] for t in planted(model, 2.0**17, True))
    first, second = (observed(model, r, update, seed=7) for _ in range(2))
    assert first.scales("input") == second.scales("input")
    assert first.lost(first.scales("mse")) == second.lost(second.scales("mse"))


def test_lost_updates_of_the_sample(model: ResidualModel) -> None:
    """With the maximum's scale for the outlier many updates of that branch vanish, with the found one few do."""
    search = observed(model, *planted(model, 2.0**17, True))
    plain, found = (search.lost(search.scales(m))[STORE][0] for m in ("max", "input"))
    assert plain[BRANCH] > 0.2
    assert found[BRANCH] < 0.1
    assert plain[0] == pytest.approx(found[0], abs=0.02)
