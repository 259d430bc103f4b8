"""A model that only remembers, and the few lines that run requests over it.

It keeps each slot's tokens as the states would and answers with a hash of all of them, so any mix-up of slots, lengths,
chunks or drafts changes the output.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashnext.export.errors import EngineError
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.decode_loop import DecodeLoop
from flashnext.runtime.model_runner import StepBatch, StepOutput
from flashnext.runtime.ngram import Upcoming
from flashnext.runtime.request import Request
from flashnext.runtime.sampling_params import SamplingParams
from flashnext.runtime.scheduler import Scheduler
from flashnext.runtime.speculation.draft import Drafter


class RememberingModel:
    """Slots that hold tokens; `fail_at` names steps that raise, `nan_for` a first token whose logits break."""

    def __init__(self, manifest: Manifest, fail_at: int = -1, nan_for: int = -1) -> None:
        self.manifest = manifest
        self.steps = 0
        self.batch_sizes: list[int] = []
        self._fail_at, self._nan_for = fail_at, nan_for
        self._memory: dict[int, tuple[list[int], list[int]]] = {}

    def step(self, batch: StepBatch, upcoming: Upcoming | None = None) -> StepOutput:
        self.steps += 1
        self.batch_sizes.append(len(batch.slots))
        if self.steps == self._fail_at:
            raise EngineError("the engine broke")
        texts = [self._text(batch, i) for i in range(len(batch.slots))]
        width = batch.token_ids.shape[1]
        places = [divmod(int(place), width) for place in batch.logit_rows]
        logits = [self._logits(texts[i][: int(batch.past_len[i]) + column + 1]) for i, column in places]
        return StepOutput(np.stack(logits), np.zeros((len(texts), width, 1, 1), np.float32))

    def _text(self, batch: StepBatch, i: int) -> list[int]:
        """The slot's text and the step's tokens; of the last step's pending tokens only the accepted ones stay."""
        slot, past, length = int(batch.slots[i]), int(batch.past_len[i]), int(batch.new_len[i])
        committed, pending = self._memory[slot] if past else ([], [])
        committed = committed + pending[: int(batch.accepted[i])]
        assert len(committed) == past
        new = batch.token_ids[i, :length].tolist()
        at_once = batch.token_ids.shape[1] > self.manifest.window
        self._memory[slot] = (committed + new, []) if at_once else (committed, new)
        return committed + new

    def _logits(self, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        row = np.random.default_rng(tokens).normal(size=self.manifest.config.vocab_size).astype(np.float32)
        return row * np.float32(np.nan) if tokens[0] == self._nan_for else row


def start(
    manifest: Manifest,
    chunk: int = 5,
    max_batch: int | None = None,
    drafters: dict[str, Drafter] | None = None,
    **faults: int,
) -> tuple[DecodeLoop, Scheduler, RememberingModel]:
    model = RememberingModel(manifest, **faults)
    scheduler = Scheduler(manifest.slots, manifest.window, chunk, max_batch)
    return DecodeLoop(model, scheduler, drafters), scheduler, model


def request(manifest: Manifest, prompt: list[int], **params: Any) -> Request:
    params = {"max_tokens": 7, "temperature": 0.0, **params}
    return Request(manifest, prompt, SamplingParams(**params), None)


def alone(manifest: Manifest, prompt: list[int], **params: Any) -> list[int]:
    loop, _, _ = start(manifest, chunk=64)
    single = request(manifest, prompt, **params)
    loop.run([single])
    return single.output().token_ids
