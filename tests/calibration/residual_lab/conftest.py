"""A backbone of a few layers, and one without epsilon, on which equalities are exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashnext.calibration.residual_lab.designs.base import Shape


@pytest.fixture
def shape() -> Shape:
    return Shape(vocabulary=50, hidden=16, layers=4, heads=2, mlp=24, rank=3)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(3))
