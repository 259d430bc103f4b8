"""Residual branches on their way from one step to the draft layer: one array, whatever they are stored in.

Branches in FP8 mean nothing without their scales, and those differ between the main model and the draft layer. So the
two travel together: the codes of a branch, then its scale's four bytes. Rows of such an array can be cut, copied and
put together like those of any other. Branches that stay in a device's memory are never packed: `DeviceBranches` keeps
two arrays, and cuts and joins both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashnext.export.errors import RequestError
from flashnext.export.graphs.manifest import Manifest
from flashnext.export.residual_scales import DRAFT, last_store
from flashnext.runtime.engines.base import Array, numpy_dtype

SCALE_BYTES = 4


class HandOver:
    """What a bundle's graphs give and take as branches, and the one array for it."""

    def __init__(self, manifest: Manifest) -> None:
        self._codes = None if manifest.residual_mode == "plain" else numpy_dtype(manifest.residual_dtype)
        stores = {"hidden": last_store(manifest.config), "hidden_out": f"{DRAFT}.mlp"}
        self._static = {name: manifest.residual_scales.get(store) for name, store in stores.items()}
        self._columns = manifest.config.hidden_size

    def packed(self, name: str, outputs: Mapping[str, Any]) -> Any:
        """The output `name` ("hidden" or "hidden_out") as one array: [B, S, n, H], or bytes [B, S, n, H + 4].

        An output in a device's memory stays there.
        """
        branches = outputs[name]
        if self._codes is None:
            return branches
        scales = outputs.get(f"{name}_token_scale")
        if scales is None:
            scales = np.broadcast_to(np.array(self._static[name], np.float32), branches.shape[:-1])
        if not isinstance(branches, np.ndarray):
            return DeviceBranches(branches, scales)
        scale_bytes = np.ascontiguousarray(scales)[..., None].view(np.uint8)
        return np.concatenate([branches.view(np.uint8), scale_bytes], axis=-1)

    def fed(self, packed: Any) -> dict[str, Any]:
        """The draft layer's inputs for such an array.

        Raises:
            RequestError: it is no array of this bundle's.
        """
        if self._codes is None:
            return {"hidden": packed}
        if isinstance(packed, DeviceBranches):
            return {"hidden": packed.codes, "hidden_token_scale": packed.scales}
        if packed.dtype != np.uint8 or packed.shape[-1] != self._columns + SCALE_BYTES:
            raise RequestError(
                "The draft layer takes the states that a step of this bundle returned, bytes "
                f"[B, S, n, {self._columns + SCALE_BYTES}]; found {packed.dtype.name} {list(packed.shape)}."
            )
        codes = np.ascontiguousarray(packed[..., : self._columns]).view(self._codes)
        scales: NDArray[np.float32] = np.ascontiguousarray(packed[..., self._columns :]).view(np.float32)[..., 0]
        return {"hidden": codes, "hidden_token_scale": scales}


@dataclass(frozen=True)
class DeviceBranches:
    """Codes [B, S, n, H] on a device and their scales [B, S, n], there or (static ones) on the host."""

    codes: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: Any) -> DeviceBranches:
        return DeviceBranches(self.codes[index], self.scales[index])

    @staticmethod
    def joined(rows: Sequence[DeviceBranches], width: int) -> DeviceBranches:
        """See `join`."""
        return DeviceBranches(join([row.codes for row in rows], width), join([row.scales for row in rows], width))


def join(rows: Sequence[Any], width: int) -> Any:
    """Rows [k, …] of any k up to `width` as one array [len(rows), width, …]; what is missing is of no meaning.

    Arrays that know how to join themselves (on a device) do.
    """
    if not isinstance(rows[0], np.ndarray):
        return rows[0].joined(rows, width)
    out: Array = np.zeros((len(rows), width, *rows[0].shape[1:]), rows[0].dtype)
    for place, row in zip(out, rows, strict=True):
        place[: len(row)] = row
    return out
