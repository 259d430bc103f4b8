"""Text to tokens and back, by the `tokenizers` library from the bundle's own `tokenizer.json`.

`Detokenizer` turns a stream of tokens into text that never shows half a character: tokens of a byte-level vocabulary
may end inside one, and what they decode to then (U+FFFD) is held back until the rest has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from flashnext.export.errors import BundleError, RequestError
from flashnext.export.files import plain

FILE_NAME = "tokenizer.json"
INCOMPLETE = "\ufffd"
INVALID_RUN = 8
"""More U+FFFD in a row than an incomplete character and the one before it can give: these bytes are just invalid."""


class Tokenizer:
    """A loaded tokenizer.json."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    @classmethod
    def open(cls, folder: Path) -> Tokenizer | None:
        """The folder's tokenizer, or None if it has no tokenizer.json (then prompts must be token ids).

        Raises:
            BundleError: the file is not a tokenizer.
        """
        path = folder / FILE_NAME
        if not path.is_file():
            return None
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as cause:  # the library raises plain Exception
            raise BundleError(
                f"{path} is not a tokenizer that can be read ({plain(str(cause))}). Copy it from the checkpoint again."
            ) from None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; `special` adds what the tokenizer's own template adds (a rendered chat already holds it).

        Raises:
            RequestError: the text is not valid Unicode (lone surrogates, as bytes that are not UTF-8 leave behind).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as cause:
            raise RequestError(
                f"The prompt is not valid UTF-8: character {cause.start} is a lone surrogate. Send it as UTF-8."
            ) from None
        return list(self._inner.encode(text, add_special_tokens=special).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; ids that the vocabulary lacks (padding of the embedding) say nothing."""
        return str(self._inner.decode(list(token_ids), skip_special_tokens=True))


class Detokenizer:
    """Text of a growing list of tokens, piece by piece.

    The pieces joined are the decoded text without the incomplete character (or invalid bytes) at its end. Tokens are
    decoded together with those of the last complete piece, because some decoders treat the first token apart (a
    dropped space).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._complete = 0
        """Tokens of the window whose text has been shown entirely."""
        self._shown = 0
        """Characters of the window's text that have been shown."""

    def add(self, token: int) -> str:
        """The text that has become certain with this token; often empty, never half a character."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        # An incomplete character decodes to one U+FFFD (byte-level) or to one per byte (byte fallback).
        certain = len(text.rstrip(INCOMPLETE))
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if piece and certain == len(text):
            self._slide()
        elif len(text) - certain > INVALID_RUN:
            piece += self._settle(text)
        return piece

    def _slide(self) -> None:
        """Forget the tokens before the last complete piece; it stays as context of the next one."""
        self._window = self._window[self._complete :]
        self._complete = len(self._window)
        self._shown = len(self._tokenizer.decode(self._window))

    def _settle(self, text: str) -> str:
        """Show a run of invalid bytes up to a token where it can be cut, so that it cannot grow without end."""
        for cut in range(len(self._window) - 3, 0, -1):
            before = self._tokenizer.decode(self._window[:cut])
            if before + self._tokenizer.decode(self._window[cut:]) == text:
                piece = before[self._shown :]
                self._window = self._window[cut:]
                self._complete, self._shown = 0, max(self._shown - len(before), 0)
                return piece
        return ""
