"""Tokens of the corpus, and the windows that a training step sees.

Documents follow each other with `<|endoftext|>` between them. An epoch is a tiling of the stream by windows of equal
length, shifted by a random phase and shuffled; which windows a step sees depends on the seed and the step's number
alone, so a resumed run sees what an uninterrupted one would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from flashnext.calibration.corpus.build import Document, read_documents
from flashnext.calibration.training.small_config import SPECIALS
from flashnext.calibration.training.tokenizer import train_tokenizer

Tokens = NDArray[np.uint16]


class Windows:
    """Batches of windows by step number."""

    def __init__(self, tokens: NDArray[Any], length: int, batch: int, seed: int) -> None:
        self.tokens, self.length, self.batch, self.seed = tokens, length, batch, seed
        self.per_epoch = len(tokens) // length - 1
        if self.per_epoch < 1:
            raise ValueError(f"{len(tokens)} tokens are too few for windows of {length}")

    def __call__(self, step: int) -> Tensor:
        """Tokens [batch, length] of a step."""
        numbers = range(step * self.batch, (step + 1) * self.batch)
        rows = [self.tokens[s : s + self.length] for s in map(self._start, numbers)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _start(self, number: int) -> int:
        epoch, place = divmod(number, self.per_epoch)
        rng = np.random.default_rng([self.seed, epoch])
        phase = int(rng.integers(self.length))
        return phase + int(rng.permutation(self.per_epoch)[place]) * self.length


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> Tokens:
    """All documents' tokens, a separator after each."""
    separator = tokenizer.token_to_id(SPECIALS[0])
    encoded = tokenizer.encode_batch([d.text for d in documents], add_special_tokens=False)
    return np.concatenate([np.array([*e.ids, separator], np.uint16) for e in encoded])


def prepare(corpus: Path, folder: Path) -> tuple[Tokenizer, Tokens]:
    """The tokenizer and the training tokens, made from the corpus once and kept in the run's folder."""
    stored, tokens = folder / "tokenizer.json", folder / "tokens.npy"
    if not tokens.exists():
        documents = read_documents(corpus / "train.jsonl")
        tokenizer = train_tokenizer(d.text for d in documents)
        stored.write_text(tokenizer.to_str(), encoding="utf-8")
        partial = folder / "tokens.partial.npy"  # an interruption must not leave half of the tokens under their name
        np.save(partial, encode(tokenizer, documents))
        partial.replace(tokens)
    return Tokenizer.from_file(str(stored)), np.load(tokens)
