"""What the tests of one configuration share: the oracle, its answers, and the checkpoint and bundle made from it.

Answers are cached in the process. Checkpoint and bundle are made once for all processes of a test run, in `SHARED`
(set by conftest.py), under a lock. Tests are ordered by configuration, so a small cache is enough.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from flashnext.runtime.model_runner import ModelRunner

from .configs import Case
from .oracle import Array, Oracle

SHARED: list[Path] = []
"""The folder that all processes of this test run share."""

SLOTS = 6
WINDOW = 8
CAPACITY = 720
LENGTHS = (1, 3, 63, 64, 65, 700)


@dataclass(frozen=True)
class Reference:
    """A text, the oracle's logits [T, vocab] and its residual branches before the final Gated Residual [T, n, H]."""

    tokens: list[int]
    logits: Array
    hidden: torch.Tensor


@lru_cache(maxsize=2)
def oracle_of(case: Case) -> Oracle:
    return Oracle(case)


@lru_cache(maxsize=32)
def reference(case: Case, length: int, seed: int = 0) -> Reference:
    """The oracle's answer for a text of its own for each length."""
    oracle = oracle_of(case)
    tokens = oracle.text(length, seed=1000 * seed + length)
    return Reference(tokens, *oracle.forward(tokens))


@lru_cache(maxsize=4)
def greedy_reference(case: Case, prompt_length: int, count: int) -> tuple[list[int], list[int]]:
    """A prompt and `count` greedy tokens after it, none of which hangs on a close decision or a close second."""
    oracle = oracle_of(case)
    for seed in range(20):
        prompt = oracle.text(prompt_length, seed=5000 + seed)
        answer = oracle.greedy(prompt, count)
        logits = oracle.logits(prompt + answer)[prompt_length - 1 : -1]
        second, first = np.sort(logits, axis=-1)[:, -2:].T
        if oracle.decisions.first_unclear() is None and (first - second).min() > 1e-4 * logits.std():
            return prompt, answer
    raise AssertionError(f"{case.name}: no prompt with a clear greedy answer")


def checkpoint_of(case: Case) -> Path:
    return _once(case.name + ".checkpoint", lambda folder: oracle_of(case).save(folder))


def bundle_of(case: Case) -> Path:
    """The exported bundle: fp32, six slots, window 8."""
    from flashnext.export.graphs.bundle import ExportOptions, export_bundle

    options = ExportOptions(window=WINDOW, capacity=CAPACITY, slots=SLOTS)
    checkpoint = checkpoint_of(case)
    return _once(case.name + ".bundle", lambda folder: export_bundle(checkpoint, folder, options))


@lru_cache(maxsize=2)
def runner_of(case: Case, engine: str) -> ModelRunner:
    """One runner for all tests of a configuration: a fresh sequence must not care what the slots held before."""
    return ModelRunner.open(bundle_of(case), engine=engine, threads=1)


def _once(name: str, make: Callable[[Path], object]) -> Path:
    """Make a folder unless another process has; it appears whole."""
    target = SHARED[0] / name
    with open(SHARED[0] / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_suffix(target.suffix + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(target)
    return target


def deviation(found: Array, expected: Array | Sequence[Array]) -> float:
    """Largest difference, in units of the expected logits' standard deviation; NaN counts as infinite."""
    expected = np.asarray(expected)
    difference = np.abs(found.astype(np.float64) - expected).max() / expected.std()
    return float(difference) if np.isfinite(difference) else np.inf
