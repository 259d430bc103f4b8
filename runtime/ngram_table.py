"""The n-gram table: rows by number, dequantized where they are written, wherever the shards are (`ngram_memory`).

Plain tables are BF16, F16 or F32. An FP8 table has one scale: value = code * scale. An NVFP4 table packs two codes into
a byte; every 16 columns of a row have an E4M3 scale, the table another one (`flashnext.export.number_formats`).
Products are float32 and rounded once to the dtype that the graph takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flashnext.export import number_formats
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CheckpointError
from flashnext.export.graphs.manifest import NgramSpec
from flashnext.runtime.engines.base import Array, numpy_dtype
from flashnext.runtime.mapped_files.file_rows import FileRows
from flashnext.runtime.mapped_files.files import MappedFiles
from flashnext.runtime.ngram_memory import TableMemory

Ints = NDArray[np.int64]
STORED_DTYPES = {"plain": ("float32", "float16", "bfloat16"), "fp8": ("float8_e4m3fn",), "nvfp4": ("uint8",)}
NAN_CODE = 0x7F
"""E4M3 scales from here on are NaN or negative."""


class NgramTable:
    """Rows of one layer's table; nothing but the rows that are asked for is read."""

    def __init__(
        self,
        spec: NgramSpec,
        shards: Sequence[Array],
        dtype: str,
        row_scales: Sequence[Array] = (),
        scale: float = 1.0,
        storage: str = "resident",
        files: MappedFiles | None = None,
        file_rows: FileRows | None = None,
    ) -> None:
        """`shards` are the table's parts [rows, columns] in order (NVFP4: [rows, columns / 2]), with their scales.

        `storage` says whether a row may have to be read from a file: "resident" (never), "mapped", or "mapped, untold"
        (the system does not say which pages are in memory). `files` are those that the parts are mapped from; with
        `file_rows`, `gather` reads the rows from there by the parts' names.

        Raises:
            CheckpointError: parts that do not form the table, or a scale that is no scale.
        """
        _check(spec, shards, row_scales, scale)
        self.spec = spec
        self.storage = storage
        self.files = files or MappedFiles()
        self._file_rows = file_rows
        self.dtype = numpy_dtype(dtype)
        self.shards = [number_formats.codes(s) for s in shards] if spec.form == "fp8" else list(shards)
        self.row_scales = [number_formats.codes(s) for s in row_scales]
        self.scale = np.array(scale, np.float32)
        self.values = (number_formats.E4M3 * self.scale).astype(self.dtype)  # of each FP8 code
        self._starts = np.cumsum([0, *(len(s) for s in shards)])
        self.row_bytes = sum(p[0].shape[1] * p[0].itemsize for p in (self.shards, self.row_scales) if p)
        """Of one row as stored, with its scales."""

    @classmethod
    def open(cls, spec: NgramSpec, checkpoint: Checkpoint, dtype: str, memory: TableMemory | None = None) -> NgramTable:
        """The tensors that the manifest lists, where `memory` keeps them (mapped, when None).

        Raises:
            CheckpointError: a tensor is missing, or they do not form the table.
        """
        names = (*spec.shards, *spec.row_scales, *([spec.scale] if spec.scale else []))
        missing = [name for name in names if name not in checkpoint.tensors]
        if missing:
            raise CheckpointError(f"The checkpoint lacks {missing[0]} of the n-gram table. Export the bundle again.")
        memory = memory or TableMemory()
        shards, row_scales = (memory.place(checkpoint, names) for names in (spec.shards, spec.row_scales))
        scale = float(checkpoint.array(spec.scale).astype(np.float32).item()) if spec.scale else 1.0
        in_files = names if memory.in_files else ()
        files = MappedFiles.of(checkpoint).only(checkpoint.tensors[name].file for name in in_files)
        file_rows = None if files.survive else FileRows(files, checkpoint.tensors)
        return cls(spec, shards, dtype, row_scales, scale, memory.storage, files, file_rows)

    def gather(self, row_ids: Ints) -> Array:
        """Rows [len(row_ids), columns] in the graph's dtype: one indexed read per shard that is touched."""
        out = np.empty((len(row_ids), self.spec.columns), self.dtype)
        shard_of = np.searchsorted(self._starts, row_ids, side="right") - 1
        for shard in np.unique(shard_of):
            chosen = np.flatnonzero(shard_of == shard)
            out[chosen] = self._rows(int(shard), row_ids[chosen] - self._starts[shard])
        return out

    def _rows(self, shard: int, rows: Ints) -> Array:
        stored = self._stored(self.spec.shards[shard], self.shards[shard], rows)
        if self.spec.form == "fp8":
            values: Array = self.values[stored]
            return values
        if self.spec.form == "nvfp4":
            scales = self._stored(self.spec.row_scales[shard], self.row_scales[shard], rows)
            self._check_codes(shard, scales)
            return number_formats.dequantize_nvfp4(stored, scales, self.scale)
        return stored

    def _stored(self, name: str, part: Array, rows: Ints) -> Array:
        if self._file_rows is None:
            found: Array = part[rows]
            return found
        return self._file_rows.rows(name, rows).view(part.dtype)

    def check_row_scales(self) -> None:
        """Raise a CheckpointError if any row of an NVFP4 table has a scale that is none.

        For a device, which cannot say so of the rows that it reads.
        """
        for shard, scales in enumerate(self.row_scales):
            self._check_codes(shard, scales)

    def _check_codes(self, shard: int, scales: NDArray[np.uint8]) -> None:
        if scales.max(initial=0) >= NAN_CODE:
            name = self.spec.row_scales[shard]
            raise CheckpointError(f"{name} holds NaN or a negative scale. Download the checkpoint again.")


def _check(spec: NgramSpec, shards: Sequence[Array], row_scales: Sequence[Array], scale: float) -> None:
    if spec.form not in STORED_DTYPES:
        raise CheckpointError(f"The n-gram table's form {spec.form!r} is not one of {', '.join(STORED_DTYPES)}.")
    allowed = STORED_DTYPES[spec.form]
    stored_columns = spec.columns // 2 if spec.form == "nvfp4" else spec.columns
    for name, shard in zip(spec.shards, shards, strict=True):
        if shard.ndim != 2 or shard.shape[1] != stored_columns:
            raise CheckpointError(f"{name} has shape {list(shard.shape)}; expected [rows, {stored_columns}].")
        if shard.dtype.name not in allowed:
            raise CheckpointError(f"{name} is {shard.dtype.name}; a {spec.form} table holds {', '.join(allowed)}.")
    if spec.form == "nvfp4":
        _check_row_scales(spec, shards, row_scales)
    if not 0 < scale < np.inf:
        raise CheckpointError(f"{spec.scale} is {scale}; a scale has to be a finite number above zero.")
    rows, needed = sum(len(s) for s in shards), sum(spec.head_sizes)
    if rows < max(spec.rows, needed):
        raise CheckpointError(f"The n-gram table of layer {spec.layer} has {rows:,} rows, {needed:,} are hashed to.")


def _check_row_scales(spec: NgramSpec, shards: Sequence[Array], row_scales: Sequence[Array]) -> None:
    groups = spec.columns // number_formats.GROUP
    found = [(s.shape, s.dtype.name) for s in row_scales]
    if found != [((len(s), groups), "float8_e4m3fn") for s in shards]:
        raise CheckpointError(
            f"The n-gram table of layer {spec.layer} needs E4M3 scales [rows, {groups}] for each of its "
            f"{len(shards)} shards, found {len(found)}: {str(found[:1])[1:-1]}. Export the bundle again."
        )
