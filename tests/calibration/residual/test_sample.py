"""The sample: rare extremes are in it with their own weight, and each token comes with what follows it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from residual_events import feed, seeded
from torch import Tensor

from flashnext.calibration.residual import sample as sampling
from flashnext.calibration.residual.sample import EVEN, EXTREMES, TokenSample
from flashnext.calibration.residual.stream import ResidualModel
from flashnext.export.residual_scales import store_names


@pytest.fixture
def collected(model: ResidualModel) -> Callable[..., TokenSample]:
    def collect(r: Tensor, update: Tensor | None, following: Tensor, batch: int = 512) -> TokenSample:
        found = TokenSample(model.config, ["a"], len(r), 0)
        for first in range(0, len(r), batch):
            part = slice(first, first + batch)
            feed(found, r[part], None if update is None else update[part], following[part], lambda b: b.mean(-2), "a")
        return found

    return collect


def test_extremes_are_kept_with_weight_one(model: ResidualModel, collected: Callable[..., TokenSample]) -> None:
    c = model.config
    r = torch.randn(4096, c.hc_count, c.hidden_size, generator=seeded(1))
    r[3001, 2, 5] = 1e6
    tokens = collected(r, 0.25 * r, 2 * r).of("a", 2)
    assert len(tokens.r) in range(EVEN, EVEN + EXTREMES + 1)
    place = int(tokens.r[:, 2].abs().amax(-1).argmax())
    assert tokens.r[place, 2, 5] == 1e6
    assert tokens.weights[place] == 1
    assert tokens.positions[place] == 3001 % 512
    assert float(tokens.weights.sum()) == pytest.approx(4096)
    assert tokens.following is not None
    assert tokens.before is not None
    torch.testing.assert_close(tokens.following, 2 * tokens.r)
    torch.testing.assert_close(tokens.before, 0.75 * tokens.r)
    largest = r[:, 2].abs().amax(-1).topk(EXTREMES).values
    torch.testing.assert_close(tokens.r[:EXTREMES, 2].abs().amax(-1).sort(descending=True).values, largest)


def test_no_token_counts_twice_and_batches_do_not_matter(
    model: ResidualModel, collected: Callable[..., TokenSample]
) -> None:
    c = model.config
    r = torch.randn(600, c.hc_count, c.hidden_size, generator=seeded(2))
    for batch in (600, 50, 7):
        tokens = collected(r, None, r, batch).of("a", 0)
        assert tokens.before is None
        assert float(tokens.weights.sum()) == pytest.approx(600)
        assert len(torch.unique(tokens.r[:, 0, 0])) == len(tokens.r) == 600
        square = (tokens.weights[:, None] * tokens.r[:, 0].double().square()).sum()
        assert float(square) == pytest.approx(float(r[:, 0].double().square().sum()))


def test_a_store_before_an_injection_is_read_after_it(model: ResidualModel, tokens: np.ndarray) -> None:
    found = TokenSample(model.config, store_names(model.config), tokens[:, 1:].size, 0)
    model.run(tokens, found, logits=False, drafts=True)
    before, injected = found.of("layers.0.mixer", 1), found.of("layers.1.ngram", 1)
    order = before.positions.argsort(stable=True), injected.positions.argsort(stable=True)
    assert before.following is not None
    assert injected.following is not None
    assert len(order[0]) == len(order[1]) == tokens[:, 1:].size
    sums = [t[i].sum((1, 2)).sort().values for t, i in zip((before.following, injected.following), order, strict=True)]
    torch.testing.assert_close(*sums)
    last = found.of("layers.7.mlp", 0)
    assert last.reader is not None
    assert last.reader(last.r).shape == (len(last.r), model.config.hc_count * model.config.hidden_size)
    torch.testing.assert_close(last.following, last.r)  # the draft layer reads it as it is
    torch.testing.assert_close(injected.following, injected.r)  # and so does the read after an injection


def test_wide_models_get_fewer_tokens(model: ResidualModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_BYTES", 100 * 3 * 4 * 4 * 64 * 20)
    assert sampling.even_tokens(model.config, 20) == 100
    monkeypatch.setattr(sampling, "MAX_BYTES", 1)
    assert sampling.even_tokens(model.config, 20) == sampling.LEAST_EVEN
