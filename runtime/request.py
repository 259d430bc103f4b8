"""A request: what was asked, checked before anything runs, and what has been said so far.

A request owns its sequence, sampler and text; the decode loop hands it the logits of each new place, and its drafter
the drafts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from flashnext.export.errors import RequestError
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.logits import Floats, LogitRow, LogitRows, likeliest
from flashnext.runtime.outputs import DraftCounts, Logprob, Piece, RequestOutput, Timings
from flashnext.runtime.sampler import Sampler, top_logprobs
from flashnext.runtime.sampling_params import SamplingParams
from flashnext.runtime.sequence import Sequence
from flashnext.runtime.speculation.draft import Draft
from flashnext.runtime.speculation.draft_length import DRAFT_COST, VERIFY_COST, DraftLength
from flashnext.runtime.stop_strings import StopStrings
from flashnext.runtime.tokenizer import Detokenizer, Tokenizer


class Request:
    """One prompt on its way to an output."""

    def __init__(
        self,
        manifest: Manifest,
        prompt_ids: Items[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        prompt: str | None = None,
    ) -> None:
        """Check a prompt against the bundle and get ready to run it.

        Raises:
            RequestError: no tokens, unknown ids, or more tokens than a slot holds.
        """
        if params.stop_strings and tokenizer is None:
            raise RequestError("Stop strings need a tokenizer and the bundle has none; use stop_token_ids.")
        self.prompt = prompt
        self.sequence = Sequence(check_prompt(prompt_ids, manifest))
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self._params = params
        self._max_tokens = _max_tokens(manifest, self.sequence.prompt_length, params)
        self._stops = _stop_tokens(manifest, params)
        self._draft_length = _draft_length(manifest, params)
        self.sequence.drafted = not self._draft_length.off and params.drafter != "prompt-lookup"
        self._verifications = 0
        if params.min_tokens and len(self._stops) == manifest.config.vocab_size:
            raise RequestError("Every token of the vocabulary is a stop token, so min_tokens must be 0.")
        self._sampler = Sampler(
            params.sampling(manifest.sampling_defaults),
            self.sequence.tokens,
            params.seed,
            tuple(self._stops),
            params.min_tokens,
        )
        self._detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self._stop_strings = StopStrings(params.stop_strings)
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._text: list[str] = []
        self._streamed_pieces = self._streamed_tokens = 0
        self._end_told = False
        self._arrived = time.monotonic()
        self._admitted = self._first_token = self._finished = 0.0

    def admitted(self) -> None:
        """Note the time of the first step; later calls change nothing."""
        self._admitted = self._admitted or self._elapsed()

    def accept(self, logits: Floats | LogitRows, drafts: Items[Draft] = ()) -> None:
        """Take new tokens into sequence and text; may finish the request.

        `logits` [1 + drafts, V] are those behind the last token and behind each draft. Drafts stand while the sampled
        tokens equal them; the token sampled where the first one falls, or behind the last, is new.
        """
        kept = 0
        for place, draft in enumerate((*drafts, None)):
            row = logits[place]
            token = self._sampler.sample(row, draft)
            stands = draft is not None and token == draft.token
            kept += stands
            self._take(token, row, stands)
            if self.done or not stands:
                break
        if drafts:
            self._verifications += 1
            self._draft_length.record(len(drafts), kept)

    def check_deadline(self) -> None:
        """Finish the request if its time is up; what it has said stays."""
        if self._params.max_seconds is not None and not self.done and self._elapsed() >= self._params.max_seconds:
            self._finish("deadline")

    def drafts_wanted(self) -> int:
        """How many tokens to draft now: none while the prompt runs, never more than can still be said."""
        if self.done or self.sequence.waiting_tokens != 1:
            return 0
        return min(self._draft_length.next(), self._max_tokens - self.sequence.output_length - 1)

    @property
    def drafter(self) -> str | None:
        """Who drafts for this request; None when nobody does (any more)."""
        return None if self._draft_length.off else self._params.drafter

    def draft(self, logits: Floats | LogitRow) -> None:
        """Add a draft from the draft layer's logits [V]."""
        drafts = self.sequence.drafts
        if self._params.drafter == "mtp-sampled":
            drafts.append(self._sampler.draft(logits, len(drafts)))
        else:
            drafts.append(Draft(likeliest(logits)))

    def _take(self, token: int, logits: Floats | LogitRow, drafted: bool) -> None:
        if self._logprobs is not None:
            self._logprobs.append(top_logprobs(logits, token, self._params.logprobs or 0))
        self.sequence.keep(token, drafted)
        self._first_token = self._first_token or self._elapsed()
        self._extend_text(token)
        if self.finish_reason is None and self.sequence.output_length >= self._max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self._finish(self.finish_reason)

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self._text.append(self._stop_strings.flush())
        self._finished = self._elapsed()

    def _extend_text(self, token: int) -> None:
        """Append what has become certain; a stop token says nothing, a stop string ends the text before itself."""
        count = self.sequence.output_length
        if token in self._stops and count > self._params.min_tokens:
            self.finish_reason = "stop"
        elif self._detokenizer:
            text = self._detokenizer.add(token)
            self._text.append(self._stop_strings.add(text, search=count > self._params.min_tokens))
            if self._stop_strings.found:
                self.finish_reason = "stop"

    @property
    def token_ids(self) -> list[int]:
        """Everything that was sampled."""
        return self.sequence.tokens[self.sequence.prompt_length :]

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def piece(self) -> Piece | None:
        """What is new since the last call, or None when nothing is."""
        tokens = self.sequence.tokens[self.sequence.prompt_length + self._streamed_tokens :]
        text = "".join(self._text[self._streamed_pieces :])
        self._streamed_tokens += len(tokens)
        self._streamed_pieces = len(self._text)
        ended_between = self.finish_reason == "deadline" and not self._end_told
        self._end_told = self.finish_reason is not None
        return Piece(text, tokens, self.finish_reason) if tokens or ended_between else None

    def output(self) -> RequestOutput:
        """The finished output."""
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=self.sequence.tokens[: self.sequence.prompt_length],
            token_ids=self.token_ids,
            text="".join(self._text),
            finish_reason=self.finish_reason or "",
            logprobs=self._logprobs,
            cached_tokens=self.sequence.cached,
            drafts=DraftCounts(self._draft_length.proposed, self._draft_length.kept, self._verifications),
            timings=Timings(self._admitted, self._first_token, self._finished, self.sequence.output_length),
        )

    def _elapsed(self) -> float:
        return time.monotonic() - self._arrived


