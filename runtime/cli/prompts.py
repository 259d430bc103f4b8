"""Where a prompt comes from: an option, token ids, or standard input, which has to be UTF-8."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashnext.runtime.cli.parser import UsageError

if TYPE_CHECKING:
    from flashnext.runtime import LLM

Prompt = str | list[int]


def read_prompt(arguments: argparse.Namespace) -> Prompt | None:
    """The prompt that was given, before anything slow happens; None means a conversation at the terminal.

    Raises:
        UsageError: no prompt, or one that is not valid UTF-8.
    """
    if arguments.token_ids is not None:
        if arguments.chat or arguments.system is not None:
            raise UsageError("--token-ids is the whole prompt; leave out --chat and --system, or use --prompt.")
        ids: list[int] = arguments.token_ids
        return ids
    if arguments.system is not None and not arguments.chat:
        raise UsageError("--system belongs to a conversation; add --chat.")
    if arguments.prompt is not None:
        return _checked(arguments.prompt)
    if not sys.stdin.isatty():
        return _standard_input()
    if not arguments.chat:
        raise UsageError('No prompt given. Use --prompt TEXT, --token-ids "1,2,3" or --chat, or pipe the prompt in.')
    return None


def _checked(text: str) -> str:
    """Bytes of the command line that are no UTF-8 arrive as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as cause:
        raise UsageError(
            f"The prompt is not valid UTF-8 at character {cause.start}. Send UTF-8 (iconv converts other encodings)."
        ) from None
    return text


def read_line() -> str:
    """The next line of a conversation; empty at its end."""
    return _decoded(sys.stdin.buffer.readline())


def _standard_input() -> str:
    return _decoded(sys.stdin.buffer.read())


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as cause:
        raise UsageError(
            f"Standard input is not valid UTF-8: byte {cause.object[cause.start]:#04x} at offset {cause.start}. "
            "Send UTF-8 (iconv converts other encodings)."
        ) from None


def to_tokens(llm: LLM, prompt: Prompt, arguments: argparse.Namespace) -> Prompt:
    """The prompt as the model takes it: token ids, through the chat template with --chat."""
    if arguments.chat and isinstance(prompt, str):
        return llm.chat_prompt([*system_messages(arguments), {"role": "user", "content": prompt}])
    if isinstance(prompt, str) and llm.tokenizer is not None:
        return llm.tokenizer.encode(prompt)
    return prompt


def system_messages(arguments: argparse.Namespace) -> Sequence[Mapping[str, Any]]:
    """How a conversation starts."""
    return [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
