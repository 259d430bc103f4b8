"""How open the gates of the residual are: what each read takes from a branch, and what each block writes into it.

Both gates belong to a site, the block that a read feeds. The read gate G in (0, 1) has a value per channel, the write
gate s in (0, 2) one per branch. A branch whose mean write gate is below `DEAD` is hardly written by that block, one
above `DOMINATING` takes nearly all it can.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flashnext.calibration.residual.stream import Listener, Read
from flashnext.export.model.layers import GatedResidual

DEAD, DOMINATING = 0.1, 1.8


def normalised(r: Tensor, module: GatedResidual) -> tuple[Tensor, Tensor]:
    """Branches [..., n, H] after the RMSNorm, and what they were multiplied by, in the dtype of r."""
    factor = torch.rsqrt(r.square().mean(-1, keepdim=True) + float(module.attributes["eps"]))
    factor = factor * (1 + module.hc_norm.weight.to(r.dtype)).unflatten(0, (r.shape[-2], -1))
    return r * factor, factor


def read_gates(normed: Tensor, module: GatedResidual) -> Tensor:
    """G [..., n, H] of a Gated Residual for its normalised branches, in their dtype."""
    down, up = (m.weight.to(normed.dtype) for m in (module.input_mix_weight_down, module.input_mix_weight_up))
    low = functional.silu(normed.flatten(-2) @ down.T / normed.shape[-2])
    gates: Tensor = torch.sigmoid(low @ up.T).unflatten(-1, normed.shape[-2:])
    return gates


@dataclass
class SiteGates:
    """Gates of one site over all tokens; each tensor has a value per branch [n]."""

    read_sum: Tensor
    write_sum: Tensor | None = None
    write_min: Tensor | None = None
    write_max: Tensor | None = None
    tokens: int = 0

    def read_mean(self) -> list[float]:
        return (self.read_sum / max(self.tokens, 1)).tolist()

    def write_mean(self) -> list[float]:
        """Empty at the final read, which no block follows."""
        return [] if self.write_sum is None else (self.write_sum / max(self.tokens, 1)).tolist()


class GateListener(Listener):
    """Gates of every read that it is shown, by site, in the order of the model."""

    def __init__(self) -> None:
        self.sites: dict[str, SiteGates] = {}

    def read(self, event: Read) -> None:
        if event.module is None:
            return
        normed, _ = normalised(event.r, event.module)
        read = read_gates(normed, event.module).mean(-1).flatten(0, -2).double()
        site = self.sites.setdefault(event.site, SiteGates(torch.zeros_like(read[0])))
        site.tokens += len(read)
        site.read_sum += read.sum(0)
        if event.s is not None:
            written = event.s.flatten(0, -2).double()
            low, high = written.amin(0), written.amax(0)
            site.write_sum = written.sum(0) if site.write_sum is None else site.write_sum + written.sum(0)
            site.write_min = low if site.write_min is None else torch.minimum(site.write_min, low)
            site.write_max = high if site.write_max is None else torch.maximum(site.write_max, high)

    def remarkable(self) -> list[tuple[str, int, float, str]]:
        """Site, branch, mean write gate and "dead" or "dominating" of each branch that is one."""
        out = []
        for name, site in self.sites.items():
            for branch, mean in enumerate(site.write_mean()):
                if mean < DEAD or mean > DOMINATING:
                    out.append((name, branch, mean, "dead" if mean < DEAD else "dominating"))
        return out
