"""Graphs beside a checkpoint's weights, where tools look for external data: those of a bundle (`--beside`), and those
of golden files.

The folder is not ours alone. Graphs appear in it together or not at all, under a prefix of their own, by which the
next writer of the same bundle or golden folder finds those that it no longer has.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flashnext.export.errors import BundleError
from flashnext.export.graphs.manifest import Manifest

DIGITS = 8


def prefix(target: Path) -> str:
    """`golden-1f2e3d4c.` for a bundle or golden folder: its name, and a part of its path's hash.

    Folders of one name keep their graphs apart. Links above the folder are followed, the folder itself is not: writing
    it replaces a link.
    """
    path = target.absolute().parent.resolve() / target.absolute().name
    return f"{path.name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:DIGITS]}."


def remove_others(folder: Path, start: str, kept: Iterable[str]) -> None:
    """Remove what an earlier run left under a prefix, but for the names that are kept; as far as it may be."""
    names = set(kept)
    for path in list(folder.iterdir()):
        if path.name.startswith((start, f".{start}")) and path.name not in names and not path.is_dir():
            with suppress(OSError):
                path.unlink()


@contextmanager
def named_together(folder: Path) -> Iterator[Callable[[str], Path]]:
    """Where to write the file of a name: hidden until the block ends well, gone if it fails.

    Raises:
        OSError: a file cannot take its place.
    """
    token = secrets.token_hex(4)
    hidden: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        return hidden.setdefault(name, folder / f".{name}.{token}.part")

    try:
        yield path_of
        for name, path in hidden.items():
            if path.exists():
                os.replace(path, folder / name)
    finally:
        for path in hidden.values():
            path.unlink(missing_ok=True)


def beside_path(manifest: Manifest, bundle: Path, graph: str) -> Path:
    """Where `--beside` puts a graph."""
    return Path(manifest.checkpoint.common_parent) / f"{prefix(bundle)}{graph}.onnx"


def write_beside(bundle: Path, manifest: Manifest) -> list[Path]:
    """Copy a bundle's graphs next to the shards.

    Raises:
        BundleError: the folder cannot be written to.
    """
    folder = Path(manifest.checkpoint.common_parent)
    paths = {graph: beside_path(manifest, bundle, graph) for graph in manifest.graphs}
    try:
        with named_together(folder) as path_of:
            for graph, path in paths.items():
                shutil.copyfile(bundle / manifest.graphs[graph].file, path_of(path.name))
    except OSError as cause:
        raise BundleError(
            f"The graphs cannot be written to {folder} ({cause.strerror or cause}); --beside needs a checkpoint folder "
            f"that can be written to. The bundle itself is whole at {bundle}."
        ) from None
    remove_others(folder, prefix(bundle), [path.name for path in paths.values()])
    return list(paths.values())
