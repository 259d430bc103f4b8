"""Statistics against hand-made branches, fixed memory, and the check for values that are not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from residual_events import seeded

from flashnext.calibration.residual.observers import FiniteCheck, Several, Statistics, StoreStatistics
from flashnext.calibration.residual.sample import TokenSample
from flashnext.calibration.residual.stream import ResidualModel
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CalibrationError
from flashnext.export.residual_scales import store_names


def test_statistics_of_known_branches() -> None:
    """Two branches of two channels over three tokens."""
    statistics = StoreStatistics(2, 2)
    r = torch.tensor([[[1.0, -2.0], [0.0, 4.0]], [[3.0, 0.5], [0.0, -8.0]], [[-1.0, 1.0], [0.0, 2.0]]])
    statistics.add(None, r[:2])
    statistics.add(r[2:] - 1, r[2:])
    assert statistics.tokens == 3
    assert statistics.largest() == [3.0, 8.0]
    assert statistics.rms() == pytest.approx([(16.25 / 6) ** 0.5, (84 / 6) ** 0.5])
    assert statistics.channel_max.tolist() == [[3.0, 2.0], [0.0, 8.0]]
    assert statistics.percentiles(100) == [3.0, 8.0]
    assert statistics.percentiles(50) == [1.03125, 0.0]  # third of six, as the upper edge of its bin
    assert statistics.token_percentiles(50) == [2.0625, 4.125]  # maxima 2, 3, 1 and 4, 8, 2
    assert statistics.occupied(1) == ([-127, *range(-126, 4)], [3, *[0] * 127, 1, 1, 1])
    assert statistics.lost["e4m3"].updates.tolist() == [2.0, 2.0]


def test_outlier_channels_are_named() -> None:
    r = torch.randn(500, 2, 64, generator=seeded(0))
    r[:, 1, 17] *= 40
    statistics = StoreStatistics(2, 64)
    statistics.add(None, r)
    none, found = statistics.outlier_channels()
    assert none == []
    assert [channel for channel, _ in found] == [17]
    assert found[0][1] == pytest.approx(40, rel=0.1)


def test_memory_does_not_grow_and_batches_do_not_matter(model: ResidualModel, tokens: np.ndarray) -> None:
    def bytes_of(value: object, seen: set[int]) -> int:
        if id(value) in seen:
            return 0
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            return value.untyped_storage().nbytes()
        inner = (
            vars(value).values() if hasattr(value, "__dict__") else value if isinstance(value, (list, tuple)) else ()
        )
        inner = value.values() if isinstance(value, dict) else inner
        return sum(bytes_of(v, seen) for v in inner)

    sizes = []
    for repeats in (1, 6):
        statistics = Statistics(model.config)
        sample = TokenSample(model.config, store_names(model.config), repeats * tokens[:, :-1].size, 0)
        for _ in range(repeats):
            model.run(tokens, Several([FiniteCheck(), statistics, sample]), logits=False, drafts=True)
        chosen = [sample.stores["embedding"].even, sample.chosen]
        sizes.append(bytes_of(statistics, set()) + bytes_of(sample, set()) - bytes_of(sample._waiting, set()))
        sizes[-1] -= sum(t.nbytes for t in chosen) + 19 * chosen[0].nbytes  # the even sample has its own bound
        if repeats == 1:
            once = statistics
    assert sizes[0] == sizes[1]
    for name, stores in statistics.stores.items():
        assert stores.largest() == once.stores[name].largest()
        assert stores.rms() == pytest.approx(once.stores[name].rms())
        assert torch.equal(stores.values, 6 * once.stores[name].values)
        assert stores.lost["e5m2"].shares()[0] == pytest.approx(once.stores[name].lost["e5m2"].shares()[0])


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("layers.2.linear_attn.out_proj.weight", "the residual that is read for layers.2.mlp has nan"),
        ("layers.3.mlp_hyper_connection.inner.hc_norm.weight", "the input of layers.3.mlp has nan"),
        ("mtp.fc_hidden.weight", "the residual that is read for mtp.layers.0.mixer has nan"),
    ],
)
def test_the_first_site_that_is_not_finite_is_named(
    random_checkpoint: Path, tokens: np.ndarray, parameter: str, message: str
) -> None:
    model = ResidualModel.open(Checkpoint.open(random_checkpoint), *tokens[:, 1:].shape)
    graph = model._runner._engines["mtp" if parameter.startswith("mtp") else "body"].module  # type: ignore[attr-defined]
    graph.get_parameter(parameter).view(-1)[0] = torch.nan
    with pytest.raises(CalibrationError, match=message):
        model.run(tokens, FiniteCheck(), logits=False, drafts=True)
    model.close()


def test_an_infinite_embedding_is_named_with_its_token(random_checkpoint: Path, tokens: np.ndarray) -> None:
    model = ResidualModel.open(Checkpoint.open(random_checkpoint), *tokens[:, 1:].shape)
    head = model._runner._engines["head"]
    head._bound["embed_tokens.weight"] = head._bound["embed_tokens.weight"].clone()  # type: ignore[attr-defined]
    head._bound["embed_tokens.weight"][tokens[0, 5], 7] = torch.inf  # type: ignore[attr-defined]
    with pytest.raises(CalibrationError, match=rf"layers.0.mixer has inf at token 5 .*\(id {tokens[0, 5]}\), branch 0"):
        model.run(tokens, FiniteCheck(), logits=False)
    model.close()
