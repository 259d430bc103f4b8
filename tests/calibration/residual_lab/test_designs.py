"""Each design against its formulas, written out once more, and what it is equal to before training."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flashnext.calibration.residual_lab.backbone import Backbone
from flashnext.calibration.residual_lab.cost import floats_moved
from flashnext.calibration.residual_lab.designs.attention_residual import AttentionResidual
from flashnext.calibration.residual_lab.designs.base import Design, Shape
from flashnext.calibration.residual_lab.designs.catalogue import BASELINE, DESIGNS
from flashnext.calibration.residual_lab.designs.gated_norm import GatedNorm
from flashnext.calibration.residual_lab.designs.hyper_connections import HyperConnections
from flashnext.calibration.residual_lab.designs.manifold_hyper_connections import (
    ManifoldHyperConnections,
    sinkhorn,
)
from flashnext.calibration.residual_lab.designs.multi_channel import MultiChannel
from flashnext.calibration.residual_lab.designs.sparse_gated_residual import SparseGatedResidual
from flashnext.calibration.residual_lab.learner import Learner
from flashnext.calibration.training.settings import Settings
from flashnext.export.ops.reference import gated_residual as op

WIDE = ("hyper_connections", "manifold_hyper_connections", "gated_residual", "sparse_gated_residual", "static_widening")
Parts = Any


def random_design(name: str, shape: Shape) -> Parts:
    """A design with random values in every parameter, in float64."""
    design = DESIGNS[name](shape).double()
    generator = torch.Generator().manual_seed(5)
    for p in design.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5
    return design


def draw(*size: int, seed: int = 7) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rms(x: Tensor, weight: Tensor | float = 0.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight)


# --- all designs ------------------------------


@pytest.mark.parametrize("name", DESIGNS)
def test_tokens_see_no_later_ones_and_every_parameter_learns(name: str, shape: Shape, tokens: Tensor) -> None:
    model = Backbone(name, shape, 0)
    hidden = model(tokens)
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 50
    other = model(changed)
    torch.testing.assert_close(other[:, :6], hidden[:, :6])
    assert not torch.allclose(other[:, 6:], hidden[:, 6:])
    (hidden * draw(*hidden.shape).float()).sum().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None and n != "lm_head.weight"]
    assert missing == []


def test_blocks_start_alike_in_every_design(shape: Shape) -> None:
    models = [dict(Backbone(name, shape, 0).named_parameters()) for name in DESIGNS]
    shared = {n for n in models[0] if not n.startswith("residual.")}
    for model in models[1:]:
        assert {n for n in model if not n.startswith("residual.")} == shared
        assert all(torch.equal(model[n], models[0][n]) for n in shared)
    other_seed = dict(Backbone(BASELINE, shape, 1).named_parameters())
    assert not torch.equal(other_seed["embed_tokens.weight"], models[0]["embed_tokens.weight"])


@pytest.mark.parametrize("name", ["hyper_connections", "manifold_hyper_connections", "attention_residual"])
def test_training_starts_from_pre_norm(name: str, shape: Shape, tokens: Tensor) -> None:
    exact = dataclasses.replace(shape, eps=0.0)
    wanted = Backbone(BASELINE, exact, 0).double()(tokens)
    model = Backbone(name, exact, 0).double()
    torch.testing.assert_close(model(tokens), wanted, rtol=1e-9, atol=1e-9)
    for p in model.residual.parameters():
        p.data += draw(*p.shape) * 0.3
    assert not torch.allclose(model(tokens), wanted, atol=1e-2)


def test_static_widening_with_one_branch_is_pre_norm(shape: Shape, tokens: Tensor) -> None:
    single = dataclasses.replace(shape, branches=1)
    wanted = Backbone(BASELINE, shape, 0)(tokens)
    torch.testing.assert_close(Backbone("static_widening", single, 0)(tokens), wanted)
    assert not torch.allclose(Backbone("static_widening", shape, 0)(tokens), wanted, atol=1e-2)


@pytest.mark.parametrize("name", WIDE)
def test_branches_come_apart(name: str, shape: Shape, tokens: Tensor) -> None:
    """Branches that stay alike would be one stream that costs as much as four."""
    learner = Learner(name, shape, Settings())
    for _ in range(3):
        learner.step(tokens, 1.0)
    residual = learner.model.residual
    state = residual.start(draw(1, 1, shape.hidden).float())
    for block in range(shape.blocks):
        x, state = residual.read(block, state)
        state = residual.write(block, state, x)
    assert (state.std(-2) > 1e-6).any(-1).all()
    assert len({tuple(branch.tolist()) for branch in state[0, 0]}) == shape.branches


def test_rows_moved(shape: Shape) -> None:
    blocks, n = shape.blocks, shape.branches
    expected = {
        "pre_norm": 2 * blocks + 1,
        "multi_channel_8": 2 * blocks + 1,
        "static_widening": (n + 1) * blocks + n,
        "gated_residual": 2 * n * blocks + n,
        "sparse_gated_residual": (n + 2) * blocks + n,
        "hyper_connections": 2 * n * blocks + n,
    }
    for name, rows in expected.items():
        assert floats_moved(Backbone(name, shape, 0), shape) == rows * shape.hidden
    design = AttentionResidual(shape)
    state, x = design.start(draw(1, 1, shape.hidden)), draw(1, 1, shape.hidden)
    for block in range(blocks):
        assert design.rows_moved(block) == len(state) + 1
        state = design.write(block, state, x)
    assert design.rows_moved(blocks) == len(state)


# --- one by one ------------------------------


def test_gated_norm(shape: Shape) -> None:
    norm, x = GatedNorm(shape).double(), draw(3, shape.hidden)
    norm.weight.data = draw(shape.hidden, seed=1)
    y = rms(x, norm.weight)
    for row, wanted in zip(norm(x), y, strict=True):
        low = torch.stack([functional.silu(weights @ wanted) for weights in norm.down])
        gate = torch.stack([torch.sigmoid(weights @ low) for weights in norm.up])
        torch.testing.assert_close(row, gate * wanted)


def test_static_widening_writes_in_turn(shape: Shape) -> None:
    design = random_design("static_widening", shape)
    r, y = draw(2, 3, shape.branches, shape.hidden), draw(2, 3, shape.hidden, seed=8)
    x, state = design.read(5, r)
    weight = design.norm_weights[5].view(shape.branches, -1)
    torch.testing.assert_close(x, sum(rms(r[..., i, :], weight[i]) for i in range(shape.branches)) / shape.branches)
    moved = design.write(5, state, y) - r
    torch.testing.assert_close(moved[..., 1, :], y)
    assert (moved[..., [0, 2, 3], :] == 0).all()


def check_connections(design: Design, r: Tensor, read: Tensor, mix: Tensor, write: Tensor, norm: Tensor) -> None:
    """A design's block 2 on one token r [n, H] against coefficients read [n], mix [from, to], write [n]."""
    y, n = draw(r.shape[-1], seed=8), r.shape[0]
    x, state = design.read(2, r[None, None])
    torch.testing.assert_close(x[0, 0], rms(sum(read[i] * r[i] for i in range(n)), norm))  # type: ignore[arg-type]
    after = design.write(2, state, y[None, None])[0, 0]
    for j in range(n):
        torch.testing.assert_close(after[j], sum(mix[i, j] * r[i] for i in range(n)) + write[j] * y)


