"""Which files of a checkpoint folder hold weights: `model.safetensors.index.json`, or one `model.safetensors`.

Only plain file names beside the index are followed, so an index cannot reach out of the folder; that such a name is
itself a link (hub caches link into `blobs/`) is the owner's own doing and fine. Pickle files are never opened.
"""

from __future__ import annotations

from pathlib import Path

from flashnext.export.checkpoint.safetensors_file import TensorInfo, read_header, shown
from flashnext.export.errors import CheckpointError
from flashnext.export.files import read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 32 << 20
"""The official FP8 release has 150,000 tensors: 18 MB."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def weight_map(folder: Path) -> dict[str, str] | None:
    """The index's map from tensor name to file name; None for a checkpoint of one file without an index.

    Raises:
        CheckpointError: no weights, only pickle files, or an index with anything but plain safetensors names.
    """
    names = _names(folder)
    if INDEX_NAME in names:
        index = folder / INDEX_NAME
        raw = read_json_object(index, CheckpointError, "the index of a sharded checkpoint", MAX_INDEX_BYTES)
        return _checked_map(index, raw.get("weight_map"))
    if SINGLE_NAME not in names:
        raise CheckpointError(_no_weights(folder, names))
    return None


def shard_files(folder: Path) -> list[Path]:
    """The weight files in a fixed order (by name), as they are called in the folder."""
    mapping = weight_map(folder)
    return [folder / name for name in (sorted(set(mapping.values())) if mapping else [SINGLE_NAME])]


def read_tensors(folder: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """All tensors of all shards by raw name, and every fault found in files or index."""
    mapping = weight_map(folder)
    tensors: dict[str, TensorInfo] = {}
    where: dict[str, str] = {}
    faults: list[str] = []
    for name in sorted(set(mapping.values())) if mapping else [SINGLE_NAME]:
        try:
            found = read_header(folder / name)
        except CheckpointError as fault:
            faults.append(str(fault))
            continue
        faults += [f"{shown(t)} is in {where[t]} and again in {name}" for t in found if t in tensors]
        where.update(dict.fromkeys(found, name))
        tensors.update(found)
    if mapping and not faults:  # after a damaged shard these would only repeat that it is missing
        faults = _index_faults(mapping, where)
    return tensors, faults


def _index_faults(mapping: dict[str, str], where: dict[str, str]) -> list[str]:
    lost = [n for n, file in mapping.items() if where.get(n) != file]
    unlisted = [n for n in where if n not in mapping]
    return [f"{shown(n)} is not in {mapping[n]}, where {INDEX_NAME} puts it" for n in lost] + [
        f"{shown(n)} is in {where[n]} but not in {INDEX_NAME}" for n in unlisted
    ]


def _checked_map(index: Path, raw: object) -> dict[str, str]:
    if not isinstance(raw, dict) or not raw:
        raise CheckpointError(f"{index} has no weight_map from tensor names to files. Download it again.")
    for name, file in raw.items():
        if not isinstance(file, str) or not _is_plain(file):
            raise CheckpointError(
                f"{index} puts {shown(name)} into {file!r:.200}; only .safetensors files beside the index are read."
            )
    return raw


def _is_plain(file: str) -> bool:
    return file.endswith(".safetensors") and file.isprintable() and not set(file) & set("/\\") and file[0] != "."


def _names(folder: Path) -> list[str]:
    try:
        return sorted(p.name for p in folder.iterdir())
    except OSError as cause:
        raise CheckpointError(f"The checkpoint folder {folder} cannot be read ({cause.strerror}).") from None


def _no_weights(folder: Path, names: list[str]) -> str:
    if pickles := [n for n in names if n.endswith(PICKLE_SUFFIXES)]:
        return (
            f"{folder} holds its weights only as pickle files ({', '.join(pickles[:3])}); they can run code when they "
            "are loaded and are never opened. Convert the checkpoint to safetensors where you trust it."
        )
    if loose := [n for n in names if n.endswith(".safetensors")]:
        return f"{folder} has {len(loose)} safetensors files but no {INDEX_NAME}. Download the index too."
    return f"{folder} has no weights; expected {INDEX_NAME} or {SINGLE_NAME}."
