"""A worker thread that fails, ends or is ended: an error for whoever waits, and a new thread for the next."""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from typing import NoReturn

import numpy as np
import pytest

from flashnext.runtime import row_worker
from flashnext.runtime.row_worker import TASKS, RowWorker

EXIT_THREAD = {"x86_64": 60, "aarch64": 93}
"""Linux's call that ends the calling thread alone, behind Python's back."""


@pytest.fixture
def worker() -> RowWorker:
    return RowWorker("test")


def begun_by_the_thread(worker: RowWorker, work: object) -> row_worker.Job:
    """A job that the worker's own thread has taken."""
    job = worker.submit(work)  # type: ignore[arg-type]
    while not job._begun.locked():
        time.sleep(0.001)
    return job


def test_results_come_in_any_order_of_asking(worker: RowWorker) -> None:
    jobs = [worker.submit(lambda i=i: np.full(2, i)) for i in range(50)]
    assert [int(job.wait()[0]) for job in reversed(jobs)] == list(range(50))[::-1]
    worker.close()
    assert worker.submit(lambda: np.ones(1)).wait() == 1  # it starts again
    worker.close()


def test_an_error_is_the_waiters(worker: RowWorker) -> None:
    def fails() -> NoReturn:
        raise OSError("no such disk")

    job = begun_by_the_thread(worker, fails)
    with pytest.raises(OSError, match="no such disk"):
        job.wait()
    worker.close()


def test_work_that_nobody_began_is_done_by_who_asks_for_it(worker: RowWorker) -> None:
    blocked = threading.Event()
    first = begun_by_the_thread(worker, lambda: np.array(blocked.wait()))
    second = worker.submit(lambda: np.array(threading.get_ident()))
    assert second.wait() == threading.get_ident()
    blocked.set()
    assert first.wait()
    worker.close()


def test_an_interruption_of_who_does_it_himself_stays_one(worker: RowWorker) -> None:
    def interrupted() -> NoReturn:
        raise KeyboardInterrupt

    blocked = threading.Event()
    first = begun_by_the_thread(worker, lambda: np.array(blocked.wait()))
    with pytest.raises(KeyboardInterrupt):
        worker.submit(interrupted).wait()
    blocked.set()
    assert first.wait()
    worker.close()


def test_a_thread_that_exits_is_an_error_and_the_next_one_works(worker: RowWorker) -> None:
    def leaves() -> NoReturn:
        raise SystemExit(3)

    job = begun_by_the_thread(worker, leaves)
    with pytest.raises(RuntimeError, match="thread that fetches n-gram rows has died") as caught:
        job.wait()
    assert isinstance(caught.value.__cause__, SystemExit)
    assert worker.submit(lambda: np.ones(1)).wait() == 1
    worker.close()


@pytest.mark.skipif(not TASKS.exists(), reason="Linux tells which threads live")
def test_a_thread_that_is_ended_without_a_word_is_noticed(worker: RowWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_worker, "LOOK_EVERY_S", 0.02)
    number = EXIT_THREAD[platform.machine()]
    job = begun_by_the_thread(worker, lambda: ctypes.CDLL(None).syscall(number, 0))
    waiting = worker.submit(lambda: np.ones(1))
    with pytest.raises(RuntimeError, match="has died"):
        job.wait()
    assert waiting.wait() == 1  # nobody had begun it
    assert worker.submit(lambda: np.ones(2)).wait().size == 2
    worker.close()
