"""The one switch: a design by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flashnext.calibration.residual_lab.designs.attention_residual import AttentionResidual
from flashnext.calibration.residual_lab.designs.base import Design, Shape
from flashnext.calibration.residual_lab.designs.gated_norm import GatedPreNorm
from flashnext.calibration.residual_lab.designs.gated_residual import GatedResidual
from flashnext.calibration.residual_lab.designs.hyper_connections import HyperConnections
from flashnext.calibration.residual_lab.designs.manifold_hyper_connections import ManifoldHyperConnections
from flashnext.calibration.residual_lab.designs.multi_channel import MultiChannel
from flashnext.calibration.residual_lab.designs.pre_norm import PreNorm
from flashnext.calibration.residual_lab.designs.sparse_gated_residual import SparseGatedResidual
from flashnext.calibration.residual_lab.designs.static_widening import StaticWidening

BASELINE = "pre_norm"
DESIGNS: dict[str, Callable[[Shape], Design]] = {
    BASELINE: PreNorm,
    "gated_norm": GatedPreNorm,
    "static_widening": StaticWidening,
    "hyper_connections": HyperConnections,
    "manifold_hyper_connections": ManifoldHyperConnections,
    "gated_residual": GatedResidual,
    "sparse_gated_residual": SparseGatedResidual,
    "attention_residual": AttentionResidual,
    "attention_residual_gated": partial(AttentionResidual, gated=True),
    "multi_channel_2": partial(MultiChannel, channels=2),
    "multi_channel_4": partial(MultiChannel, channels=4),
    "multi_channel_8": partial(MultiChannel, channels=8),
}
