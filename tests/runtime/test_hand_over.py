"""Branches on their way to the draft layer: one array that keeps codes and scales together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashnext.export.errors import RequestError
from flashnext.export.graphs.manifest import Manifest
from flashnext.export.residual_scales import last_store
from flashnext.runtime.hand_over import HandOver

MakeManifest = Callable[..., Manifest]


def outputs(manifest: Manifest, name: str, scaled: bool) -> dict[str, Any]:
    random = np.random.default_rng(0)
    shape = (2, 3, manifest.config.hc_count, manifest.config.hidden_size)
    codes = random.integers(0, 255, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales = random.uniform(0.1, 1, shape[:3]).astype(np.float32)
    return {name: codes, **({f"{name}_token_scale": scales} if scaled else {})}


def test_a_plain_residual_is_handed_on_as_it_is(make_manifest: MakeManifest) -> None:
    states = np.ones((1, 2, 4, 8), np.float32)
    hand_over = HandOver(make_manifest())
    assert hand_over.packed("hidden", {"hidden": states}) is states
    assert hand_over.fed(states) == {"hidden": states}


@pytest.mark.parametrize("name", ["hidden", "hidden_out"])
def test_dynamic_scales_travel_with_the_codes(make_manifest: MakeManifest, name: str) -> None:
    manifest = make_manifest(residual_mode="dynamic", residual_dtype="float8_e4m3fn")
    hand_over, out = HandOver(manifest), outputs(manifest, name, scaled=True)
    rows = hand_over.packed(name, out)
    mixed = np.concatenate([rows[1:, 1:], rows[:1, :2]])  # rows are cut and put together like any others
    fed = hand_over.fed(mixed)
    for given, taken in ((out[name], fed["hidden"]), (out[f"{name}_token_scale"], fed["hidden_token_scale"])):
        assert taken.dtype == given.dtype
        np.testing.assert_array_equal(
            taken.view(np.uint8), np.concatenate([given[1:, 1:], given[:1, :2]]).view(np.uint8)
        )


def test_static_scales_are_those_of_the_store(make_manifest: MakeManifest) -> None:
    config = make_manifest().config
    scales = {last_store(config): (0.5, 1.0, 2.0, 4.0), "mtp.layers.0.mlp": (8.0, 8.0, 8.0, 8.0)}
    manifest = make_manifest(residual_mode="static", residual_dtype="float8_e4m3fn", residual_scales=scales)
    hand_over = HandOver(manifest)
    for name, wanted in (("hidden", scales[last_store(config)]), ("hidden_out", scales["mtp.layers.0.mlp"])):
        fed = hand_over.fed(hand_over.packed(name, outputs(manifest, name, scaled=False)))
        assert (fed["hidden_token_scale"] == np.array(wanted, np.float32)).all()


def test_other_arrays_are_refused(make_manifest: MakeManifest) -> None:
    manifest = make_manifest(residual_mode="dynamic", residual_dtype="float8_e4m3fn")
    columns, branches = manifest.config.hidden_size, manifest.config.hc_count
    for wrong in (np.zeros((1, 1, branches, columns), np.float32), np.zeros((1, 1, branches, columns), np.uint8)):
        with pytest.raises(RequestError, match=rf"\[B, S, n, {columns + 4}\]; found"):
            HandOver(manifest).fed(wrong)
