"""Chat templates: messages to prompt text, by the checkpoint's own Jinja template in a sandbox.

A template is a program from strangers; `runtime.template_sandbox` says what it may do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from flashnext.export.errors import BundleError, RequestError
from flashnext.export.files import plain, read_json_object, read_small_file
from flashnext.runtime.template_sandbox import TemplateSandbox

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_FILE_BYTES = 4 << 20
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled chat template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile a template.

        Raises:
            BundleError: its syntax is wrong.
        """
        try:
            self._template = TemplateSandbox().from_string(source)
        except (jinja2.TemplateError, RecursionError) as cause:
            raise BundleError(f"The chat template cannot be read ({_sentence(cause)}); mend {TEMPLATE_FILE}.") from None
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def open(cls, folder: Path) -> ChatTemplate | None:
        """The folder's template (`chat_template.jinja`, else the entry in tokenizer_config.json), or None."""
        path = folder / CONFIG_FILE
        config = _read_config(path) if path.is_file() else {}
        file = folder / TEMPLATE_FILE
        try:
            source = _read_template(file) if file.is_file() else _default_template(config.get("chat_template"))
        except UnicodeDecodeError:
            raise BundleError(f"{file} is not UTF-8 text.") from None
        return None if source is None else cls(source, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation; `variables` go to the template (`enable_thinking=False`).

        Raises:
            RequestError: messages that are none, or that the template rejects or cannot handle.
        """
        _check_messages(messages)
        context = {**self._special_tokens, **variables, "messages": messages, "tools": tools}
        try:
            return self._template.render(add_generation_prompt=add_generation_prompt, **context)
        except Exception as cause:  # a template can fail in any way that an expression can
            raise RequestError(f"The chat template rejects these messages: {_sentence(cause)}.") from None


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"A chat needs a list of messages, found {messages!r:.80}.")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f'A message must look like {{"role": "user", "content": "…"}}, found {message!r:.80}.')


def _read_config(path: Path) -> dict[str, Any]:
    return read_json_object(path, BundleError, "a tokenizer's configuration", MAX_FILE_BYTES)


def _read_template(path: Path) -> str:
    return read_small_file(path, BundleError, "a chat template", MAX_FILE_BYTES).decode("utf-8")


def _default_template(entry: Any) -> str | None:
    """The entry is the template, or a list of named ones of which "default" is taken."""
    if isinstance(entry, list):
        named = {t.get("name"): t.get("template") for t in entry if isinstance(t, dict)}
        entry = named.get("default")
    if entry is not None and not isinstance(entry, str):
        raise BundleError(f"chat_template in {CONFIG_FILE} must be text, found {type(entry).__name__}.")
    return entry


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name: given as text, or as an object with its text in `content`."""
    found = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _sentence(cause: BaseException) -> str:
    return plain(str(cause).strip().rstrip(".") or type(cause).__name__)
