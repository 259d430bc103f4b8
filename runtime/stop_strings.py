"""Stop strings in a stream of text: found across piece boundaries, and never shown in part.

Text that could be the beginning of a stop string is held back until the next piece decides.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one text.

    >>> watch = StopStrings(["END"])
    >>> watch.add("the E"), watch.add("N"), watch.add("V")
    ('the ', '', 'ENV')
    >>> watch.add(" EN"), watch.add("D more"), watch.found
    (' ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, text: str, search: bool = True) -> str:
        """The part of the text that may be shown; after a stop string was found, nothing more.

        With `search` off (before `min_tokens`) no stop string is completed by this text, and none may start in it.
        """
        if self.found:
            return ""
        text, self._held = self._held + text, ""
        if not search or not self._stops:
            return text
        # The one that is complete first counts, so the result does not depend on how the text was cut.
        ends = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.found = True
            return text[: min(ends)[1]]
        held = self._beginning(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back, when the text ends for another reason."""
        text, self._held = self._held, ""
        return text

    def _beginning(self, text: str) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
