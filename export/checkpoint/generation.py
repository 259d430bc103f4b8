"""What ends a text, and the sampling values that the checkpoint's makers chose.

Three places name an end: `generation_config.json` (often a list), the tokenizer's own eos token (the end of a chat
turn) and the model configuration's eos (for this model the document separator, at which the n-gram history restarts).
A text ends at any of the first two; the third counts only when generation_config.json names none. Stopping at the
model configuration's eos alone would let a chat turn run on for ever.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from flashnext.export.config import ModelConfig
from flashnext.export.errors import CheckpointError
from flashnext.export.files import read_json_object

MAX_TOKENIZER_BYTES = 48 << 20
"""A vocabulary of 250,000 with its merges takes 10 to 35 MB."""

NUMBERS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, 100.0),
    "top_k": (int, 0, 1 << 24),
    "top_p": (float, 0.0, 1.0),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, 0.01, 100.0),
}
"""Sampling values taken over: type, lowest and highest sensible value."""


def generation_settings(
    folder: str | Path, config: ModelConfig
) -> tuple[tuple[int, ...], dict[str, float | int | bool]]:
    """Stop token ids (sorted) and sampling defaults, for the manifest's fields of these names.

    Raises:
        CheckpointError: a file is malformed, or holds values that cannot be meant.
    """
    path = Path(folder)
    raw = _read(path / "generation_config.json", "a generation configuration")
    stops = set(_token_ids(raw.get("eos_token_id"), config)) or set(config.eos_token_id)
    stops |= _tokenizer_eos(path, config)
    return tuple(sorted(stops)), _sampling(raw)


def _read(path: Path, what: str) -> dict[str, Any]:
    return read_json_object(path, CheckpointError, what, MAX_TOKENIZER_BYTES) if path.exists() else {}


def _token_ids(value: Any, config: ModelConfig) -> list[int]:
    items = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or not 0 <= i < config.vocab_size for i in items):
        raise CheckpointError(
            f"generation_config.json has eos_token_id {value!r:.80}; expected token ids below {config.vocab_size}."
        )
    return items


def _sampling(raw: dict[str, Any]) -> dict[str, float | int | bool]:
    defaults: dict[str, float | int | bool] = {}
    if (sample := raw.get("do_sample")) is not None:
        if not isinstance(sample, bool):
            raise CheckpointError(f"generation_config.json has do_sample = {sample!r:.40}; expected true or false.")
        defaults["do_sample"] = sample
    for name, (kind, low, high) in NUMBERS.items():
        value = raw.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise CheckpointError(f"generation_config.json has {name} = {value!r:.40}; expected {low:g} to {high:g}.")
        if not math.isclose(value, kind(value)):
            raise CheckpointError(f"generation_config.json has {name} = {value!r:.40}; expected a whole number.")
        defaults[name] = kind(value)
    return defaults


def _tokenizer_eos(folder: Path, config: ModelConfig) -> set[int]:
    """The tokenizer's eos as a set of one id, or none without tokenizer files or eos token."""
    token = _read(folder / "tokenizer_config.json", "a tokenizer configuration").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    tokenizer = _read(folder / "tokenizer.json", "a tokenizer of the tokenizers library")
    if not isinstance(text, str) or not tokenizer:
        return set()
    token_id = _lookup(tokenizer, text)
    if type(token_id) is not int or not 0 <= token_id < config.vocab_size:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'} has eos_token {text!r:.80}, which tokenizer.json maps to "
            f"{token_id!r:.40}; expected a token id below {config.vocab_size}."
        )
    return {token_id}


def _lookup(tokenizer: dict[str, Any], text: str) -> Any:
    added = tokenizer.get("added_tokens")
    for item in added if isinstance(added, list) else []:
        if isinstance(item, dict) and item.get("content") == text:
            return item.get("id")
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return vocabulary.get(text) if isinstance(vocabulary, dict) else None
