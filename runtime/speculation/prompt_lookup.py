"""Drafts by looking up: what followed the last few tokens when they stood in the text before.

Costs nothing but a dictionary, and pays where a text repeats itself or its prompt: edits, summaries, code.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from flashnext.runtime.sequence import Sequence as TokenSequence
from flashnext.runtime.speculation.draft import Draft, Progress

LONGEST, SHORTEST = 4, 2
"""Tokens that have to match; the longest match is tried first. One alone matches too easily."""


class PromptLookup:
    """The latest earlier place where the last tokens stood; one index for each sequence, extended as it grows."""

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[TokenSequence, _Index] = WeakKeyDictionary()

    def propose(self, rows: Sequence[Progress]) -> None:
        for row in rows:
            sequence, wanted = row.request.sequence, row.request.drafts_wanted()
            if wanted:
                index = self._indexes.setdefault(sequence, _Index())
                sequence.drafts = [Draft(token) for token in index.following(sequence.tokens, wanted)]


class _Index:
    """For every run of 2 … 4 tokens, the place after its latest occurrence that something follows."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def following(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the last tokens before."""
        for end in range(self._known, len(tokens)):  # the run that ends the text itself is not in the index
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._after[tuple(tokens[end - length : end])] = end
        self._known = max(len(tokens), self._known)
        for length in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            place = self._after.get(tuple(tokens[-length:]))
            if place is not None:
                return list(tokens[place : place + count])
        return []
