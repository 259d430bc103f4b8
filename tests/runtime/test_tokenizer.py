"""Tokenizer files, and text that is never shown in half characters."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext.export.checkpoint import random_tokenizer
from flashnext.export.errors import BundleError, RequestError
from flashnext.runtime.tokenizer import INVALID_RUN, Detokenizer, Tokenizer

BYTE_LEVEL = random_tokenizer.build_tokenizer()


def byte_fallback() -> tokenizers.Tokenizer:
    """A vocabulary of bytes <0x00> … and words with a leading-space mark, as of the Llama family."""
    words = ["▁hello", "▁wor", "ld", "▁"]
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)} | {w: 256 + i for i, w in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def pieces(inner: tokenizers.Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(Tokenizer(inner))
    return [detokenizer.add(token) for token in token_ids]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_text_cut_into_bytes_comes_back_whole(text: str) -> None:
    """One token per byte: the hardest cut there is."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    token_of = {token: BYTE_LEVEL.token_to_id(token) for token in alphabet}
    encoder = _byte_to_unicode()
    shown = pieces(BYTE_LEVEL, [token_of[encoder[b]] for b in text.encode("utf-8")])
    if not text.endswith("\ufffd"):
        assert "".join(shown) == text
    assert all("\ufffd" not in piece for piece in shown) or "\ufffd" in text
    assert text.startswith("".join(shown))


def _byte_to_unicode() -> dict[int, str]:
    """GPT-2's map of bytes to printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, random_tokenizer.IM_END + 5), max_size=40))
def test_any_tokens_give_the_decoded_text_but_for_an_incomplete_end(token_ids: list[int]) -> None:
    """Invalid bytes, special tokens, ids beyond the vocabulary."""
    decoded, shown = Tokenizer(BYTE_LEVEL).decode(token_ids), "".join(pieces(BYTE_LEVEL, token_ids))
    assert decoded.startswith(shown)
    assert len(decoded) - len(shown) <= INVALID_RUN
    assert set(decoded[len(shown) :]) <= {"\ufffd"}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("\xe4\xbd\xa0\xf0\x9f\x8e\x89A"), max_size=60))
def test_long_runs_of_invalid_bytes(letters: list[str]) -> None:
    encoder = _byte_to_unicode()
    token_ids = [BYTE_LEVEL.token_to_id(encoder[ord(c)]) for c in letters]
    decoded, shown = Tokenizer(BYTE_LEVEL).decode(token_ids), "".join(pieces(BYTE_LEVEL, token_ids))
    assert decoded.startswith(shown)
    assert len(decoded) - len(shown) <= INVALID_RUN
    assert set(decoded[len(shown) :]) <= {"\ufffd"}


def test_invalid_bytes_without_end_are_shown_and_take_no_memory() -> None:
    token = BYTE_LEVEL.token_to_id(_byte_to_unicode()[0x80])
    detokenizer = Detokenizer(Tokenizer(BYTE_LEVEL))
    shown = "".join(detokenizer.add(token) for _ in range(1000))
    assert 1000 - INVALID_RUN <= len(shown) <= 1000
    assert len(detokenizer._window) <= 2 * INVALID_RUN


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([256, 257, 258, 259, 0xE4, 0xBD, 0xA0, 0x41]), max_size=20))
def test_byte_fallback_never_shows_half_a_character(token_ids: list[int]) -> None:
    inner = byte_fallback()
    shown = "".join(pieces(inner, token_ids))
    decoded = Tokenizer(inner).decode(token_ids)
    if "\ufffd" not in decoded:
        assert shown == decoded


def test_a_character_is_shown_with_its_last_byte() -> None:
    token_ids = Tokenizer(BYTE_LEVEL).encode("a 你 🎉!")
    shown = pieces(BYTE_LEVEL, token_ids)
    assert "".join(shown) == "a 你 🎉!"
    assert len(token_ids) > len("a 你 🎉!")
    assert all("\ufffd" not in piece for piece in shown)


def test_spaces_between_words_survive() -> None:
    assert pieces(byte_fallback(), [256, 257, 258]) == ["hello", " wor", "ld"]


def test_invalid_unicode_is_refused() -> None:
    text = b"caf\xe9".decode("utf-8", "surrogateescape")
    with pytest.raises(RequestError, match="not valid UTF-8: character 3"):
        Tokenizer(BYTE_LEVEL).encode(text)


def test_a_folder_without_tokenizer_and_one_with_a_broken_one(tmp_path: Path) -> None:
    assert Tokenizer.open(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match="not a tokenizer"):
        Tokenizer.open(tmp_path)
