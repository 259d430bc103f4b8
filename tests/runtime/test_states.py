"""State arrays: shared by name, a row for each slot and one more, sizes as promised."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from flashnext.export.errors import BundleError
from flashnext.export.graphs.manifest import GraphSpec, Manifest, TensorSpec
from flashnext.runtime.states import allocate_states, bytes_per_slot

MakeManifest = Callable[..., Manifest]


def graph(*inputs: TensorSpec) -> GraphSpec:
    return GraphSpec("x.onnx", inputs, (), {})


def state(name: str, *shape: int | str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, shape, "state")


def test_states_are_zero_and_those_of_one_name_are_one(make_manifest: MakeManifest) -> None:
    kv = state("kv", 4, 10, 2, dtype="bfloat16")
    token_ids = TensorSpec("token_ids", "int32", ("B", "S"), "step")
    manifest = make_manifest(
        graphs={"mtp": graph(kv, token_ids), "mtp_draft": graph(kv), "body": graph(state("s", 4, 3))}
    )
    states = allocate_states(manifest)
    assert {name: (a.dtype, a.shape) for name, a in states.items()} == {
        "kv": (np.dtype(ml_dtypes.bfloat16), (4, 10, 2)),
        "s": (np.dtype(np.float32), (4, 3)),
    }
    assert not any(a.astype(np.float32).any() for a in states.values())
    assert bytes_per_slot(manifest) == 10 * 2 * 2 + 3 * 4


def test_graphs_that_disagree_are_refused(make_manifest: MakeManifest) -> None:
    manifest = make_manifest(graphs={"a": graph(state("s", 4, 3)), "b": graph(state("s", 4, 5))})
    with pytest.raises(BundleError, match="disagree about the state s"):
        allocate_states(manifest)


@pytest.mark.parametrize("shape", [(3, 2), ("B", 2), ()])
def test_a_state_has_a_row_per_slot_and_one_more(make_manifest: MakeManifest, shape: tuple[int | str, ...]) -> None:
    with pytest.raises(BundleError, match="3 slots"):
        allocate_states(make_manifest(graphs={"a": graph(state("s", *shape))}))
