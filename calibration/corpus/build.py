"""Build the corpus: fetch the sources, tidy their works, hold out every twentieth part, write two files of documents.

    python -m flashnext.calibration.corpus.build FOLDER

`FOLDER/train.jsonl` and `FOLDER/held_out.jsonl` have a JSON object per line: source, title, text. A work is cut into
parts of about `PART` characters at empty lines; a held-out part is a document of its own, and what lies between two
of them is one training document. Training and held-out text thus have the same authors and no sentence in common.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from flashnext.calibration.corpus.sources import SOURCES, CorpusError, fetch
from flashnext.export.errors import message_at_exit

PART = 24_000
"""Characters: held-out parts are long enough for windows of several thousand tokens."""
HELD_OUT_EVERY, HELD_OUT_FIRST = 20, 7
SMALLEST_CORPUS = 10_000_000
"""Bytes; less means that a source has shrunk."""


@dataclass(frozen=True)
class Document:
    """A run of text."""

    source: str
    title: str
    text: str


def parts(text: str, size: int = PART) -> list[str]:
    """Cut at empty lines into parts of at least `size` characters (the last may be shorter); nothing is lost."""
    out, start = [], 0
    while len(text) - start > size:
        end = text.find("\n\n", start + size)
        if end < 0:
            break
        out.append(text[start : end + 2])
        start = end + 2
    return [*out, text[start:]] if start < len(text) else out


def split(works: Iterator[Document]) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents; parts are counted over all works."""
    train: list[Document] = []
    held_out: list[Document] = []
    number = 0
    for work in works:
        run: list[str] = []
        for part in parts(work.text):
            if number % HELD_OUT_EVERY == HELD_OUT_FIRST:
                train += _documents(work, run)
                held_out += _documents(work, [part])
                run = []
            else:
                run.append(part)
            number += 1
        train += _documents(work, run)
    return train, held_out


def _documents(work: Document, run: list[str]) -> list[Document]:
    return [Document(work.source, work.title, "".join(run))] if run else []


def read_documents(path: Path) -> list[Document]:
    """The documents of a written file."""
    try:
        # Lines end with "\n" alone: a text may hold what else str.splitlines cuts at, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
        return [Document(**json.loads(line)) for line in lines if line]
    except FileNotFoundError:
        raise CorpusError(
            f"{path} does not exist. Build the corpus first: scripts/build_corpus {path.parent}"
        ) from None
    except (ValueError, TypeError):
        raise CorpusError(
            f"{path} is not a corpus file. Build the corpus again: scripts/build_corpus {path.parent}"
        ) from None


def build(folder: Path) -> tuple[list[Document], list[Document]]:
    """Fetch, split and write.

    Raises:
        CorpusError: a source is not to be had, or the text is less than it used to be.
    """
    train, held_out = split(Document(s.name, t, x) for s in SOURCES for t, x in s.read(fetch(s, folder / "packages")))
    size = sum(len(d.text.encode()) for d in train + held_out)
    if size < SMALLEST_CORPUS:
        raise CorpusError(f"The corpus has {size:,} bytes, expected {SMALLEST_CORPUS:,} or more; a source has changed.")
    for name, documents in (("train", train), ("held_out", held_out)):
        lines = "".join(json.dumps(asdict(d), ensure_ascii=False) + "\n" for d in documents)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return train, held_out


@message_at_exit()
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Build the corpus of the small model.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/corpus"))
    folder = parser.parse_args(argv).folder
    train, held_out = build(folder)
    print(f"{'source':24} {'training MB':>12} {'held-out MB':>12}")
    for source in SOURCES:
        sizes = [sum(len(d.text.encode()) for d in part if d.source == source.name) for part in (train, held_out)]
        print(f"{source.name:24} {sizes[0] / 1e6:12.2f} {sizes[1] / 1e6:12.2f}")
    print(f"Wrote {folder}: {len(train)} training documents, {len(held_out)} held-out ones")


if __name__ == "__main__":
    main()
