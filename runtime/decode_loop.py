"""The loop that ties scheduler, model and requests together, one step at a time.

An exception while sampling ends that request; one in a step ends the step's requests, whose states can no longer be
trusted. Either way the slots are free again, the others go on, and whoever owns the request meets its exception.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol

from flashnext.export.errors import RequestError
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.model_runner import StepBatch, StepOutput
from flashnext.runtime.ngram import Upcoming
from flashnext.runtime.outputs import Piece
from flashnext.runtime.prefix_cache import PrefixCache
from flashnext.runtime.request import Request
from flashnext.runtime.scheduler import Scheduler
from flashnext.runtime.sequence import Sequence as TokenSequence
from flashnext.runtime.sequence import Step
from flashnext.runtime.speculation.draft import Drafter, Progress

Watch = Callable[[int], object]
"""Told, while a request runs, how many tokens of its prompt have been run."""
CLOSED = "This LLM has been closed; open the bundle again."


class Model(Protocol):
    """What the loop needs of a model runner."""

    @property
    def manifest(self) -> Manifest: ...

    def step(self, batch: StepBatch, upcoming: Upcoming | None = None) -> StepOutput: ...


class DecodeLoop:
    """Runs requests; several callers may take turns, and every step advances all of their requests."""

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        drafters: Mapping[str, Drafter] | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        """`drafters` by the names that requests call them (`flashnext.runtime.speculation.draft.DRAFTERS`); `cache` is
        told what is worth keeping (the scheduler restores from it)."""
        self._model = model
        self._scheduler = scheduler
        self._drafters = drafters or {}
        self._cache = cache if cache is not None and cache.on else None
        self._requests: dict[TokenSequence, Request] = {}
        self._closed = False
        self._ngram_context, self._eos = ngram_history(model.manifest)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the queue is full, or the loop has been closed.
        """
        if self._closed:
            raise RequestError(CLOSED)
        self._scheduler.add(request.sequence)
        self._requests[request.sequence] = request

    def drop(self, request: Request) -> None:
        """End a request wherever it is; its slot is free at once. Twice does no harm."""
        if self._requests.pop(request.sequence, None):
            self._scheduler.finish(request.sequence)

    def close(self) -> None:
        """End all requests; whoever still reads one is told, and so is whoever begins to."""
        self._closed = True
        self._fail(list(self._requests.values()), RequestError(CLOSED))

    def run(self, requests: Sequence[Request]) -> None:
        """Run requests to their ends; none is left behind, whatever happens.

        Raises:
            Exception: of the first request that failed; the others of the call are dropped.
        """
        try:
            for request in requests:
                self.add(request)
            while not all(request.done for request in requests):
                self.advance()
                _raise_error(requests)
        finally:
            for request in requests:
                self.drop(request)

    def stream(self, request: Request, watch: Watch | None = None) -> Generator[Piece, None, None]:
        """Run a request and yield its pieces as they come; leaving the loop drops the request."""
        self.add(request)
        try:
            while True:
                if piece := request.piece():  # another caller's steps may have moved it on, or ended it
                    yield piece
                elif request.done:
                    _raise_error([request])
                    return
                else:
                    self.advance()
                    if watch:
                        watch(min(request.sequence.past, request.sequence.prompt_length))
        finally:
            self.drop(request)

    def advance(self) -> None:
        """Plan and run one step, and hand its logits to the requests that wait for them."""
        for request in [*self._requests.values()]:
            request.check_deadline()
            if request.done:
                self.drop(request)
        step = self._scheduler.plan()
        if step is None:
            return
        requests = [self._requests[row.sequence] for row in step.rows]
        for request in requests:
            request.admitted()
        try:
            upcoming = step.chunk.upcoming(self._ngram_context, self._eos) if step.chunk else None
            out = self._model.step(step.batch(self._ngram_context, self._eos), upcoming)
        except BaseException as cause:
            self._fail(requests, cause)
            if not isinstance(cause, Exception):
                raise
            return
        starts = [row.sequence.past for row in step.rows]
        self._scheduler.ran(step)
        self._sample(step, requests, out)
        self._draft(requests, starts, out)
        if self._cache is not None:
            self._save(self._cache, requests, starts)
        for request in requests:
            if request.done:
                self.drop(request)

    def _sample(self, step: Step, requests: Sequence[Request], out: StepOutput) -> None:
        end = 0
        for row, request in zip(step.rows, requests, strict=True):
            start, end = end, end + row.logits
            if row.sequence.waiting_tokens:
                continue  # a chunk of a prompt that is not its last
            try:
                request.accept(out.logits[start:end], row.drafts)
            except Exception as cause:
                self._fail([request], cause)

    def _save(self, cache: PrefixCache, requests: Sequence[Request], starts: Sequence[int]) -> None:
        """Keep the states at the end of a generation, at a prompt's end, and at ends of chunks that prompts share."""
        for request, start in zip(requests, starts, strict=True):
            sequence = request.sequence
            if request.done:
                if request.error is None:
                    cache.save(sequence)
            elif start < sequence.prompt_length:
                if sequence.waiting_tokens == 1:
                    cache.save(sequence)
                else:
                    cache.save_chunk(sequence)

    def _draft(self, requests: Sequence[Request], starts: Sequence[int], out: StepOutput) -> None:
        """Tell the drafters what was kept of the step, and let them guess what follows.

        One that has ended wants no drafts, but what is saved of it has to have been seen by the draft layer.
        """
        rows: dict[str, list[Progress]] = {}
        for i, (request, start) in enumerate(zip(requests, starts, strict=True)):
            saved = self._cache is not None and request.sequence.drafted and request.error is None
            if request.drafter and (saved or not request.done):
                if request.done:
                    request.sequence.leave_last_to_run()
                kept = out.hidden[i, : request.sequence.past - start]
                rows.setdefault(request.drafter, []).append(Progress(request, start, kept))
        for name, drafting in rows.items():
            try:
                self._drafters[name].propose(drafting)
            except Exception as cause:
                self._fail([row.request for row in drafting if not row.request.done], cause)

    def _fail(self, requests: Sequence[Request], cause: BaseException) -> None:
        for request in requests:
            request.error = cause
            self.drop(request)


def _raise_error(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.error is not None:
            raise request.error


def ngram_history(manifest: Manifest) -> tuple[int, int]:
    """How many tokens before a step its n-gram ids need, and what stands for those before the start."""
    eos = manifest.config.eos_token_id
    return manifest.config.ngram_size - 1, eos[0] if eos else 0
