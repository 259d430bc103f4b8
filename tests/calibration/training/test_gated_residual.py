"""The Gated Residual with its own backward pass against autograd through the reference op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashnext.calibration.training.gated_residual import advance
from flashnext.export.config import ModelConfig
from flashnext.export.model import layers
from flashnext.export.ops.reference import gated_residual as reference


def random_module(c: ModelConfig, last: bool) -> layers.GatedResidual:
    module = layers.GatedResidual(c, last).double()
    generator = torch.Generator().manual_seed(4)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3
    return module


def expected(module: layers.GatedResidual, r: Tensor, y: Tensor, s: Tensor) -> list[Tensor]:
    branches, eps = r.shape[-2], float(module.attributes["eps"])
    new = reference.write(r, y, s)
    down, up = module.input_mix_weight_down.weight, module.input_mix_weight_up.weight
    x, flat = reference.read(new, module.hc_norm.weight, down, up, branches, eps)
    if module.block_inject_weight is None:
        return [new, x]
    return [new, x, reference.write_gates(flat, module.block_inject_weight.weight, branches)]


@pytest.mark.parametrize("last", [False, True])
def test_values_and_gradients(tiny_config: ModelConfig, last: bool) -> None:
    module, generator = random_module(tiny_config, last), torch.Generator().manual_seed(5)
    shape = (2, 3, tiny_config.hc_count, tiny_config.hidden_size)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = [draw(*shape), draw(2, 3, shape[-1]), draw(2, 3, shape[-2])]
    wanted = expected(module, inputs[0], inputs[1], inputs[2])
    found = advance(module, (inputs[0], inputs[1], inputs[2]))[: len(wanted)]
    weights = [draw(*t.shape).detach() for t in wanted]
    leaves = [*inputs, *module.parameters()]
    gradients = []
    for outputs in (wanted, found):
        total = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
        gradients.append(torch.autograd.grad(torch.as_tensor(total), leaves))
    for a, b in zip([*wanted, *gradients[0]], [*found, *gradients[1]], strict=True):
        torch.testing.assert_close(b, a)
