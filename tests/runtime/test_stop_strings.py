"""Stop strings: found however the text is cut, and never shown in part."""

from __future__ import annotations

import doctest

from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext.runtime import stop_strings
from flashnext.runtime.stop_strings import StopStrings

LETTERS = st.text(alphabet="ab", max_size=30)


@settings(max_examples=300, deadline=None)
@given(LETTERS, st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3), st.data())
def test_any_cut_of_the_text_gives_the_same_result(text: str, stops: list[str], data: st.DataObject) -> None:
    watch, shown, at = StopStrings(stops), "", 0
    while at < len(text) and not watch.found:
        length = data.draw(st.integers(1, 5))
        shown += watch.add(text[at : at + length])
        at += length
        # What is shown never has to be taken back.
        assert (text if not watch.found else text[: _first(text, stops)]).startswith(shown)
    shown += watch.flush()
    first = _first(text, stops)
    assert watch.found == (first >= 0)
    assert shown == (text[:first] if first >= 0 else text)


def _first(text: str, stops: list[str]) -> int:
    """Where the stop string that is complete first begins."""
    for end in range(1, len(text) + 1):
        begins = [end - len(s) for s in stops if text[:end].endswith(s)]
        if begins:
            return min(begins)
    return -1


def test_example_in_the_docstring() -> None:
    assert doctest.testmod(stop_strings).failed == 0


def test_without_search_text_passes() -> None:
    watch = StopStrings(["ab"])
    assert watch.add("ab", search=False) == "ab"
    assert watch.add("xa") == "x"
    assert watch.add("b") == ""
    assert watch.found
