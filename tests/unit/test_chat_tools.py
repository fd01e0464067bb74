"""Masks of conversations with tools: calls are trained on, a tool's answer never is, wherever a template puts it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from instep.data.chat import conversation_samples, render
from instep.engines.embedded.protocol import HttpError
from instep.engines.embedded.scheduler import Scheduler
from instep.errors import DataError
from tests.chat import make_tokenizer
from tests.unit.test_chat import trained

# As Hermes and Qwen2.5: the answers of tools are a user's turn.
HERMES = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant"
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Mistral 7B v0.3: tools stand before the last user message, calls must be followed by results.
MISTRAL = (
    "{% set ns = namespace(last=0, index=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.index0 == ns.last %}[AVAILABLE_TOOLS] add[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls | map(attribute='function') | list | tojson }}<|im_end|>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
# The answer is written where its call is, inside the model's turn; the tool's own message shows nothing.
INSIDE = (
    "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>"
    "{% for t in messages if t.role == 'tool' and t.tool_call_id == c.id %}<result>{{ t.content }}</result>{% endfor %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ANSWER = {"role": "tool", "content": "4711", "tool_call_id": "c1"}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ANSWER,
    {"role": "assistant", "content": "4711"},
]
FURTHER = [{"role": "user", "content": "thanks"}, {"role": "assistant", "content": "bye"}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def masked(tokenizer: PreTrainedTokenizerFast, template: str, talk: list[dict[str, Any]]) -> list[Any]:
    tokenizer.chat_template = template
    """The trained texts of all samples; only where there are several, of each."""
    texts = [trained(tokenizer, *sample) for sample in conversation_samples(talk, tokenizer)]
    return texts[0] if len(texts) == 1 else texts


@pytest.mark.parametrize("further", [[], FURTHER])
def test_hermes(tokenizer: PreTrainedTokenizerFast, further: list[dict[str, Any]]):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    both = [*TALK[:2], ANSWER, ANSWER, TALK[3], *further]
    assert masked(tokenizer, HERMES, both) == [call, "4711<|im_end|>", *["bye<|im_end|>"] * bool(further)]


def test_mistral(tokenizer: PreTrainedTokenizerFast):
    call = ' [{"name": "add", "arguments": {"a": 1}}]<|im_end|>'
    assert masked(tokenizer, MISTRAL, TALK) == ["[TOOL_CALLS]" + call, " 4711<|im_end|>"]
    # The tools move to the last user message: no later text begins with an earlier one.
    texts = masked(tokenizer, MISTRAL, [*TALK, *FURTHER])
    assert texts == [["[TOOL_CALLS]" + call, " 4711<|im_end|>"], [" bye<|im_end|>"]]
    with pytest.raises(DataError, match=r"hides where message 1 \(assistant\)"):
        conversation_samples([*TALK, *FURTHER], tokenizer, loss_mask_type="qwen3_5")
    only_later = [TALK[0], {**TALK[1], "step_loss_mask": 0}, *TALK[2:], *FURTHER]
    [sample] = conversation_samples(only_later, tokenizer, loss_mask_type="qwen3_5")
    assert trained(tokenizer, *sample) == ["4711<|im_end|>", " bye<|im_end|>"]


def test_an_answer_inside_the_turn_of_the_model_is_never_trained(tokenizer: PreTrainedTokenizerFast):
    tokenizer.chat_template = INSIDE
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert "<call>add</call><result>4711</result><|im_end|>" in text
    assert masked(tokenizer, INSIDE, TALK) == [["<call>add</call><|im_end|>"], ["4711<|im_end|>"]]
    with pytest.raises(DataError, match=r"hides where message 1 \(assistant\)") as error:
        conversation_samples(TALK, tokenizer, loss_mask_type="qwen3_5")
    assert "step_loss_mask 0" in error.value.remedy
    later = [TALK[0], {**TALK[1], "step_loss_mask": 0}, *TALK[2:]]
    assert masked(tokenizer, INSIDE, later) == ["4711<|im_end|>"]


ITERATES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As DeepSeek-R1: arguments are text that stands there as it is.
JOINS = HERMES.replace("{{ c.function | tojson }}", "{{ c.function.name + ' ' + c.function.arguments }}")
PARTS = [{"type": "text", "text": "1 +"}, {"type": "text", "text": "1?"}]
AS_TEXT = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    "template,given,same",
    [
        (HERMES, [{"role": "user", "content": PARTS}], [{"role": "user", "content": "1 +\n1?"}]),
        (ITERATES, [{"role": "user", "content": PARTS}], [{"role": "user", "content": "1 +1?"}]),
        (HERMES, [{"role": "user", "content": [*PARTS[:1], "x"]}], [{"role": "user", "content": "1 +\nx"}]),
        (ITERATES, [{"role": "assistant", "content": None}], [{"role": "assistant", "content": ""}]),
        (HERMES, [{"role": "assistant", "tool_calls": [AS_TEXT]}], [TALK[1]]),
        (JOINS, [TALK[1]], [{**TALK[1], "tool_calls": [AS_TEXT]}]),
    ],
)
def test_messages_in_every_form_of_openais_are_what_templates_expect(
    tokenizer: PreTrainedTokenizerFast, template: str, given: list[Any], same: list[Any]
):
    """In rows, for SFT and in requests to an engine."""
    tokenizer.chat_template = template
    text = render(given, tokenizer, generation_prompt=False)
    assert text == tokenizer.apply_chat_template(same, tokenize=False)
    assert "'type'" not in text and "None" not in text and '\\"' not in text
    talk = [{"role": "user", "content": "x"}, *given, {"role": "assistant", "content": PARTS[:1]}]
    ((ids, mask),) = conversation_samples(talk, tokenizer)
    assert trained(tokenizer, ids, mask)[-1] == "1 +<|im_end|>" and text in tokenizer.decode(ids)
    engine = SimpleNamespace(tokenizer=tokenizer, not_of_template=set(), encode=lambda text, _: text)
    assert Scheduler.chat(engine, given, {"add_generation_prompt": False}) == text
    with pytest.raises(HttpError, match="part that is not text: 'image_url'"):
        Scheduler.chat(engine, [{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}], {})
