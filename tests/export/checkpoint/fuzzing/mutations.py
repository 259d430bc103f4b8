"""Ways to corrupt a file, chosen by a seeded generator: its bytes, its JSON, a safetensors header, a template."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

BAD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**400, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "../x", "/etc/passwd", "../x.safetensors", "/x.safetensors", "a/b.safetensors", "a\0b",
    "\ud800", "\x1b[31m", "bfloat16", "float64", "uint8", "{e}", "x" * 5000, [], {}, [[]], [None], [1 << 63], {"": 0},
    [0] * 1000,
)  # fmt: skip
TEMPLATES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ raise_exception.__globals__ }}",
    "{{ ('{0.__class__.__init__.__globals__}').format(raise_exception) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('id') }}",
    "{% extends '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{ 'x' * 10 ** 11 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ 'x'.ljust(10 ** 11) }}",
    "{{ 'x' | center(99999999999) }}",
    "{{ '{:>99999999999}'.format(1) }}",
    "{{ range(10 ** 11) | list }}",
    "{{ [0] * 10 ** 11 }}",
    "{{ messages[0].nothing.nothing }}",
    "{{ 1 / 0 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ strftime_now('%') }}{{ strftime_now(3) }}",
    "{{ messages | tojson(indent=99999999999) }}",
    "{% if %}",
    "{{",
    "{{ " + "(" * 2000 + ")" * 2000 + " }}",
    "{% for a in range(99999) %}" * 40,
)


def corrupt_bytes(rng: Random, data: bytes) -> bytes:
    """Flip, cut, insert, repeat."""
    at = rng.randrange(len(data) + 1)
    match rng.randrange(7):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + rng.randbytes(rng.randrange(1, 64)) + data[at:]
        case 3:
            return data[:at] + data[at + rng.randrange(1, 200) :]
        case 4:
            return data[:at] + rng.choice((b"[", b'{"":', b"9", b"-")) * rng.choice((100, 6000, 200_000)) + data[at:]
        case 5:
            return rng.choice((b"", b"\xff\xfe", b"null", b"[]", b"{}", b"3", b'"x"', b"\xef\xbb\xbf" + data))
        case _:
            other = rng.randrange(len(data) + 1)
            return data[:at] + data[other : other + 500] + data[at:]


def corrupt_json(rng: Random, data: bytes) -> bytes:
    """Change one to three values of a JSON text, or its bytes."""
    if rng.random() < 0.25:
        return corrupt_bytes(rng, data)
    value = json.loads(data)
    for _ in range(rng.randrange(1, 4)):
        _change(rng, value)
    text = json.dumps(value)
    if rng.random() < 0.1:
        text = text.replace("{", '{"a": 1, "a": 2, ', 1)
    return text.encode("utf-8", "surrogatepass")


def _change(rng: Random, value: Any) -> None:
    """Replace, remove, rename or double something somewhere."""
    holder = value
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.85:
            holder = holder[key]
            continue
        break
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[str(rng.choice(BAD_VALUES))[:100]] = holder.pop(key)
        case 2:
            holder[key] = copy.deepcopy(holder[rng.choice(keys)])
        case 3 if isinstance(holder[key], int):
            holder[key] += rng.choice((-1, 1, 7, -8, 1 << 20, 1 << 40))
        case _:
            holder[key] = copy.deepcopy(rng.choice(BAD_VALUES))


def corrupt_safetensors(rng: Random, data: bytes) -> bytes:
    """Change the header's length, the header, or any byte."""
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    match rng.randrange(6):
        case 0:
            bad = rng.choice((0, 1, length - 1, length + 1, len(data), 1 << 31, 1 << 63, (1 << 64) - 1))
            return bad.to_bytes(8, "little") + header + rest
        case 1:
            return data[: rng.randrange(len(data))]
        case 2:
            return data + rng.randbytes(rng.randrange(1, 100))
        case 3:
            at = 8 + length + rng.randrange(len(rest))
            return data[:at] + rng.randbytes(rng.randrange(1, 64)) + data[at:]
        case _:
            changed = corrupt_json(rng, header)
            return len(changed).to_bytes(8, "little") + changed + rest


def corrupt_template(rng: Random, data: bytes) -> bytes:
    """Another template, or a damaged one."""
    return rng.choice(TEMPLATES).encode() if rng.random() < 0.6 else corrupt_bytes(rng, data)
