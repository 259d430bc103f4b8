"""The small model's tokenizer: byte-level BPE learnt from the training text, with the ChatML template.

Pipeline and special tokens are those of `random_tokenizer`, so the runtime treats both alike: every byte has a token,
specials come last, and the end of a chat turn is not the document separator.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from flashnext.calibration.training.small_config import SPECIALS, VOCABULARY
from flashnext.export.checkpoint import random_tokenizer
from flashnext.export.errors import CalibrationError

MODEL_MAX_LENGTH = 4096


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """256 bytes, merges up to the vocabulary's size, the three specials last.

    Raises:
        CalibrationError: the text is too short for so many merges.
    """
    tokenizer = random_tokenizer.with_pipeline(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise CalibrationError(
            f"The training text is too short: it gives a vocabulary of {tokenizer.get_vocab_size():,} tokens, and the "
            f"tokenizer has {VOCABULARY:,}. Build the corpus again: scripts/build_corpus."
        )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as the official ones are laid out."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    config = {**random_tokenizer.tokenizer_config(), "model_max_length": MODEL_MAX_LENGTH}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
