"""Block choice of the reference: ties go to the lower index, wherever the blocks lie."""

from __future__ import annotations

import pytest
import torch

from flashnext.export.ops.reference.sparse_attention import choose_blocks


@pytest.mark.parametrize("count", [*range(1, 36), 63, 127, 130, 131, 515])
def test_equal_keys_tie(count: int) -> None:
    """Columns at the edge of a matrix product may be summed in another order than the rest."""
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        query, key = torch.randn(1, 5, 24, generator=g), torch.randn(1, 24, generator=g)
        chosen = choose_blocks(query, key.expand(count, 24), torch.tensor([count - 1]), block=1, budget=16)
        assert chosen.tolist() == [list(range(min(count, 16)))]
