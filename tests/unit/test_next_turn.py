"""The tokens between two turns of a rollout: as the chat template writes them, or a sample of its own, or an error."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from instep.data.branches import Conversation
from instep.data.chat import render
from instep.errors import DataError
from instep.rollout.tokens import next_turn
from instep.types import Sample
from tests.chat import make_tokenizer
from tests.chat_templates import SPECIALS, TEMPLATES, TOOLS, conversation
from tests.next_turns import arguments, ids_of, roll_out, text_of

FAR = ("far", "counting")  # what is far away counts, which a window does not see
USER, TOOL = ({"role": role, "content": "and 2?"} for role in ("user", "tool"))
ASK = [{"role": "user", "content": "1 + 1?"}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(SPECIALS)


@pytest.mark.parametrize("family", [name for name in TEMPLATES if name not in FAR])
def test_every_prompt_is_what_the_template_makes_oracle(
    tokenizer: PreTrainedTokenizerFast, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In as few samples as the conversation has in SFT, which compares whole renders."""
    template, rng, num_turns = TEMPLATES[family], random.Random(family), 0
    tokenizer.chat_template = template.text
    args, num_samples = arguments(monkeypatch, tokenizer), 0
    for _ in range(16):
        messages = [{k: v for k, v in m.items() if k != "step_loss_mask"} for m in conversation(rng, template, 3)]
        tools = TOOLS if any(m.get("tool_calls") for m in messages) else None
        samples = roll_out(args, tokenizer, messages, tools, SPECIALS)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        whole = partial(render, tokenizer=tokenizer, tools=tools)
        assert len(samples) == len(list(Conversation(messages, whole, SPECIALS).branches(turns)))
        assert len({s.execution_id for s in samples}) == 1 and all(s.metadata == samples[0].metadata for s in samples)
        num_samples, num_turns = num_samples + len(samples), num_turns + sum(m["role"] == "assistant" for m in messages)
    assert num_turns > 40 and (num_samples == 16) == template.extends


def test_reasoning_that_is_dropped_after_a_users_message_alone(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = TEMPLATES["qwen3"].text
    args = arguments(monkeypatch, tokenizer)

    def said(text: str, prompt: Any = ASK) -> Sample:
        sample = Sample(prompt=prompt, label="2", execution_id="0.0", begun_version=3, extra={"where": "row 1"})
        sample.tokens = ids_of(tokenizer, text_of(tokenizer, ASK, None, prompt=True))
        ids = ids_of(tokenizer, text)
        sample.append_response_tokens(ids, [-1.0] * len(ids))
        sample.status = Sample.Status.COMPLETED
        return sample

    thinking, bare = "<think>hm</think> 2<|im_end|>", "2<|im_end|>"  # blanks other than the template's
    parts = USER | {"content": [{"type": "text", "text": USER["content"]}]}
    assert next_turn(args, said(bare), [parts]).tokens == next_turn(args, said(bare), [USER]).tokens
    for text, message in ((thinking, TOOL), (bare, TOOL), (bare, USER)):
        sample = said(text)
        assert next_turn(args, sample, [message]) is sample
        assert tokenizer.decode(sample.tokens).endswith("<|im_start|>assistant\n") and 0 in sample.loss_mask
    sample = said(thinking)
    sibling = next_turn(args, sample, [USER])
    assert sibling is not sample and not sibling.response_length and sibling.status is Sample.Status.PENDING
    assert (sibling.label, sibling.execution_id, sibling.begun_version) == ("2", "0.0", 3)
    talk = [*ASK, {"role": "assistant", "content": "<think>hm</think> 2"}, USER]
    assert tokenizer.decode(sibling.tokens) == text_of(tokenizer, talk, None, prompt=True) and sibling.prompt == talk
    with pytest.raises(DataError, match="(?s)row 1.*without --apply-chat-template"):
        next_turn(args, said(thinking, "a text"), [USER])
    assert sibling.extra["tokens_before"] == sample.response_length  # so that its turn has a seed of its own
    again = next_turn(args, said(thinking, "a text"), [TOOL])  # the first turn is still known of a text, too
    again.append_response_tokens(ids_of(tokenizer, bare), [-1.0] * len(ids_of(tokenizer, bare)))
    with pytest.raises(DataError, match="(?s)row 1.*without --apply-chat-template"):
        next_turn(args, again, [USER])
    anew = said(bare)  # begun anew after an abort: what was known of its turns is of another response
    anew.extra["next_turn"] = {"start": 100, "messages": [{"role": "assistant", "content": "never"}, TOOL]}
    assert next_turn(args, anew, [USER]) is anew
    assert "2<|im_end|>\n<|im_start|>user" in tokenizer.decode(anew.tokens)
    cut = said("2")  # by a stop string: the end of the turn is the template's
    assert next_turn(args, cut, [USER]) is cut and "2<|im_end|>\n<|im_start|>user" in tokenizer.decode(cut.tokens)


@pytest.mark.parametrize("family", ["phi", "inside"])
def test_an_answer_that_the_template_does_not_show(
    tokenizer: PreTrainedTokenizerFast, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = "for m in messages if m.role != 'tool' %}"
    tokenizer.chat_template = TEMPLATES[family].text.replace("for m in messages %}", silent)
    with pytest.raises(DataError, match="(?s)does not show what the tool says.*tool_calls"):
        sample = Sample(prompt=ASK, tokens=ids_of(tokenizer, text_of(tokenizer, ASK, None, prompt=True)))
        sample.append_response_tokens(ids_of(tokenizer, "2"), [-1.0] * len(ids_of(tokenizer, "2")))
        next_turn(arguments(monkeypatch, tokenizer), sample, [TOOL])
