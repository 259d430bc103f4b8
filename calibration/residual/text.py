"""Text for calibration and for held-out measurements: files of text or token ids, cut into windows.

Text files are one document each. In a JSONL file each line is one: a list of token ids, a string, or an object with
`token_ids` or `text` (as `scripts/build_corpus` writes them). A folder stands for the text and JSONL files in it, by
name. Documents follow each other with an end of text after each; the stream is cut into windows that share one token,
so that every token but the first can be predicted, and a seed chooses among the windows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CalibrationError, RequestError
from flashnext.export.files import plain, read_small_file
from flashnext.export.residual_scales import CalibrationText
from flashnext.runtime.tokenizer import Tokenizer

SUFFIXES = (".txt", ".text", ".md", ".rst", ".jsonl")
MAX_FILE_BYTES = 256 << 20
MAX_FILES = 10_000
RUN = 24
"""Tokens in a row that two texts have in common only if one repeats the other."""
Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Windows:
    """Chosen windows: `tokens` [N, length + 1]; the last token of each is only predicted."""

    tokens: Tokens
    seed: int

    @property
    def length(self) -> int:
        return int(self.tokens.shape[1]) - 1

    @property
    def count(self) -> int:
        """Tokens that the model is run over."""
        return len(self.tokens) * self.length

    def batches(self, size: int) -> Iterator[Tokens]:
        """Batches [B, length + 1] in order, the last one smaller."""
        for first in range(0, len(self.tokens), size):
            yield self.tokens[first : first + size]

    def record(self) -> CalibrationText:
        """What `scales.json` keeps of them."""
        digest = hashlib.sha256(self.tokens.astype("<i4").tobytes()).hexdigest()
        return CalibrationText(digest, len(self.tokens), self.length, self.seed)


class TextReader:
    """Reads documents with a checkpoint's tokenizer and holds their ids to its vocabulary."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder, self.vocabulary = checkpoint.folder, checkpoint.config.vocab_size
        self.separator = checkpoint.config.eos_token_id[:1]
        self._tokenizer = Tokenizer.open(checkpoint.folder)

    def stream(self, paths: Sequence[str | Path]) -> Tokens:
        """All tokens of the files and folders [T], an end of text after each document.

        Raises:
            CalibrationError: a file that cannot be read or understood, an id outside the vocabulary, or no token.
        """
        documents = [ids for path in map(Path, paths) for file in _files(path) for ids in self._documents(file)]
        if not any(map(len, documents)):
            raise CalibrationError(f"{_names(paths)} gives no tokens at all. Give a file that has text in it.")
        ends = np.array(self.separator, np.int32)
        return np.concatenate([part for ids in documents if len(ids) for part in (ids, ends)])

    def _documents(self, path: Path) -> Iterator[Tokens]:
        try:
            text = read_small_file(path, CalibrationError, "text or JSONL", MAX_FILE_BYTES).decode("utf-8")
        except UnicodeDecodeError as cause:
            raise CalibrationError(
                f"{path} is not UTF-8 at byte {cause.start:,}. Convert it (iconv), or leave it out."
            ) from None
        if path.suffix.lower() != ".jsonl":
            yield self._checked(self._encode(text, str(path)), str(path))
            return
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                place = f"{path}, line {number:,}"
                yield self._checked(self._from_json(line, place), place)

    def _from_json(self, line: str, place: str) -> Sequence[Any]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as cause:
            raise CalibrationError(f"{place} is not JSON ({plain(str(cause))}). Mend or remove the line.") from None
        if isinstance(value, dict):
            value = value.get("token_ids", value.get("text"))
        if isinstance(value, str):
            return self._encode(value, place)
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise CalibrationError(
                f"{place} holds neither text nor token ids ({plain(line, 60)}). A line is a list of token ids, a "
                'string, or an object with "token_ids" or "text".'
            )
        return value

    def _encode(self, text: str, place: str) -> Sequence[int]:
        if self._tokenizer is None:
            raise CalibrationError(
                f"{place} is text, but {self.folder} has no tokenizer.json. Give JSONL with lists of token ids."
            )
        try:
            return self._tokenizer.encode(text, special=False)
        except RequestError:
            raise CalibrationError(
                f"{place} holds half a surrogate pair, which is no text. Mend or remove it."
            ) from None

    def _checked(self, ids: Sequence[Any], place: str) -> Tokens:
        outside = next((i for i in ids if not 0 <= i < self.vocabulary), None)
        if outside is not None:
            raise CalibrationError(
                f"{place} has the token id {plain(str(outside), 20)}, outside of the vocabulary of {self.vocabulary:,} "
                f"(0 … {self.vocabulary - 1:,}). Use this checkpoint's tokenizer."
            )
        return np.array(ids, np.int32)


