"""Argument parsing whose errors are sentences: the value, what was expected, and the closest known option.

argparse exits the process at a fault and answers an unknown option with "unrecognized arguments". Here every fault is
a `UsageError`, so `main` has one place that prints errors and chooses the exit code.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from flashnext.export.errors import FlashNextError

UNITS = {"": 1, "M": 10**6, "G": 10**9, "T": 10**12, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


class UsageError(FlashNextError):
    """A command line that cannot be understood."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises `UsageError`, takes no abbreviated options, and keeps the help's line breaks."""

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        sentence = message[:1].upper() + message[1:]
        if message.endswith("expected one argument"):
            sentence += " (one that begins with a dash is given with =, as in --option=-value)"
        raise UsageError(f"{sentence}{self._hint(message)}. See: {self.prog} --help")

    def _hint(self, message: str) -> str:
        """An option that takes several words takes a position that comes after it, too."""
        option = next((a.option_strings[-1] for a in self._actions if a.nargs == "+" and a.option_strings), "")
        position = next((str(a.metavar) for a in self._actions if not a.option_strings and a.metavar), "")
        concerned = message.startswith((f"argument {option}:", "the following arguments are required: " + position))
        return f" ({position} goes before {option}, which takes all words after it)" if option and concerned else ""

    def option_names(self) -> list[str]:
        """All options of this (sub)command, such as --window."""
        return [name for action in self._actions for name in action.option_strings]


class Commands(Protocol):
    """Where a subcommand adds its parser."""

    def add_parser(self, name: str, **settings: Any) -> Parser:
        """Like argparse's."""
        ...


def check_command(argv: Sequence[str], commands: Iterable[str]) -> None:
    """Raise a UsageError for a first word that is no subcommand."""
    first = next((word for word in argv if not word.startswith("-")), None)
    if first is not None and first not in commands:
        known = ", ".join(commands)
        raise UsageError(f"Unknown command {first!r}.{suggestion(first, commands)} The commands are: {known}.")


def check_leftovers(leftovers: Sequence[str], parser: Parser) -> None:
    """Raise a UsageError for words that no option or position of the (sub)command took."""
    if not leftovers:
        return
    word = next((w for w in leftovers if w.startswith("-")), None)
    if word is None:
        raise UsageError(f"Unexpected argument {leftovers[0]!r}. See: {parser.prog} --help")
    name = word.split("=", 1)[0]
    raise UsageError(f"Unknown option {name}.{suggestion(name, parser.option_names())} See: {parser.prog} --help")


def suggestion(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' when a known word is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """Converter for an option that takes a whole number between bounds (included)."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r:.80}") from None
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, found {text:.80}")
        return value

    return convert


def byte_count(text: str) -> int:
    """Converter for an option that takes an amount of memory."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([MGT]?I?)B?", text.strip().upper())
    if not match or match[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"expected an amount of memory such as 141G or 131GiB, found {text!r:.80}")
    if "." in match[1] and UNITS[match[2]] == 1:
        raise argparse.ArgumentTypeError(f"{text.strip()} bytes are no whole number; name a unit, as in {match[1]}G")
    return int(float(match[1]) * UNITS[match[2]])


def output_folder(text: str) -> Path:
    """Converter for a folder of results. It is made if need be, what is above it is not: a typing error would scatter
    results. It is looked at before the work whose results it is for."""
    folder = Path(text)
    if folder.exists() and not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{folder} is a file; name a folder")
    _check_folder(folder if folder.is_dir() else folder.absolute().parent)
    return folder


def output_file(text: str) -> Path:
    """Converter for a file of results, in a folder that is there."""
    file = Path(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder; name a file in it")
    _check_folder(file.absolute().parent)
    return file


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{folder} is no folder; make it first, or name another place")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"the folder {folder} cannot be written to; name another place")


def number(text: str) -> float:
    """Converter for an option that takes a number; the library checks its range."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, found {text!r}") from None


def number_from(low: float, high: float) -> Callable[[str], float]:
    """Converter for an option that takes a number between bounds (included)."""

    def convert(text: str) -> float:
        value = number(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected a number from {low:,g} to {high:,g}, found {text:.80}")
        return value

    return convert


def token_ids(text: str) -> list[int]:
    """Converter for token ids: "1,2,3", or with spaces, or as a JSON list."""
    words = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError:
        raise argparse.ArgumentTypeError(f'expected token ids such as "1,2,3", found {text!r:.80}') from None