def test_hyper_connections(shape: Shape) -> None:
    design: HyperConnections = random_design("hyper_connections", shape)
    c: Parts = design.connections[2]
    r = draw(shape.branches, shape.hidden)
    dynamic = torch.tanh(rms(r, c.norm.weight) @ c.dynamic.T)
    read = c.static_read + c.scale_in * dynamic[:, 0]
    write = c.static_write + c.scale_out * dynamic[:, 1]
    mix = torch.stack([c.static_mix[4 * i : 4 * i + 4] + c.scale_in * dynamic[i, 2:] for i in range(4)])
    check_connections(design, r, read, mix, write, design.norms[2].weight)  # type: ignore[arg-type]


def test_manifold_hyper_connections(shape: Shape) -> None:
    design: ManifoldHyperConnections = random_design("manifold_hyper_connections", shape)
    c: Parts = design.connections[2]
    r = draw(shape.branches, shape.hidden)
    v = rms(r.flatten())
    logits = torch.stack([c.dynamic[k] @ v for k in range(24)])
    read = torch.sigmoid(c.scales[0] * logits[:4] + c.static[:4])
    write = 2 * torch.sigmoid(c.scales[1] * logits[4:8] + c.static[4:8])
    mix = sinkhorn((c.scales[2] * logits[8:] + c.static[8:]).view(4, 4))
    check_connections(design, r, read, mix.T, write, design.norms[2].weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0.1, 1.0])
