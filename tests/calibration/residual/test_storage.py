"""Ways to store: what comes back, per store, token and branch."""

from __future__ import annotations

import torch
from residual_events import seeded

from flashnext.calibration.residual.storage import Fp8Storage, bf16_storage
from flashnext.export.ops.reference.residual_store import E4M3, E5M2

NAMES = ("a", "b")
POSITIONS = torch.arange(3)[None]


def branches() -> torch.Tensor:
    return torch.randn(1, 3, 2, 16, generator=seeded(0))


def test_static_scales_are_per_store_and_branch() -> None:
    r = torch.full((1, 3, 2, 16), 17.0)
    storage = Fp8Storage(E4M3, NAMES, {"a": (1.0, 17.0), "b": (0.01, 1.0)})
    assert storage("a", r, POSITIONS)[0, 0, :, 0].tolist() == [16.0, 17.0]
    assert storage("b", r, POSITIONS)[0, 0, :, 0].tolist() == [float(torch.tensor(0.01) * 448), 16.0]


def test_dynamic_scales_keep_each_tokens_largest_value() -> None:
    r = branches() * torch.tensor([1e-6, 1.0, 1e6])[None, :, None, None]
    for form in (E4M3, E5M2):
        back = Fp8Storage(form, NAMES)("a", r, POSITIONS)
        torch.testing.assert_close(back.abs().amax(-1), r.abs().amax(-1))
        assert ((back - r).abs() <= r.abs().amax(-1, keepdim=True) * 2.0 ** -(form.mantissa_bits + 1)).all()


def test_stochastic_rounding_depends_on_store_seed_and_position_only() -> None:
    r = branches()
    storage = Fp8Storage(E4M3, NAMES, None, seed=5)
    first = storage("a", r, POSITIONS)
    assert torch.equal(first, storage("a", r, POSITIONS))
    assert torch.equal(first[:, 1:], storage("a", r[:, 1:], POSITIONS[:, 1:]))
    for other in (
        storage("b", r, POSITIONS),
        storage("a", r, POSITIONS + 1),
        Fp8Storage(E4M3, NAMES, None, 6)("a", r, POSITIONS),
    ):
        assert not torch.equal(first, other)


def test_bf16() -> None:
    r = branches()
    assert torch.equal(bf16_storage("a", r, POSITIONS), r.to(torch.bfloat16).float())
