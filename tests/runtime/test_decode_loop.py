"""The decode loop over a model that only remembers: who gets which token, and what a failure leaves behind."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest
from remembering_model import RememberingModel, alone, request, start

from flashnext.export.errors import EngineError, RequestError
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.decode_loop import DecodeLoop
from flashnext.runtime.model_runner import StepBatch, StepOutput
from flashnext.runtime.ngram import RowsAhead, Upcoming
from flashnext.runtime.row_worker import RowWorker
from flashnext.runtime.scheduler import Scheduler

MakeManifest = Callable[..., Manifest]

PROMPTS = [[1, 2, 3], [9] * 17, [4], [5, 6] * 10, [7] * 5, [8, 1]]


@pytest.mark.parametrize("max_batch", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_does_not_depend_on_its_neighbours(
    make_manifest: MakeManifest, max_batch: int, temperature: float
) -> None:
    manifest = make_manifest()
    loop, scheduler, model = start(manifest, max_batch=max_batch)
    params = [{"temperature": temperature, "seed": 3 + i, "max_tokens": 3 + 2 * i} for i in range(len(PROMPTS))]
    requests = [request(manifest, p, **s) for p, s in zip(PROMPTS, params, strict=True)]
    loop.run(requests)
    for asked, prompt, settings in zip(requests, PROMPTS, params, strict=True):
        assert asked.output().token_ids == alone(manifest, prompt, **settings)
        assert asked.output().finish_reason == "length"
    assert max(model.batch_sizes) == max_batch
    assert scheduler.free_slots == max_batch
    assert not scheduler.busy


def test_stop_tokens_end_a_text_and_are_kept_in_its_tokens(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    free = alone(manifest, [1, 2, 3])
    stop = free[3]
    assert stop not in free[:3]
    by_model = make_manifest(stop_token_ids=(stop,))
    assert alone(by_model, [1, 2, 3]) == free[:4]
    assert alone(by_model, [1, 2, 3], ignore_eos=True) == free
    assert alone(manifest, [1, 2, 3], stop_token_ids=[stop]) == free[:4]
    later = alone(by_model, [1, 2, 3], min_tokens=5)
    assert len(later) > 5
    assert stop not in later[:5]


def test_a_failed_step_ends_its_requests_and_frees_their_slots(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    loop, scheduler, _ = start(manifest, fail_at=3)
    with pytest.raises(EngineError, match="the engine broke"):
        loop.run([request(manifest, p) for p in PROMPTS])
    assert scheduler.free_slots == manifest.slots
    assert not scheduler.busy
    after = request(manifest, [1, 2, 3])
    loop.run([after])
    assert after.output().token_ids == alone(manifest, [1, 2, 3])


def test_broken_logits_end_one_request_and_the_others_go_on(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    loop, scheduler, _ = start(manifest, nan_for=9)
    healthy, broken = request(manifest, [1, 2, 3]), request(manifest, [9, 9])
    pieces = loop.stream(healthy)
    first = next(pieces)
    with pytest.raises(EngineError, match="logits hold nan"):
        loop.run([broken])
    said = first.token_ids + [t for piece in pieces for t in piece.token_ids]
    assert said == alone(manifest, [1, 2, 3])
    assert scheduler.free_slots == manifest.slots


def test_a_stream_that_is_left_gives_its_slot_back(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    loop, scheduler, _ = start(manifest)
    stream = loop.stream(request(manifest, [1, 2, 3]))
    next(stream)
    assert scheduler.free_slots == manifest.slots - 1
    stream.close()
    assert scheduler.free_slots == manifest.slots
    assert not scheduler.busy


def test_a_watcher_sees_the_prompt_go_by(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    loop, _, _ = start(manifest, chunk=5)
    seen: list[int] = []
    list(loop.stream(request(manifest, [9] * 12, max_tokens=3), watch=seen.append))
    assert seen == [5, 10, 12, 12, 12]


@pytest.mark.parametrize("rest", [2, 40])
def test_streams_and_runs_take_turns(make_manifest: MakeManifest, rest: int) -> None:
    manifest = make_manifest()
    loop, _, _ = start(manifest)
    streams = [loop.stream(request(manifest, p, max_tokens=20)) for p in PROMPTS[:2]]
    said: list[list[int]] = [[], []]
    for _ in range(3):
        for i, stream in enumerate(streams):
            said[i] += next(stream).token_ids
    loop.run([request(manifest, [4], max_tokens=rest)])  # both streams go on meanwhile, or even end
    for i, stream in enumerate(streams):
        pieces = list(stream)
        said[i] += [t for piece in pieces for t in piece.token_ids]
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert said[i] == alone(manifest, PROMPTS[i], max_tokens=20)


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ([], {}, "The prompt is empty"),
        ([1, 512], {}, "512; token ids are whole numbers from 0 to 511"),
        ([1, -1], {}, "-1; token ids"),
        ([1, "a"], {}, "'a'; token ids"),
        ([1] * 65, {}, "has 65 tokens and a slot of this bundle holds 64"),
        ([1] * 64, {}, "64 prompt tokens and max_tokens = 7 exceed"),
        ([1] * 64, {"max_tokens": None}, "64 prompt tokens and max_tokens = 1 exceed"),
        ([1] * 60, {"max_tokens": 5}, "exceed the 64 tokens"),
        ([1] * 60, {"max_tokens": None, "min_tokens": 9}, "min_tokens = 9 exceeds the 4 tokens"),
        ([1], {"stop": "x"}, "Stop strings need a tokenizer"),
        ([1], {"stop_token_ids": [512]}, "stop_token_ids holds 512"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    make_manifest: MakeManifest, prompt: list[Any], params: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        request(make_manifest(), prompt, **params)


def test_without_max_tokens_a_text_goes_on_to_the_end_of_its_slot(make_manifest: MakeManifest) -> None:
    assert len(alone(make_manifest(), [1] * 50, max_tokens=None)) == 14


def test_a_deadline_ends_a_request_with_what_it_has_said(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    loop, scheduler, model = start(manifest)
    patient, hasty = request(manifest, [1, 2, 3]), request(manifest, [4, 5], max_seconds=0.2)
    loop.add(hasty)
    while hasty.sequence.output_length < 2:
        loop.advance()
    time.sleep(0.2)
    loop.run([patient])
    assert hasty.done
    assert hasty.output().finish_reason == "deadline"
    assert hasty.token_ids == alone(manifest, [4, 5])[: len(hasty.token_ids)]
    assert 2 <= len(hasty.token_ids) < 7
    assert patient.token_ids == alone(manifest, [1, 2, 3])
    assert scheduler.free_slots == manifest.slots
    assert model.steps > 0


def test_a_deadline_counts_the_time_in_the_queue_and_ends_a_stream(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    loop, scheduler, _ = start(manifest, max_batch=1)
    waiting = [request(manifest, [7]), request(manifest, [8], max_seconds=0.0)]
    loop.run(waiting)
    assert (waiting[1].token_ids, waiting[1].output().finish_reason) == ([], "deadline")
    pieces = list(loop.stream(request(manifest, [9], max_seconds=0.0)))
    assert [(p.text, p.token_ids, p.finish_reason) for p in pieces] == [("", [], "deadline")]
    assert scheduler.free_slots == 1


def test_a_full_queue_refuses_and_goes_on(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    scheduler = Scheduler(manifest.slots, manifest.window, max_batch=1, max_waiting=1)
    loop = DecodeLoop(RememberingModel(manifest), scheduler)
    first, second, third = (request(manifest, [i]) for i in (1, 2, 3))
    loop.add(first)
    loop.advance()
    loop.add(second)
    with pytest.raises(RequestError, match="1 requests wait already and max_waiting is 1"):
        loop.run([third])
    while not (first.done and second.done):
        loop.advance()
    assert second.token_ids == alone(manifest, [2])
    assert scheduler.free_slots == 1


class DyingRows:
    """Rows whose worker thread ends in the middle of its work."""

    on_device = False

    def __init__(self) -> None:
        self.worker, self.dying = RowWorker("dying"), True

    def submit(self, tokens: Any, context: Any, new_len: Any, ahead: bool = False) -> Any:
        def leave() -> NoReturn:
            raise SystemExit("no more rows")

        job = self.worker.submit(leave if self.dying else lambda: np.zeros(1))
        while self.dying and not job._begun.locked():
            time.sleep(0.001)
        return job


class NeedsRows(RememberingModel):
    """Waits for its n-gram rows before each step, as the runner does."""

    rows: DyingRows

    def step(self, batch: StepBatch, upcoming: Upcoming | None = None) -> StepOutput:
        tickets, _ = RowsAhead({"rows": self.rows}).take(Upcoming(batch.token_ids, batch.context, batch.new_len))  # type: ignore[dict-item]
        tickets["rows"].wait()
        return super().step(batch)


def test_a_row_thread_that_dies_ends_its_request_and_nothing_hangs(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    model, scheduler = NeedsRows(manifest), Scheduler(manifest.slots, manifest.window, 5)
    model.rows = DyingRows()
    loop = DecodeLoop(model, scheduler)
    with pytest.raises(RuntimeError, match="thread that fetches n-gram rows has died"):
        loop.run([request(manifest, [1, 2, 3])])
    assert scheduler.free_slots == manifest.slots
    assert not scheduler.busy
    model.rows.dying = False
    after = request(manifest, [1, 2, 3])
    loop.run([after])
    assert after.output().token_ids == alone(manifest, [1, 2, 3])
    model.rows.worker.close()


def test_a_thread_that_dies_while_it_runs_requests_gives_their_slots_back(make_manifest: MakeManifest) -> None:
    """A real thread is ended in the middle of a long run; another thread goes on with the same loop."""
    manifest = make_manifest(capacity=1 << 20)
    loop, scheduler, model = start(manifest)
    long = [request(manifest, p, max_tokens=1 << 19) for p in PROMPTS]
    seen: list[BaseException] = []

    def run() -> None:
        try:
            loop.run(long)
        except SystemExit as end:
            seen.append(end)  # and the thread ends

    thread = threading.Thread(target=run)
    thread.start()
    while model.steps < 20:
        time.sleep(0.001)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    thread.join(30)
    assert not thread.is_alive()
    assert len(seen) == 1
    assert scheduler.free_slots == manifest.slots
    assert not scheduler.busy
    after = request(manifest, [1, 2, 3])
    loop.run([after])
    assert after.output().token_ids == alone(make_manifest(), [1, 2, 3])
