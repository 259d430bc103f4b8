"""The sandbox that chat templates run in, and what they may use there.

A template is a program from strangers. Jinja's immutable sandbox keeps it from Python's attributes and from changing
what it is given; here it is also kept from taking memory by one expression: arithmetic and calls may not ask for more
than a million items or digits. What templates may use is what Hugging Face gives them: `raise_exception`,
`strftime_now`, `tojson`, loop controls, and `{% generation %}` blocks (marks for training, transparent here).
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Sized
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST = 1_000_000
"""Items of a list, characters of a text, bits of a number that one expression may make."""
LONG_WIDTH = re.compile(r"\d{6}")
"""In a text that formats: a field of 100,000 characters or more."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An arithmetic operation whose result is of bounded size."""
        if _result_size(operator, left, right) > MOST:
            raise SecurityError(f"the result of {operator} would be too large")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call without absurd numbers (widths, counts)."""
        if __obj is not __self.globals["range"]:  # which has a limit of its own
            _check_numbers(args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`text.format`, unless the text asks for an absurd width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and LONG_WIDTH.search(value.__self__):
            raise SecurityError("the format is too wide")
        return wrapped


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Upper bound of the items, characters or bits of a result."""
    a, b = _size(left), _size(right)
    if operator == "+":
        return a + b
    if operator == "%":
        return MOST + 1 if isinstance(left, str) and ("*" in left or LONG_WIDTH.search(left)) else a + b
    if operator == "**":
        return a * abs(right) if isinstance(right, int) else a
    counts = [value for value in (left, right) if isinstance(value, int)]
    return a + b if len(counts) != 1 else max(a, b, (a if counts[0] is right else b) * abs(counts[0]))


def _size(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, Sized) else 1


def _check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(isinstance(value, int) and abs(value) > MOST for value in (*args, *kwargs.values())):
        raise SecurityError(f"a number above {MOST:,} is given to a function")


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with its numbers checked, except the first, which is what it is applied to."""

    @functools.wraps(function)  # keeps the marks by which Jinja passes contexts
    def run(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args[1:], kwargs)
        return function(*args, **kwargs)

    return run


class GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}` renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
