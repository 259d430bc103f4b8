"""One thread that fetches rows while the model runs, and tickets for what it was asked. Whoever asks for a result that
nobody has begun with makes it himself, instead of waiting for the thread to wake up.

A thread can die: its work raises what is no error (SystemExit), or native code ends it without a word. Nobody may wait
for it forever then. So a ticket looks, twice a second, whether its thread still lives; a dead one is an error of the
ticket's step, and the next piece of work gets a new thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from flashnext.runtime.engines.base import Array

LOOK_EVERY_S = 0.5
TASKS = Path("/proc/self/task")
"""The process's threads, where the system is Linux."""
DIED = "The thread that fetches n-gram rows has died; the request that needed them cannot go on."


class Job:
    """A piece of work under way; `wait` gives its result."""

    def __init__(self, work: Callable[[], Array], thread: WorkerThread) -> None:
        self._work, self._thread = work, thread
        self._begun, self._ended = threading.Lock(), threading.Event()
        self._result: Array | None = None
        self._cause: BaseException | None = None

    def run(self) -> bool:
        """Do it, unless that has begun; whether the thread may go on."""
        if not self._begun.acquire(blocking=False):
            return True
        self._do()
        return self._cause is None or isinstance(self._cause, Exception)

    def _do(self) -> None:
        try:
            self._result = self._work()
        except BaseException as cause:
            self._cause = cause
        self._ended.set()

    def wait(self) -> Array:
        """The result.

        Raises:
            Exception: what the work raised.
            RuntimeError: the thread has died.
        """
        if self._begun.acquire(blocking=False):
            self._do()
            if self._cause is not None:  # the caller's own, be it an interruption by the user
                raise self._cause
        while not self._ended.wait(LOOK_EVERY_S):
            if not self._thread.lives() and not self._ended.is_set():
                raise RuntimeError(DIED)
        if isinstance(self._cause, Exception):
            raise self._cause
        if self._result is None:
            raise RuntimeError(DIED) from self._cause
        return self._result


class WorkerThread(threading.Thread):
    """Runs jobs in their order until it is told to stop (by None)."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)  # one that was ended by native code cannot be joined at exit
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            if not job.run():
                return

    def lives(self) -> bool:
        """Whether the system still has it; Python does not notice a thread that native code has ended."""
        return self.is_alive() and (not TASKS.exists() or (TASKS / str(self.native_id)).exists())


class RowWorker:
    """A worker thread that is started when there is work, and again when it has died."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: WorkerThread | None = None

    def submit(self, work: Callable[[], Array]) -> Job:
        """Hand over a piece of work; returns at once."""
        if self._thread is None or not self._thread.lives():
            self._thread = WorkerThread(self._name)
            self._thread.start()
        job = Job(work, self._thread)
        self._thread.jobs.put(job)
        return job

    def close(self) -> None:
        """Let the thread end once it has done what it was given, and wait for that."""
        if self._thread is not None and self._thread.lives():
            self._thread.jobs.put(None)
            while self._thread.lives():
                self._thread.join(LOOK_EVERY_S)
        self._thread = None
