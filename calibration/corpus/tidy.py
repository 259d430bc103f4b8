"""Tidying of raw text: line ends, page furniture, hard-wrapped paragraphs."""

from __future__ import annotations

import re

LICENCE_WORDS = re.compile(r"gutenberg|etext|copyright|benedictine|world library", re.IGNORECASE)
"""Paragraphs with these words in the plays' files are notes of the files' distributors, not Shakespeare's."""


def plain(text: str) -> str:
    """Unix line ends, no trailing blanks, no control characters, at most two empty lines in a row."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ")
    text = re.sub(r"[^\n -~\u00a0-\uffff]", "", text)
    text = re.sub(r"[ \u00a0]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"


def unwrap(text: str) -> str:
    """Paragraphs on one line each: where a typesetter broke a line says nothing about the language."""
    paragraphs = re.split(r"\n\s*\n", plain(text))
    return "\n\n".join(" ".join(line.strip() for line in p.splitlines()) for p in paragraphs) + "\n"


def without_licence_notes(text: str) -> str:
    """Plain text without the paragraphs that speak of the file's own distribution."""
    paragraphs = re.split(r"\n\s*\n", plain(text))
    return "\n\n".join(p.strip("\n") for p in paragraphs if not LICENCE_WORDS.search(p)) + "\n"
