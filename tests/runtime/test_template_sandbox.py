"""Templates from strangers reach neither Python nor the memory; honest ones do what they say."""

from __future__ import annotations

import pytest

from flashnext.export.errors import RequestError
from flashnext.runtime.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 10 ** 11 }}",
        "{{ 10 ** 11 * [0] }}",
        "{{ 9 ** 99999999 }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '%*d' % (99999999999, 1) }}",
        "{{ 'x'.ljust(10 ** 11) }}",
        "{{ 'x' | center(99999999999) }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ messages | tojson(indent=99999999999) }}",
        "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    ],
)
def test_refused(source: str) -> None:
    text = ""
    with pytest.raises(RequestError, match="The chat template rejects these messages: ") as refused:
        text = ChatTemplate(source).render(MESSAGES)
    assert text == ""
    assert "MemoryError" not in str(refused.value)


@pytest.mark.parametrize(
    "source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__.__init__}'.format(raise_exception) }}"]
)
def test_attributes_of_python_are_empty(source: str) -> None:
    assert ChatTemplate(source).render(MESSAGES) == ""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '-' * 20 }}", "-" * 20),
        ("{{ 1234567890123 * 2 }}", "2469135780246"),
        ("{{ 0.5 * 4 + 2 ** 10 }}", "1026.0"),
        ("{{ 'a' + 'b' }}{{ [1] + [2] }}", "ab[1, 2]"),
        ("{{ 7 % 4 }} {{ '%05.1f' % 2.5 }} {{ '{:>4}'.format(1) }}", "3 002.5    1"),
        ("{{ 'x' | center(3) }}{{ 2000000000 | string }}{{ messages | length }}", " x 20000000001"),
        ("{{ messages | map(attribute='role') | join(',') | upper }}", "USER"),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
    ],
)
def test_honest(source: str, text: str) -> None:
    assert ChatTemplate(source).render(MESSAGES) == text
