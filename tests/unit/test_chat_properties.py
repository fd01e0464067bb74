"""Masks of random conversations against `apply_chat_template`, on the structures of published families."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from instep.data.chat import conversation_samples
from instep.errors import DataError
from tests.chat import make_tokenizer
from tests.chat_templates import SPECIALS, TEMPLATES, TOOLS, conversation

Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(SPECIALS)


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []


def turn_of(tokenizer: PreTrainedTokenizerFast, messages: Messages, i: int) -> tuple[list[int], list[int]]:
    """What an engine gets before message `i`, and what it would generate: by rendering everything whole."""
    clean = [{k: v for k, v in m.items() if k != "step_loss_mask"} for m in messages]
    settings = {"tools": tools_of(messages), "tokenize": False}
    prompt = tokenizer.apply_chat_template(clean[:i], add_generation_prompt=True, **settings)
    whole = tokenizer.apply_chat_template(clean[: i + 1], **settings)
    assert whole.startswith(prompt)
    text = whole[len(prompt) :]
    if any(text.rstrip().endswith(token) for token in SPECIALS):
        text = text.rstrip()
    return encoded(tokenizer, prompt), encoded(tokenizer, text)


def tools_of(messages: Messages) -> list[dict[str, Any]] | None:
    return TOOLS if any(m.get("tool_calls") for m in messages) else None


def turns_of(messages: Messages) -> list[int]:
    return [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("step_loss_mask", 1)]


def runs(mask: list[int]) -> list[tuple[int, int]]:
    edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.parametrize("family", TEMPLATES)
def test_every_turn_is_trained_once_after_the_prompt_of_an_engine_oracle(
    tokenizer: PreTrainedTokenizerFast, family: str
) -> None:
    template = TEMPLATES[family]
    tokenizer.chat_template = template.text
    rng = random.Random(family)
    num_samples = num_turns = 0
    for number in range(24):
        messages = conversation(rng, template, rng.randint(1, 4) if number % 8 else 7)
        expected = [found for i in turns_of(messages) if (found := turn_of(tokenizer, messages, i))[1]]
        if not expected:
            continue
        samples = conversation_samples(messages, tokenizer, tools_of(messages))
        found = [(ids[:a], ids[a:b], n) for n, (ids, mask) in enumerate(samples) for a, b in runs(mask)]
        assert [(prompt, answer) for prompt, answer, _ in found] == expected
        for (one, answer, n), (other, _, m) in zip(found, found[1:], strict=False):
            extends = other[: len(one) + len(answer)] == one + answer
            assert (n == m) == extends  # as few samples as there can be
        num_samples, num_turns = num_samples + len(samples), num_turns + len(expected)
    assert num_turns > 50 and (num_samples < 0.7 * num_turns if template.extends else num_samples > 24)


class Counted:
    """Counts what the tokenizer renders."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch):
        self.num_renders = self.num_characters = 0
        real = tokenizer.apply_chat_template

        def counted(*args: Any, **kwargs: Any) -> str:
            text = real(*args, **kwargs)
            self.num_renders += 1
            self.num_characters += len(text)
            return text

        monkeypatch.setattr(tokenizer, "apply_chat_template", counted)


def long_talk(num_turns: int, *, calls: bool) -> Messages:
    """Turns of equal length: answers to as many questions, or calls of a tool after one question."""
    if not calls:
        pair = [{"role": "user", "content": "and now?" * 8}, {"role": "assistant", "content": "It is 2." * 8}]
        return pair * num_turns
    function = {"name": "add", "arguments": {"a": 1}}
    call = {"role": "assistant", "content": "", "reasoning_content": "hm" * 8, "tool_calls": [{"function": function}]}
    return [{"role": "user", "content": "go"}, *[call, {"role": "tool", "content": "2" * 50}] * num_turns]


@pytest.mark.parametrize("loss_mask_type", ["qwen", "qwen3_5"])
@pytest.mark.parametrize(
    ("family", "calls"),
    [*((name, False) for name in ("qwen2.5", "llama3", "gemma", "llama2")), ("qwen2.5", True), ("qwen3", True)],
)
def test_rendering_is_linear_in_the_number_of_turns(
    tokenizer: PreTrainedTokenizerFast,
    family: str,
    calls: bool,
    loss_mask_type: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer.chat_template = TEMPLATES[family].text
    counts = []
    for num_turns in (10, 20):
        with monkeypatch.context() as patch:
            counted = Counted(tokenizer, patch)
            talk = long_talk(num_turns, calls=calls)
            [(ids, mask)] = conversation_samples(talk, tokenizer, loss_mask_type=loss_mask_type)
        assert len(runs(mask)) == num_turns
        counts.append((counted.num_renders, counted.num_characters))
    (renders, characters), (more_renders, more_characters) = counts
    assert more_renders <= 2.2 * renders and more_characters <= 2.2 * characters


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss", "phi"])
def test_branches_are_rendered_a_few_times_each(
    tokenizer: PreTrainedTokenizerFast, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = TEMPLATES[family].text
    counted = Counted(tokenizer, monkeypatch)
    samples = conversation_samples(long_talk(20, calls=False), tokenizer)
    assert len(samples) == 20
    assert counted.num_characters <= 3 * sum(len(tokenizer.decode(ids)) for ids, _ in samples)


@pytest.mark.parametrize("family", TEMPLATES)
def test_turns_as_rendered_are_those_of_the_whole_conversation(
    tokenizer: PreTrainedTokenizerFast, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows as without; the ids spell the conversation, and what is trained lies in it in order."""
    tokenizer.chat_template = TEMPLATES[family].text
    rng = random.Random(family)

    def samples_or_refusal(messages: Messages) -> Any:
        try:
            return conversation_samples(messages, tokenizer, tools_of(messages), loss_mask_type="qwen3_5")
        except DataError as error:
            return error.what

    num_samples = 0
    for _ in range(4):
        messages = conversation(rng, TEMPLATES[family], 4)
        found = samples_or_refusal(messages)
        with monkeypatch.context() as patch:
            patch.setattr("instep.data.rendered._in_window", lambda *args: None)
            assert found == samples_or_refusal(messages)
        if isinstance(found, list):
            [(ids, mask)] = found
            clean = [{k: v for k, v in m.items() if k != "step_loss_mask"} for m in messages]
            whole = tokenizer.apply_chat_template(clean, tools=tools_of(messages), tokenize=False)
            assert whole.startswith(tokenizer.decode(ids)) and len(runs(mask)) <= len(turns_of(messages))
            num_samples += 1
    assert num_samples or family in ("mistral", "inside", "gpt-oss")


def test_rendering_once_is_linear_where_turns_are_written_otherwise_later(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = TEMPLATES["qwen3"].text
    counts = []
    for num_turns in (20, 40):
        with monkeypatch.context() as patch:
            counted = Counted(tokenizer, patch)
            talk = long_talk(num_turns, calls=False)
            [(_, mask)] = conversation_samples(talk, tokenizer, loss_mask_type="qwen3_5")
        assert len(runs(mask)) == num_turns
        counts.append(counted.num_characters)
    assert counts[1] <= 2.2 * counts[0]
