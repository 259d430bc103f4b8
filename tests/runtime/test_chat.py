"""Chat templates: what they may use, what they may not, and one sentence for every failure."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from flashnext.export.checkpoint import random_tokenizer
from flashnext.export.errors import BundleError, RequestError
from flashnext.runtime.chat import ChatTemplate

USER = [{"role": "user", "content": "hi <b>"}]


def test_template_of_the_tokenizer_configuration(tmp_path: Path) -> None:
    random_tokenizer.write_tokenizer(tmp_path)
    template = ChatTemplate.open(tmp_path)
    assert template is not None
    assert template.render(USER) == "<|im_start|>user\nhi <b><|im_end|>\n<|im_start|>assistant\n"
    assert template.render(USER, add_generation_prompt=False) == "<|im_start|>user\nhi <b><|im_end|>\n"


def test_same_text_as_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    random_tokenizer.write_tokenizer(tmp_path)
    source = (
        "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}\n"
        "  {% generation %}{{ m.role }}:{{ m | tojson }}{% endgeneration %}\n"
        "{% endfor %}{{ tools | tojson(indent=2) }}{{ eos_token }}{{ extra }}"
    )
    (tmp_path / "chat_template.jinja").write_text(source)
    tools = [{"type": "function", "function": {"name": "f", "description": "é", "parameters": {}}}]
    messages = [{"role": "user", "content": "ü"}, {"role": "assistant", "content": "b"}] * 2
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, extra="!"
    )
    ours = ChatTemplate.open(tmp_path)
    assert ours is not None
    assert ours.render(messages, tools=tools, extra="!") == theirs


def test_the_file_comes_before_the_configuration_and_named_lists_are_read(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "chat_template": [{"name": "other", "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"}],
        "bos_token": {"content": "<s>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert _open(tmp_path).render(USER) == "<s>yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert _open(tmp_path).render(USER) == "file"


def _open(folder: Path) -> ChatTemplate:
    template = ChatTemplate.open(folder)
    assert template is not None
    return template


def test_no_template() -> None:
    assert ChatTemplate.open(Path("/nonexistent")) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ self._TemplateReference__context }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_cannot_reach_out(source: str) -> None:
    before = json.dumps(USER)
    try:
        text = ChatTemplate(source).render(USER)
    except RequestError:
        text = ""
    assert text == ""  # an attribute that the sandbox hides is undefined
    assert json.dumps(USER) == before


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ raise_exception('No system message, please.') }}", "rejects these messages: No system message, please."),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content.nothing.more }}", "has no attribute"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_failing_template_gives_one_sentence(source: str, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as caught:
        ChatTemplate(source).render(USER)
    assert "\n" not in str(caught.value)


def test_wrong_syntax_and_wrong_types(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read"):
        ChatTemplate("{% if %}")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(BundleError, match="must be text"):
        ChatTemplate.open(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(BundleError, match="not UTF-8"):
        ChatTemplate.open(tmp_path)


@pytest.mark.parametrize("messages", [[], "hello", [{"content": "x"}], ["x"], {"role": "user"}])
def test_messages_must_be_messages(messages: Any) -> None:
    with pytest.raises(RequestError, match=r"[Mm]essage"):
        ChatTemplate("x").render(messages)


def test_dates() -> None:
    year = str(datetime.datetime.now().year)
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(USER) == year
