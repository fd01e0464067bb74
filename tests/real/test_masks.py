"""What SFT trains on under real tokenizers: the turns of the model, each once, after the ids that an engine gets."""

from __future__ import annotations

import itertools
import random
from typing import Any

from instep.data.chat import conversation_samples
from tests.real.templates import TOOLS, Message, conversation, turn_text


def trained(tokenizer: Any, ids: list[int], mask: list[int]) -> list[tuple[int, str]]:
    """Where each run of trained tokens begins, and its text."""
    runs = [list(run) for _, run in itertools.groupby(range(len(ids)), lambda i: mask[i])]
    return [(run[0], tokenizer.decode([ids[i] for i in run])) for run in runs if mask[run[0]]]


def spelled(tokenizer: Any, text: str) -> str:
    """`text` as the tokenizer reads it: Qwen's joins letters with their marks."""
    normal = tokenizer.backend_tokenizer.normalizer
    return normal.normalize_str(text) if normal else text


def check(name: str, tokenizer: Any, messages: list[Message], tools: Any) -> int:
    """How many samples the conversation becomes."""
    samples = conversation_samples(messages, tokenizer, tools)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    found = [(ids, *run) for ids, mask in samples for run in trained(tokenizer, ids, mask)]
    assert [text for _, _, text in found] == [spelled(tokenizer, turn_text(name, messages[i])) for i in turns]
    for turn, (ids, start, _) in zip(turns, found, strict=True):
        prompt = tokenizer.apply_chat_template(
            messages[:turn], tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert ids[:start] == prompt
    return len(samples)


def test_every_turn_is_trained_once_after_its_own_prompt(name: str, tokenizer: Any) -> None:
    rng = random.Random(0)
    plain = [check(name, tokenizer, conversation(rng, 1 + n % 4, tools=False), None) for n in range(40)]
    tools = [check(name, tokenizer, conversation(rng, 1 + n % 4, tools=True), TOOLS) for n in range(40)]
    if name == "mistral":  # the tools move to the last user's message
        assert set(plain) == {1} and tools == [1 + n % 4 for n in range(40)]
    else:  # Qwen's tokenizer joins blank lines that begin a turn with the end of its header
        assert set(plain) == set(tools) == ({1} if name == "deepseek" else {1, 2})


def test_masks_are_those_of_transformers(name: str, tokenizer: Any) -> None:
    """It tokenizes the whole conversation at once, so here no turn begins with blanks."""
    rng = random.Random(1)
    for n in range(40):
        messages = [m | {"content": m["content"].strip()} for m in conversation(rng, 1 + n % 3, tools=False)]
        theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert conversation_samples(messages, tokenizer) == [(theirs["input_ids"], theirs["assistant_masks"])]