def test_rows_and_columns_of_the_mix_sum_to_one(size: float) -> None:
    """Rows exactly, since they are divided last; columns as far as the iteration has come (slower for large logits)."""
    logits, ones = draw(200, 4, 4) * size, torch.ones(200, 4).double()
    errors = []
    for iterations in (5, 20, 1000):
        matrix = sinkhorn(logits, iterations)
        assert (matrix > 0).all()
        torch.testing.assert_close(matrix.sum(-1), ones, rtol=0, atol=1e-12)
        errors.append(float((matrix.sum(-2) - 1).abs().max()))
    assert errors[0] > errors[1] >= errors[2]
    assert errors[1] < 1e-3
    assert errors[2] < 1e-12


def test_mix_in_training_is_doubly_stochastic(shape: Shape, tokens: Tensor) -> None:
    learner = Learner("manifold_hyper_connections", shape, Settings())
    for _ in range(5):
        learner.step(tokens, 1.0)
    connections: Parts = learner.model.residual.connections
    for connection in connections:
        mix = connection(draw(2, 9, shape.branches, shape.hidden).float())[1]
        for way in (-1, -2):
            torch.testing.assert_close(mix.sum(way), torch.ones(2, 9, 4), rtol=0, atol=1e-5)


def test_sinkhorn_survives_large_logits() -> None:
    logits = torch.tensor([[900.0, 0.0], [0.0, 900.0]], requires_grad=True)
    matrix = sinkhorn(logits)
    torch.testing.assert_close(matrix, torch.eye(2))
    matrix.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_gated_residual_is_the_op(shape: Shape) -> None:
    """A whole way through the layers against the forms of the op's reference."""
    design, n = random_design("gated_residual", shape), shape.branches
    embedding = draw(2, 3, shape.hidden)
    state = design.start(embedding)
    pending: list[Tensor] = []
    for block in range(shape.blocks):
        g = design.gates[block]
        weights = (g.norm_weight, g.down, g.up, g.inject)
        if pending:
            wanted = op.pending(*pending, *weights, branches=n, eps=shape.eps)
        else:
            wanted = op.embed(embedding, *weights, branches=n, eps=shape.eps)
        x, state = design.read(block, state)
        for found, expected in zip((state[0], x, state[1]), wanted, strict=True):
            torch.testing.assert_close(found, expected)
        y = torch.tanh(draw(2, 3, shape.hidden, seed=block) + x)
        state, pending = design.write(block, state, y), [wanted[0], y, wanted[2]]
    g = design.gates[-1]
    last = op.last(*pending, g.norm_weight, g.down, g.up, branches=n, eps=shape.eps)
    torch.testing.assert_close(design.finish(state), last[1])
    torch.testing.assert_close(state, last[0])


def test_sparse_gated_residual_writes_the_two_largest(shape: Shape) -> None:
    sparse, dense = (random_design(name, shape) for name in ("sparse_gated_residual", "gated_residual"))
    sparse.load_state_dict(dense.state_dict())
    r, y = draw(2, 3, shape.branches, shape.hidden), draw(2, 3, shape.hidden, seed=8)
    (x, state), (other, (_, s)) = sparse.read(1, r), dense.read(1, r)
    torch.testing.assert_close(x, other)
    moved = sparse.write(1, state, y) - r
    for b, t in ((b, t) for b in range(2) for t in range(3)):
        order = s[b, t].argsort(descending=True)
        torch.testing.assert_close(moved[b, t, order[:2]], s[b, t, order[:2], None] * y[b, t])
        assert (moved[b, t, order[2:]] == 0).all()