def check_prompt(token_ids: Any, manifest: Manifest) -> list[int]:
    """The prompt as a list of known ids that fits a slot.

    Raises:
        RequestError: with what is wrong and how to mend it.
    """
    if len(token_ids) == 0:
        raise RequestError("The prompt is empty; give at least one token.")
    vocabulary = manifest.config.vocab_size
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < vocabulary:
            raise RequestError(
                f"The prompt holds {token!r:.80}; token ids are whole numbers from 0 to {vocabulary - 1}."
            )
    if len(token_ids) > manifest.capacity:
        raise RequestError(
            f"The prompt has {len(token_ids)} tokens and a slot of this bundle holds {manifest.capacity}. "
            "Shorten it, or export the bundle with a larger --capacity."
        )
    return [int(token) for token in token_ids]


def _max_tokens(manifest: Manifest, prompt_length: int, params: SamplingParams) -> int:
    """Tokens that may be sampled: as asked, else the model's default as far as it fits, else all that fit."""
    room = manifest.capacity - prompt_length
    wanted = params.max_tokens
    if room < 1 or (wanted or 1) > room:
        raise RequestError(
            f"{prompt_length} prompt tokens and max_tokens = {wanted or 1} exceed the {manifest.capacity} tokens that "
            "a slot of this bundle holds. Lower max_tokens, shorten the prompt, or export with a larger --capacity."
        )
    if wanted is None:
        wanted = min(room, int(manifest.sampling_defaults.get("max_new_tokens") or room))
    if params.min_tokens > wanted:
        raise RequestError(f"min_tokens = {params.min_tokens} exceeds the {wanted} tokens that can be sampled here.")
    return wanted


def _draft_length(manifest: Manifest, params: SamplingParams) -> DraftLength:
    """As many drafts as were asked for, if the bundle can make and verify them."""
    most = params.draft_tokens
    if most >= manifest.window:
        raise RequestError(
            f"draft_tokens = {most}, and this bundle verifies at most {manifest.window - 1} drafts in a step. "
            f"Lower it, or export the bundle with --window {most + 1}."
        )
    by_layer = params.drafter != "prompt-lookup"
    if most and by_layer and "mtp" not in manifest.graphs:
        raise RequestError(
            f'The bundle has no draft layer for drafter = "{params.drafter}". Export a checkpoint that has MTP '
            'tensors, or take drafter = "prompt-lookup".'
        )
    return DraftLength(most, VERIFY_COST + (DRAFT_COST if by_layer else 0), params.draft_adaptive)


def _stop_tokens(manifest: Manifest, params: SamplingParams) -> frozenset[int]:
    own = () if params.ignore_eos else manifest.stop_token_ids
    asked = tuple(params.stop_token_ids or ())
    unknown = [t for t in asked if t >= manifest.config.vocab_size]
    if unknown:
        raise RequestError(f"stop_token_ids holds {unknown[0]}; the vocabulary has {manifest.config.vocab_size} ids.")
    return frozenset(t for t in (*own, *asked) if t < manifest.config.vocab_size)
