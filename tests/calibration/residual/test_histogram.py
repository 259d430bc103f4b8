"""Percentiles of logarithmic histograms against sorted values, to the stated resolution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext.calibration.residual.histogram import BINS, count, percentile, upper_edges


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50), st.floats(0.1, 100))
def test_percentile_is_an_upper_bound_within_its_bin(values: list[float], percent: float) -> None:
    magnitudes = np.sort(np.abs(np.array(values, np.float32)))
    exact = magnitudes[max(int(np.ceil(len(values) * percent / 100)), 1) - 1]
    found = percentile(count(torch.tensor([values]))[0].numpy(), percent)
    assert found >= exact or exact < 1e-37
    assert found <= exact * 1.032 or exact < 1e-37


def test_counts_add_up_over_batches_and_rows() -> None:
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    whole = count(values)
    assert whole.shape == (3, BINS)
    assert torch.equal(whole, sum(count(v) for v in values.split(250, dim=1)))
    assert torch.equal(whole[1], count(values[1:2])[0])
    assert whole.sum(1).tolist() == [1000] * 3


def test_bins_hold_what_their_edges_say() -> None:
    edge = upper_edges()[4064 - 1]  # the bin before exponent 0
    assert edge == 1.0
    assert count(torch.tensor([[1.0, np.nextafter(np.float32(1), np.float32(0))]]))[0].nonzero().flatten().tolist() == [
        4063,
        4064,
    ]


@pytest.mark.parametrize("counts", [np.zeros(BINS, np.int64), np.eye(1, BINS, dtype=np.int64)[0] * 7])
def test_nothing_and_zeros_have_percentile_zero(counts: np.ndarray) -> None:
    assert percentile(counts, 99.9) == 0.0
