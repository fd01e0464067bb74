"""A chat template of a checkpoint computes within bounds of time and memory, and the error names it."""

from __future__ import annotations

import resource
import threading
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from instep.data import template
from instep.data.chat import render
from instep.data.template import TemplateTooLarge, apply_template
from instep.errors import CheckpointError
from tests.chat_templates import TEMPLATES

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


class Tokenizer:
    """What a tokenizer does with its template."""

    name_or_path = "models/hostile"

    def __init__(self, text: str):
        self.text = text

    def apply_chat_template(self, messages: Any, **given: Any) -> str:
        given.pop("tokenize", None)
        rendered, _ = render_jinja_template([messages], chat_template=self.text, **given)
        return rendered[0]


LAUGHS = "{% set a = ['ha'] %}" + "{% set a = [a, a, a, a, a, a, a, a, a, a] %}" * 12
DOUBLED = "{% set n = namespace(x='x') %}{% for i in range(64) %}{% set n.x = BOTH %}{% endfor %}{{ n.x | length }}"
TWICE = LAUGHS + LAUGHS.replace("a", "b").replace("hb", "ha")
TOO_LARGE = {
    "repeated": "{{ 'x' * 10**10 }}",
    "repeated, from the right": "{{ 10**10 * 'x' }}",
    "a list": "{{ ([0] * 10**10) | length }}",
    "doubled by +": DOUBLED.replace("BOTH", "n.x + n.x"),
    "doubled by ~": DOUBLED.replace("BOTH", "n.x ~ n.x"),
    "doubled by join": DOUBLED.replace("BOTH", "[n.x, n.x] | join"),
    "doubled by a method": DOUBLED.replace("BOTH", "''.join([n.x, n.x])"),
    "doubled by a block": DOUBLED.replace(
        "{% set n.x = BOTH %}", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}"
    ),
    "squared by replace": DOUBLED.replace("BOTH", "('a' * 99) | replace('a', n.x) | replace('x', 'x' * 99)"),
    "squared by a method": DOUBLED.replace("BOTH", "n.x.replace('x', 'x' * 99)"),
    "center": "{{ 'x' | center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "zfill": "{{ '1'.zfill(10000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10000000000) }}",
    "indent": "{{ ('x\\n' * 1000) | indent(100000000) }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list | length }}",
    "tojson": "{{ [1, 2] | tojson(indent=10000000000) }}",
    "tojson, by its separators": "{{ range(1000) | list | tojson(separators=('x' * 100000, ':')) | length }}",
    "tojson, by a text as its indent": "{{ range(1000) | list | tojson(indent='x' * 100000) | length }}",
    "round, to the left": "{{ 7 | round(-99999999999) }}",
    "to_bytes": "{{ (1).to_bytes(10000000000) | length }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "format, a width as a value": "{{ '{:>{w}}'.format(1, w=10000000000) }}",
    "the filter format": "{{ '%10000000000d' | format(1) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent, a width as a value": "{{ ('%*d' % (100000000, 1)) | length }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "powers": "{% set n = namespace(x=10) %}{% for i in range(64) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x > 1 }}",
    "output": "{% for i in range(10000) %}{{ messages[0].content * 100000 }}{% endfor %}",
    "laughs": LAUGHS + "{{ a }}",
    "laughs as text": LAUGHS + "{{ a | string | length }}",
    "laughs as JSON": LAUGHS + "{{ a | tojson | length }}",
    "laughs by ~": LAUGHS + "{{ ('' ~ a) | length }}",
    "laughs by %": LAUGHS + "{{ ('%s' % [a]) | length }}",
    "laughs by format": LAUGHS + "{{ '{}'.format(a) | length }}",
    "laughs by a filter of texts": LAUGHS + "{{ a | trim | length }}",
    "laughs by join": LAUGHS + "{{ a | join | length }}",
    "laughs compared": TWICE + "{{ a == b }}",
    "laughs compared by a test": TWICE + "{{ a is eq b }}",
    "laughs looked up": TWICE + "{{ a in [b] }}",
    "laughs selected": TWICE + "{{ [a] | select('eq', b) | list | length }}",
    "laughs counted": TWICE + "{{ [a].count(b) }}",
    "laughs that change": TWICE + "{% for x in [a, b] %}{{ loop.changed(x) }}{% endfor %}",
    "laughs as a key": LAUGHS.replace("[", "(").replace("]", ",)") + "{{ {a: 1} | length }}",
    "laughs as an index": LAUGHS.replace("[", "(").replace("]", ",)") + "{{ {}[a] }}",
    "laughs that are one": TWICE + "{{ [a, b] | unique | list | length }}",
    "laughs that are sorted": TWICE + "{{ [a, b] | sort | length }}",
    "the largest of laughs": TWICE + "{{ [a, b] | max | length }}",
    "a sum of lists": "{% set a = [1] * 99999 %}{{ ([a] * 99999) | sum(start=[]) | length }}",
}
NESTED = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
TOO_LONG = {
    "loops": NESTED,
    "macros": "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    "a function of a loop": "{% for a in range(99999) recursive %}{{ loop(range(99)) if loop.depth < 9 }}{% endfor %}",
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_too_large(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        CheckpointError, match="the chat template of models/hostile makes an? (text or list|integer) of more"
    ):
        render(MESSAGES, Tokenizer(TOO_LARGE[name]), generation_prompt=True)  # type: ignore[arg-type]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20, "KiB"


@pytest.mark.parametrize("name", TOO_LONG)
@pytest.mark.parametrize("in_thread", [False, True])
def test_too_long(name: str, in_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SECONDS", 0.5)
    said: list[BaseException] = []

    def work() -> None:
        try:
            render(MESSAGES, Tokenizer(TOO_LONG[name]), generation_prompt=True)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 - looked at below
            said.append(error)

    thread = threading.Thread(target=work)
    thread.start() if in_thread else work()
    thread.join(300) if in_thread else None
    assert said and isinstance(said[0], CheckpointError)
    assert "the chat template of models/hostile took more than 0.5 s" in str(said[0])
    for _ in range(1000):
        pass  # nothing is raised later
    assert render(MESSAGES, Tokenizer("{{ messages | length }}"), generation_prompt=True) == "2"  # type: ignore[arg-type]


def test_memory_of_all_operations_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "GROWTH_BYTES", 300 << 20)
    text = "{% set n = namespace(l=[]) %}{% for i in range(99999) %}{% set n.l = n.l + [i ~ 'x' * 1000000] %}"
    monkeypatch.setattr(template, "LIMIT", 1 << 60)
    monkeypatch.setattr(template, "LOOK_SECONDS", 0.02)
    with pytest.raises(TemplateTooLarge, match="models/hostile let this process grow by more than 0 GB"):
        apply_template(Tokenizer(text + "{% endfor %}"), MESSAGES)


def test_other_templates_render_as_before() -> None:
    """The text of each is that of transformers' own environment."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers.utils import chat_template_utils

    parts = "{{ 'a' ~ 1 ~ none ~ [1, 'b'] }}|{{ [1, 2] * 2 }}|{{ 'ab' * 3 }}|{{ 2 ** 8 }}|{{ '%s-%03d' % ('a', 7) }}|"
    parts += "{{ 7 % 4 }}|{{ '{:>5}{}'.format('a', 2) }}|{{ messages | map(attribute='role') | join(', ') }}|"
    parts += (
        "{{ 'aXb'.replace('X', '--') }}|{{ 'a\nb' | indent(2) }}|{{ {'a': [1]} | tojson(indent=2) }}|{{ {'a': 1} }}|"
    )
    parts += "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f([1, 2]) }}|"
    parts += "{% set q = [1] %}{{ q == [1] }}{{ q in [[1]] }}{{ {q[0]: 2}[1] }}{{ q is eq [1] }}{{ [2, 1] | sort }}|"
    parts += "{{ x | default('none') }}|{{ 1.5 + 2 }}|{{ [1] + [2] }}|"
    parts += "{% for m in messages %}{{ loop.index }}{{ m.items() | list }}{% endfor %}|"
    parts += "{{ 1700000000 | tojson }}|{{ 'a' + 'b' }}"
    texts = [parts, *(one.text for one in TEMPLATES.values())]
    for text in texts:
        chat_template_utils._compile_jinja_template.cache_clear()
        ours = _outcome(lambda text=text: apply_template(Tokenizer(text), MESSAGES))
        chat_template_utils._compile_jinja_template.cache_clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment)
            theirs = _outcome(lambda text=text: Tokenizer(text).apply_chat_template(MESSAGES))
        chat_template_utils._compile_jinja_template.cache_clear()
        assert ours == theirs
        assert text is not parts or isinstance(ours, str)


def _outcome(work: Any) -> Any:
    try:
        return work()
    except jinja2.TemplateError as error:
        return type(error)
