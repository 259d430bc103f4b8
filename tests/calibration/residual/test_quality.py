"""Figures of the ways to store: against sums by hand, and on ways whose result is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashnext.calibration.residual.quality import Quality, StoreLosses, Way, measure, measure_steps
from flashnext.calibration.residual.report import LOSS_BOUND, RULE, SIMPLEST_FIRST, recommend
from flashnext.calibration.residual.storage import Fp8Storage, bf16_storage
from flashnext.calibration.residual.stream import ResidualModel, Store
from flashnext.calibration.residual.text import Windows
from flashnext.export.ops.reference.residual_store import E4M3
from flashnext.export.residual_scales import store_names


@pytest.fixture(scope="module")
def held_out(model: ResidualModel) -> Windows:
    rng = np.random.default_rng(8)
    return Windows(rng.integers(0, model.config.vocab_size, (3, 25)).astype(np.int32), 0)


@pytest.fixture(scope="module")
def measured(model: ResidualModel, held_out: Windows) -> list[Quality]:
    names = store_names(model.config)
    ways = [
        Way("yardstick"),
        Way("same", lambda store, r, positions: r.clone()),
        Way("bf16", bf16_storage),
        Way("fp8", Fp8Storage(E4M3, names)),
    ]
    steps = []
    found = measure(model, held_out, ways, 2, lambda: steps.append(1))
    assert len(steps) == measure_steps(held_out, len(ways), 2)
    return found


def test_an_exact_way_costs_nothing(measured: list[Quality]) -> None:
    same = measured[1]
    assert (same.loss_difference, same.standard_error, same.divergence, same.agreement) == (0, 0, 0, 1)
    assert set(same.input_errors.values()) == {0.0}
    assert same.greedy == [12] * 3  # windows of 24 tokens: prompts of 12


def test_figures_are_the_sums_of_their_definitions(
    model: ResidualModel, held_out: Windows, measured: list[Quality]
) -> None:
    def log_probabilities(storage) -> torch.Tensor:
        parts = [model.run(b, storage=storage) for b in held_out.batches(2)]
        return torch.from_numpy(np.concatenate(parts)).double().log_softmax(-1)

    p, q = log_probabilities(None), log_probabilities(Fp8Storage(E4M3, store_names(model.config)))
    targets = torch.from_numpy(held_out.tokens[:, 1:].astype(np.int64))[..., None]
    nats, yardstick = (-t.gather(-1, targets)[..., 0] for t in (q, p))
    found = measured[3]
    assert found.tokens == nats.numel() == 72
    assert found.loss == pytest.approx(float(nats.mean()), rel=1e-5)
    assert found.loss_difference == pytest.approx(float((nats - yardstick).mean()), abs=1e-6)
    by_window = (nats - yardstick).mean(-1)
    assert found.standard_error == pytest.approx(float(by_window.std() / 3**0.5), rel=1e-3)
    assert found.divergence == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert found.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert found.perplexity == pytest.approx(np.exp(found.loss))


def test_fewer_bits_cost_more(measured: list[Quality]) -> None:
    _, _, bf16, fp8 = measured
    assert 0 < bf16.divergence < fp8.divergence / 10
    for site, error in fp8.input_errors.items():
        if site == "layers.0.mixer":
            assert error == 0  # it reads the embedding before it is stored
        else:
            assert bf16.input_errors[site] < error / 4
    assert not bf16.lost
    assert "embedding" not in fp8.lost  # nothing is written before it
    assert len(fp8.lost) == 16
    assert set(fp8.clipped) == {"embedding", *fp8.lost}
    assert not any(share for of_store in fp8.clipped.values() for share in of_store)  # dynamic scales never clip


def test_greedy_divergence_is_that_of_real_decoding(model: ResidualModel, held_out: Windows) -> None:
    """What one pass over the yardstick's text finds is where the other way's own greedy text leaves it."""
    coarse = Fp8Storage(E4M3, store_names(model.config), dict.fromkeys(store_names(model.config), (0.05,) * 4))
    found = measure(model, held_out, [Way("yardstick"), Way("coarse", coarse)], 2)[1]
    prompts = held_out.tokens[:, :12]
    for prompt, equal in zip(prompts, found.greedy, strict=True):
        mine, other = (model.greedy(prompt[None], 12, s)[0] for s in (None, coarse))
        differs = np.flatnonzero(mine != other)
        assert equal == (differs[0] if len(differs) else 12)
    assert min(found.greedy) < 12


def test_clipped_and_lost_shares_by_hand() -> None:
    """Branch 0: 500 is beyond 448; the update of 0.5 at 16 is lost. Branch 1 has scale 2: nothing is beyond 896."""
    losses = StoreLosses(Fp8Storage(E4M3, ("a",), {"a": (1.0, 2.0)}))
    before = torch.tensor([16.0, 500.0]).expand(1, 1, 2, 2)
    losses.store(Store("a", before, before + torch.tensor([0.5, 0.0]), None, None))
    assert losses.clipped() == {"a": [0.5, 0.0]}
    assert losses.lost["a"].shares()[0] == [1.0, 1.0]


def quality(name: str, difference: float, divergence: float) -> Quality:
    return Quality(name, 100, 3.0 + difference, difference, 0.001, divergence, 0.97)


def table(**changed: tuple[float, float]) -> list[Quality]:
    """All ways that the rule looks at: equal ones, but for those given by method."""
    figures = {**{f"e4m3 static {m}": (0.002, 0.003) for m in SIMPLEST_FIRST}, "e4m3 dynamic": (0.002, 0.003)}
    figures["bf16"] = (0.0, 1e-5)
    figures |= {name if name in ("e4m3 dynamic", "bf16") else f"e4m3 static {name}": f for name, f in changed.items()}
    return [quality(name, *f) for name, f in figures.items()]


def test_the_rule_takes_the_simplest_of_equals() -> None:
    assert SIMPLEST_FIRST == ("max", "percentile-99.999", "percentile-99.99", "percentile-99.9", "mse", "input")
    assert recommend(table()).way == "e4m3 static max"
    assert recommend(table(max=(0.002, 0.0037))).way == "e4m3 static max"
    assert recommend(table(max=(0.002, 0.0038))).way == "e4m3 static percentile-99.999"
    found = recommend(table(**dict.fromkeys(SIMPLEST_FIRST[:-1], (0.003, 0.9))))
    assert found.way == "e4m3 static input"
    assert "+0.0020 nats (standard error 0.0010)" in found.sentence
    assert found.rule == RULE
    assert str(LOSS_BOUND) in RULE


def test_the_rule_gives_up_static_scales_and_then_fp8() -> None:
    bad = dict.fromkeys(SIMPLEST_FIRST, (0.02, 0.003))
    assert recommend(table(**bad)).way == "e4m3 dynamic"
    found = recommend(table(**bad, **{"e4m3 dynamic": (0.011, 0.003)}))
    assert found.way == "bf16"
    assert "e4m3 static max costs 0.0200 nats and e4m3 dynamic 0.0110" in found.sentence


def test_the_rule_is_not_misled_by_a_lucky_loss() -> None:
    """A model of noise: losses on foreign text may even fall, while nothing that it says is kept."""
    lucky = dict.fromkeys(SIMPLEST_FIRST, (-0.08, 2.3)) | {"e4m3 dynamic": (-0.1, 2.3)}
    assert recommend(table(**lucky)).way == "bf16"
    found = recommend(table(**lucky, bf16=(-0.03, 1.5)))
    assert found.way == "none"
    assert "BF16's too, which diverges by 1.5000 nats (e4m3 static max: 2.3000)" in found.sentence
