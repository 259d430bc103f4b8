"""Logits of whole texts: of the model at every position, and of the draft layer.

Both run a text through a borrowed slot in chunks, exactly as a prompt is prefilled, and keep what is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from flashnext.export.errors import RequestError
from flashnext.runtime.decode_loop import ngram_history
from flashnext.runtime.model_runner import ModelRunner, StepOutput
from flashnext.runtime.sequence import Chunk, Row, Step
from flashnext.runtime.sequence import Sequence as TokenSequence

Logits = NDArray[np.float32]


def score(runner: ModelRunner, slot: int, tokens: Sequence[int], chunk: int) -> Logits:
    """Logits [T, V]: row t is the model's prediction of token t + 1."""
    out = np.empty((len(tokens), runner.manifest.config.vocab_size), np.float32)
    for start, step in chunks(runner, slot, tokens, chunk, all_logits=True):
        out[start : start + len(step.logits)] = step.logits
    return out


def score_draft(runner: ModelRunner, slot: int, tokens: Sequence[int], chunk: int) -> Logits:
    """Draft logits [T - 1, V]: row t predicts token t + 2 from (true state t, token t + 1), all positions in order.

    Raises:
        RequestError: the bundle has no draft layer.
    """
    if not runner.has_mtp:
        raise RequestError("The bundle has no draft layer; export a checkpoint that has MTP tensors.")
    out = np.empty((len(tokens) - 1, runner.manifest.config.vocab_size), np.float32)
    for start, step in chunks(runner, slot, tokens, chunk, all_logits=False):
        following = np.array([tokens[start + 1 : start + 1 + step.hidden.shape[1]]], np.int32)
        pairs = following.shape[1]  # one less than the chunk's tokens at the end of the text
        if pairs:
            out[start : start + pairs], _, _ = runner.mtp_step(
                token_ids=following,
                hidden=step.hidden[:, :pairs],
                slots=np.array([slot], np.int32),
                past_len=np.array([start], np.int32),
                new_len=np.array([pairs], np.int32),
                logit_rows=np.arange(pairs, dtype=np.int32),
            )
    return out


def chunks(
    runner: ModelRunner, slot: int, tokens: Sequence[int], chunk: int, all_logits: bool
) -> Iterator[tuple[int, StepOutput]]:
    """Run a text in chunks; yields each chunk's start and output."""
    context, eos = ngram_history(runner.manifest)
    sequence = TokenSequence(list(tokens), slot=slot)
    while sequence.waiting_tokens:
        start, length = sequence.past, min(chunk, sequence.waiting_tokens)
        following = min(chunk, sequence.waiting_tokens - length)
        upcoming = Chunk(sequence, start + length, following).upcoming(context, eos) if following else None
        batch = Step((Row(sequence, length),), length).batch(context, eos, all_logits)
        yield start, runner.step(batch, upcoming)
        sequence.ran(length, length, runner.manifest.window)
