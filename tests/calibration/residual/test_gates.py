"""Gates by site and branch: the model's own values, and who is called dead or dominating."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashnext.calibration.residual.gates import GateListener, SiteGates, normalised, read_gates
from flashnext.calibration.residual.stream import Listener, Read, ResidualModel


def test_gates_are_those_of_the_model(model: ResidualModel, tokens: np.ndarray) -> None:
    reads: list[Read] = []

    class Keep(Listener):
        def read(self, event: Read) -> None:
            reads.append(event)

    gates = GateListener()
    model.run(tokens, Keep(), logits=False)
    model.run(tokens, gates, logits=False)
    assert list(gates.sites) == [event.site for event in reads]
    for event in reads:
        assert event.module is not None
        normed, _ = normalised(event.r, event.module)
        opened = read_gates(normed, event.module)
        torch.testing.assert_close((opened * normed).mean(-2), event.x, rtol=1e-5, atol=1e-6)
        site = gates.sites[event.site]
        assert site.tokens == 48
        assert site.read_mean() == pytest.approx(opened.mean((0, 1, 3)).tolist(), rel=1e-5)
        if event.s is not None:
            assert site.write_mean() == pytest.approx(event.s.mean((0, 1)).tolist(), rel=1e-5)
            assert site.write_min is not None
            assert site.write_min.tolist() == pytest.approx(event.s.amin((0, 1)).tolist())
    assert gates.sites["final"].write_mean() == []


def test_dead_and_dominating_branches_are_named() -> None:
    gates = GateListener()
    gates.sites = {
        "layers.0.mlp": SiteGates(torch.zeros(3), torch.tensor([0.5, 10.0, 18.1], dtype=torch.float64), tokens=10)
    }
    assert gates.remarkable() == [
        ("layers.0.mlp", 0, 0.05, "dead"),
        ("layers.0.mlp", 2, pytest.approx(1.81), "dominating"),
    ]