def test_sparse_writes_reach_every_branch_from_the_start(shape: Shape) -> None:
    design = SparseGatedResidual(shape)
    _, (_, s) = design.read(0, design.start(draw(1, 200, shape.hidden).float()))
    assert ((s > 0).sum(-1) == 2).all()
    assert ((s > 0).float().mean((0, 1)) > 0.1).all()


@pytest.mark.parametrize("name", ["attention_residual", "attention_residual_gated"])
def test_attention_residual(name: str, shape: Shape) -> None:
    design = random_design(name, shape)
    outputs = [draw(shape.hidden, seed=k) for k in range(shape.blocks + 1)]  # the embedding, then the blocks'
    state = design.start(outputs[0][None, None])
    for block in range(shape.blocks + 1):
        groups = [outputs[1 : block + 1][k : k + 2] for k in range(0, block, 2)]  # four groups of two blocks
        sources = [outputs[0], *(torch.stack(group).sum(0) for group in groups)]
        attention = design.attention[block]
        scores = torch.stack([attention.query @ rms(s, attention.key_norm.weight) for s in sources])
        wanted = sum(w * s for w, s in zip(scores.softmax(0), sources, strict=True))
        x = design.finish(state) if block == shape.blocks else design.read(block, state)[0]
        torch.testing.assert_close(x[0, 0], design.norms[block](wanted))
        if block < shape.blocks:
            state = design.write(block, state, outputs[block + 1][None, None])


@pytest.mark.parametrize("channels", [2, 4, 8])
def test_multi_channel(channels: int, shape: Shape) -> None:
    design = random_design(f"multi_channel_{channels}", shape)
    r, y, width = draw(1, 1, shape.hidden), draw(1, 1, shape.hidden, seed=8), shape.hidden // channels
    x, state = design.read(3, r)
    after = design.write(3, state, y)
    read, write = design.scales[3]
    for c in range(channels):
        columns = slice(c * width, (c + 1) * width)
        part = r[0, 0, columns]
        normed = (part - part.mean()) / (part.var(correction=0) + shape.eps).sqrt()
        torch.testing.assert_close(x[0, 0, columns], read[c] * normed)
        torch.testing.assert_close(after[0, 0, columns], part + write[c] * y[0, 0, columns])


def test_alarm_of_scales(shape: Shape) -> None:
    design = MultiChannel(shape, 4)
    assert all((scales == 1).all() for scales in design.scales)
    assert design.alarms() == []
    design.scales[2].data[0, 1] = 0.1
    design.scales[5].data[1, 3] = 3.0
    assert design.alarms() == []
    design.scales[2].data[0, 1] = 0.05
    design.scales[5].data[1, 3] = 3.01
    assert design.alarms() == [
        "read scale of channel 1 in block 2 is 0.050, outside 0.1 … 3.0",
        "write scale of channel 3 in block 5 is 3.010, outside 0.1 … 3.0",
    ]


def test_what_is_decayed(shape: Shape) -> None:
    def decay_of(design: str) -> dict[str, float]:
        learner = Learner(design, shape, Settings())
        names = {id(p): n for n, p in learner.parameters.items()}
        return {names[id(p)]: g["weight_decay"] for g in learner.optimizers.adamw.param_groups for p in g["params"]}

    scales = {n: d for n, d in decay_of("multi_channel_4").items() if ".scales." in n}
    assert set(scales.values()) == {0.1}
    assert len(scales) == shape.blocks + 1
    hyper = decay_of("hyper_connections")
    assert {d for n, d in hyper.items() if ".static_" in n} == {0.0}
    assert {d for n, d in hyper.items() if n.endswith(".dynamic")} == {0.1}
    assert not any("_proj." in n for n in hyper)
