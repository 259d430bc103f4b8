"""Whole numbers that a caller gives: one check and one sentence for LLM, validation and golden files.

The command line has the same bounds in its converters, with sentences that name the option.
"""

from __future__ import annotations

from typing import Any

from flashnext.export.errors import RequestError
from flashnext.runtime.engines.base import MOST_THREADS

MOST_COUNT, MOST_BYTES = (1 << 31) - 1, 1 << 50


def check_count(name: str, value: Any, most: int = MOST_COUNT, least: int = 1) -> None:
    """Raise a RequestError unless a value is a whole number between bounds (included). Python counts True and False
    among the integers; here they are a mistake."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestError(f"{name} = {value!r:.80} must be a whole number from {least:,} to {most:,}, or be left out.")


def check_threads(threads: Any) -> None:
    """Raise a RequestError unless an engine can have so many threads; None is its own choice."""
    if threads is not None:
        check_count("threads", threads, MOST_THREADS)