def _files(path: Path) -> list[Path]:
    """The file itself, or those of a folder that hold text, by name."""
    if not path.is_dir():
        return [path]
    home = path.resolve()
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not found:
        raise CalibrationError(f"The folder {path} holds no file that ends in {', '.join(SUFFIXES)}. Name the files.")
    if len(found) > MAX_FILES:
        raise CalibrationError(f"The folder {path} holds {len(found):,} files, more than {MAX_FILES:,}. Name fewer.")
    strays = [p for p in found if not p.resolve().is_relative_to(home)]
    if strays:
        raise CalibrationError(f"{strays[0]} leads out of the folder {path}. Name that file itself if it is meant.")
    return found


def choose(
    stream: Tokens, length: int, tokens: int | Sequence[int], seed: int, parts: Sequence[str] = ("text",)
) -> list[Windows]:
    """Disjoint sets of windows, one for each of `parts` (their names are for messages), for about `tokens` tokens each
    in the order that the seed gives. A stream shorter than a window gives one shorter window.

    Where there is too little text for all, the sets share it in proportion.

    Raises:
        CalibrationError: not even one window for each.
    """
    wanted = [tokens] * len(parts) if isinstance(tokens, int) else list(tokens)
    length = min(length, len(stream) - 1)
    if length < 1:
        raise CalibrationError(f"The text has {len(stream)} token; two are the least. Give more text.")
    whole = (len(stream) - 1) // length
    if whole < len(parts):
        raise CalibrationError(
            f"The text has {len(stream):,} tokens: {whole} window of {length:,}, but {' and '.join(parts)} each need "
            "one. Give more text, held-out text of its own, or shorter windows."
        )
    order = np.random.default_rng(seed).permutation(whole)
    counts = [-(-w // length) for w in wanted]
    if sum(counts) > whole:
        spare = whole - len(parts)
        counts = [1 + spare * c // sum(counts) for c in counts]
    ends = np.cumsum(counts)
    chosen = [order[end - count : end] * length for count, end in zip(counts, ends, strict=True)]
    return [Windows(np.stack([stream[s : s + length + 1] for s in part]), seed) for part in chosen]


def repeated_share(text: Windows, held_out: Windows) -> float:
    """Share of the held-out runs of `RUN` tokens that are in the calibration windows too (0 is right)."""
    found = np.isin(_run_hashes(held_out.tokens), _run_hashes(text.tokens))
    return float(found.mean()) if found.size else 0.0


def _run_hashes(tokens: Tokens) -> NDArray[np.uint64]:
    """A hash of every run of `RUN` tokens (wrapping polynomial), for all windows; none when they are shorter."""
    count = max(tokens.shape[1] - RUN + 1, 0)
    out = np.zeros((len(tokens), count), np.uint64)
    for place in range(RUN):
        out = out * np.uint64(0x9E3779B97F4A7C15) + tokens[:, place : place + count].astype(np.uint64) + np.uint64(1)
    return out.reshape(-1)


def _names(paths: Sequence[str | Path]) -> str:
    first = str(paths[0]) if paths else "An empty list of files"
    return first if len(paths) < 2 else f"{first} (and {len(paths) - 1} more)"
