"""Lost updates against hand-computed steps, and against what the quantizer does."""

from __future__ import annotations

import pytest
import torch

from flashnext.calibration.residual.lost_updates import LostUpdates, half_step
from flashnext.export.ops.reference.residual_store import E4M3, E5M2, FORMATS, dequantize, quantize


@pytest.mark.parametrize(
    ("form", "r", "scale", "expected"),
    [
        (E4M3, 16.0, 1.0, 1.0),  # 2^4 has steps of 2^(4 - 3)
        (E4M3, -31.0, 1.0, 1.0),
        (E4M3, 16.0, 2.0, 1.0),  # 8 steps of 1, each worth 2
        (E4M3, 448.0, 1.0, 16.0),
        (E4M3, 1000.0, 1.0, 16.0),  # saturated: the last step's width
        (E4M3, 0.0, 1.0, 2.0**-10),  # subnormals are 2^-9 apart
        (E4M3, 0.001, 4.0, 2.0**-8),
        (E5M2, 16.0, 1.0, 2.0),
        (E5M2, 0.0, 1.0, 2.0**-17),
    ],
)
def test_half_a_step(form, r: float, scale: float, expected: float) -> None:
    assert float(half_step(torch.tensor([[[r]]]), torch.tensor([scale]), form)) == expected


def test_counts_by_number_and_energy() -> None:
    """Branch 0 at 16 (half a step is 1): updates 0.5, 2, 0, 0.5; branch 1 at 0 loses nothing."""
    before = torch.tensor([[[16.0] * 4, [0.0] * 4]])
    after = before + torch.tensor([[[0.5, 2.0, 0.0, -0.5], [1.0] * 4]])
    lost = LostUpdates(2)
    lost.add(before, after, torch.ones(2), E4M3)
    assert lost.shares() == ([2 / 3, 0.0], [0.5 / 4.5, 0.0])
    lost.add(before, before + 2, torch.ones(2), E4M3, weights=torch.tensor([3.0]))
    assert lost.shares()[0] == [2 / 15, 0.0]
    assert LostUpdates(1).shares() == ([0.0], [0.0])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_lost_update_leaves_the_code(name: str) -> None:
    """On the grid, nearest rounding keeps the code for every lost update, and moves it for one above half a step."""
    form, scale = FORMATS[name], torch.tensor([0.37])
    r = torch.randn(1, 1, 4000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-8, 2, 4000)
    grid = dequantize(quantize(r, scale, form), scale)
    half = half_step(grid, scale, form)
    away = grid.sign()  # towards zero the steps of a power of two are half as wide
    away[away == 0] = 1
    kept = quantize(grid + 0.99 * half * away, scale, form)
    moved = quantize(grid + 1.01 * half * away, scale, form)
    codes = quantize(grid, scale, form)
    assert torch.equal(kept.float(), codes.float())
    inner = grid.abs() < form.largest * 0.37
    assert (moved.float() != codes.float())[inner].all()
