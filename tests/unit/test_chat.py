"""Conversations become tokens and masks."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from instep.data.chat import conversation_samples, render, tokenize_conversation
from instep.data.messages import clock
from instep.errors import CheckpointError, DataError
from tests.chat import QWEN2, QWEN3, TALK, USER, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def template(tokenizer: PreTrainedTokenizerFast, request: pytest.FixtureRequest):
    tokenizer.chat_template = request.param
    yield request.param
    tokenizer.chat_template = QWEN2


def trained(tokenizer: PreTrainedTokenizerFast, ids: list[int], mask: list[int]) -> list[str]:
    """The text of each run of trained tokens."""
    assert len(ids) == len(mask) and set(mask) <= {0, 1}
    runs: list[list[int]] = []
    for i, (token, m) in enumerate(zip(ids, mask, strict=True)):
        if m:
            if i == 0 or not mask[i - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: list[Any], **kwargs: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_qwen2_masks_assistant_turns_through_their_end_token(tokenizer: PreTrainedTokenizerFast):
    ids, mask = tokenize_conversation(TALK, tokenizer)
    assert trained(tokenizer, ids, mask) == ["It is 2.<|im_end|>", "It is 4.<|im_end|>"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    before = prompt_ids(tokenizer, TALK[:3])
    assert ids[: len(before)] == before and mask[len(before)] == 1 and mask[len(before) - 1] == 0
    assert len(mask) - mask.index(1) == len(ids) - len(prompt_ids(tokenizer, TALK[:1]))


def test_a_template_with_a_clock_has_the_date_of_the_runs_start(tokenizer, monkeypatch):
    text = "{{ strftime_now('%d %b %Y') }} " + QWEN2
    monkeypatch.setattr(tokenizer, "chat_template", text)
    monkeypatch.setattr(clock(), "started", "2024-02-29T23:59:00")
    assert render([USER], tokenizer, generation_prompt=True).startswith("29 Feb 2024 <|im_start|>")
    monkeypatch.setattr(clock(), "started", None)  # no run: `instep serve`
    assert render([USER], tokenizer, generation_prompt=True).startswith(datetime.now().strftime("%d %b %Y"))


def test_a_checkpoint_without_a_template_is_named_and_not_the_row(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(CheckpointError, match="the tokenizer has no chat template") as caught:
        render(TALK, tokenizer, generation_prompt=True)
    assert "--chat-template" in caught.value.remedy


@pytest.mark.parametrize(
    "wrong,what", [("{% if %}", "line 7: Expected an expression"), ("{{ 1 | nope }}", "line 7: No f")]
)
def test_a_template_that_is_wrong_is_named_and_not_the_row(tokenizer, monkeypatch, wrong, what):
    monkeypatch.setattr(tokenizer, "chat_template", QWEN2 + "\n" + wrong)
    monkeypatch.setattr(tokenizer, "name_or_path", "models/mine")
    with pytest.raises(
        CheckpointError, match=f"(?s)the chat template of models/mine is wrong in {what}.*jinja"
    ) as error:
        render([USER], tokenizer, generation_prompt=True, where="a.jsonl, line 3")
    assert "line 3" not in str(error.value)


@pytest.mark.parametrize(
    "content", ["\n\nhi", " hi", "hi\n", "hi \n\n ", "<|im_end|>", "h\u00e9 \u4e2d\U0001f600", "\ue001"]
)
def test_awkward_contents_still_follow_the_prompts_own_tokens(tokenizer: PreTrainedTokenizerFast, content: str):
    messages = [USER, {"role": "assistant", "content": content}]
    ids, mask = tokenize_conversation(messages, tokenizer)
    before = prompt_ids(tokenizer, [USER])
    assert ids[: len(before)] == before and mask[: len(before)] == [0] * len(before)
    assert trained(tokenizer, ids, mask) == [content + "<|im_end|>"]


def test_step_loss_mask_zeroes_a_turn(tokenizer: PreTrainedTokenizerFast):
    talk = [dict(m) for m in TALK]
    talk[1]["step_loss_mask"] = 0
    ids, mask = tokenize_conversation(talk, tokenizer)
    assert trained(tokenizer, ids, mask) == ["It is 4.<|im_end|>"]
    assert ids == tokenize_conversation(TALK, tokenizer)[0]
    last = [*TALK[:3], {**TALK[3], "step_loss_mask": 0}]
    for messages in (last, TALK[:3]):  # what follows the last trained turn
        assert trained(tokenizer, *tokenize_conversation(messages, tokenizer)) == ["It is 2.<|im_end|>"]
    talk[3]["step_loss_mask"] = 0
    for messages in (talk, [USER]):
        with pytest.raises(DataError, match="no assistant turn to train on"):
            tokenize_conversation(messages, tokenizer, where="a.jsonl, line 3")


@pytest.mark.parametrize("template", [QWEN3], indirect=True)
def test_reasoning_that_is_dropped_later_is_trained_in_its_own_sample(
    tokenizer: PreTrainedTokenizerFast, template: str
):
    talk = [dict(m) for m in TALK]
    talk[1]["content"] = "<think>\nold\n</think>\n\nIt is 2."
    talk[3]["content"] = "<think>\nnew\n</think>\n\nIt is 4."
    samples = conversation_samples(talk, tokenizer, loss_mask_type="qwen3")
    assert samples == conversation_samples(talk, tokenizer)
    assert [trained(tokenizer, ids, mask) for ids, mask in samples] == [
        ["<think>\nold\n</think>\n\nIt is 2.<|im_end|>"],
        ["<think>\nnew\n</think>\n\nIt is 4.<|im_end|>"],
    ]
    for (ids, mask), turn in zip(samples, (1, 3), strict=True):
        before = prompt_ids(tokenizer, talk[:turn])
        assert ids[: len(before)] == before and mask.index(1) == len(before)
    assert "old" not in tokenizer.decode(samples[1][0])
    samples = conversation_samples(TALK, tokenizer, template_kwargs={"enable_thinking": False})
    assert [trained(tokenizer, *sample) for sample in samples] == [["It is 2.<|im_end|>"], ["It is 4.<|im_end|>"]]
    before = prompt_ids(tokenizer, TALK[:3], enable_thinking=False)
    assert samples[1][0][: len(before)] == before
    with pytest.raises(DataError, match="becomes 2 samples") as error:
        tokenize_conversation(talk, tokenizer)
    assert "--loss-mask-type qwen3_5" in error.value.remedy


@pytest.mark.parametrize("template", [QWEN3], indirect=True)
def test_loss_mask_types(tokenizer: PreTrainedTokenizerFast, template: str):
    """As rendered at last; and the last message as it stands in the data, which this template would not drop."""
    talk = [dict(m) for m in TALK]
    talk[1]["content"] = "<think>\nold\n</think>\n\nIt is 2."
    talk[3]["content"] = "  <think> new </think>It is 4."
    [(ids, mask)] = conversation_samples(talk, tokenizer, loss_mask_type="qwen3_5")
    assert trained(tokenizer, ids, mask) == ["It is 2.<|im_end|>", "<think>\nnew\n</think>\n\nIt is 4.<|im_end|>"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(talk, tokenize=False).rstrip()
    [(ids, mask)] = conversation_samples(talk, tokenizer, loss_mask_type="distill_qwen")
    assert trained(tokenizer, ids, mask) == ["  <think> new </think>It is 4.<|im_end|>"]
    before = prompt_ids(tokenizer, talk[:3])
    assert ids[: len(before)] == before and mask.index(1) == len(before)
    tokenizer.chat_template = QWEN3.replace("{% if enable_thinking is", "<think>\n{% if enable_thinking is")
    for begins in ("<think>\n", "<think>", ""):
        opened = [*talk[:3], {"role": "assistant", "content": f"{begins}new</think>It is 4.<|im_end|>"}]
        [sample] = conversation_samples(opened, tokenizer, loss_mask_type="distill_qwen")
        assert trained(tokenizer, *sample) == ["new</think>It is 4.<|im_end|>"]
    with pytest.raises(DataError, match="no assistant turn to train on"):
        conversation_samples(talk[:3], tokenizer, loss_mask_type="distill_qwen")
    with pytest.raises(DataError, match="tool calls"):
        conversation_samples([USER, {**talk[3], "tool_calls": [1]}], tokenizer, loss_mask_type="distill_qwen")


@pytest.mark.parametrize("template", [QWEN3], indirect=True)
def test_tool_calls_are_trained_and_tool_answers_are_not(tokenizer: PreTrainedTokenizerFast, template: str):
    talk = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": "bye"},
    ]
    one, other = (trained(tokenizer, *sample) for sample in conversation_samples(talk, tokenizer))
    thought = "<think>\n\n</think>\n\n"  # shown after the last words of the user
    assert one == [f"{thought}\n<tool_call>add</tool_call><|im_end|>", f"{thought}2<|im_end|>"]
    assert other == [f"{thought}bye<|im_end|>"]
    [sample] = conversation_samples(talk, tokenizer, loss_mask_type="qwen3_5")
    assert trained(tokenizer, *sample) == [
        "\n<tool_call>add</tool_call><|im_end|>",
        "2<|im_end|>",
        f"{thought}bye<|im_end|>",
    ]


def test_templates_that_tell_nothing_are_refused(tokenizer: PreTrainedTokenizerFast):
    tokenizer.chat_template = "{% for m in messages|reverse %}{{ m.content|length }}{% endfor %}"
    try:
        with pytest.raises(DataError, match="writes message 1 .assistant. differently"):
            tokenize_conversation(TALK, tokenizer)
        with pytest.raises(DataError, match="hides where message 1"):
            tokenize_conversation(TALK, tokenizer, loss_mask_type="qwen3_5")
        tokenizer.chat_template = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
        with pytest.raises(DataError, match="no trainable token"):
            tokenize_conversation([USER, {"role": "assistant", "content": "a"}], tokenizer)
    finally:
        tokenizer.chat_template = QWEN2


def test_a_conversation_that_begins_with_the_assistant(tokenizer: PreTrainedTokenizerFast):
    """No engine is asked for its first message, whose header and system prompt are not the model's."""
    talk = [{"role": "assistant", "content": "hi"}, USER, {"role": "assistant", "content": "2"}]
    with pytest.raises(DataError, match="begins with a message of the assistant"):
        conversation_samples(talk, tokenizer)
    [(ids, mask)] = conversation_samples([{**talk[0], "step_loss_mask": 0}, *talk[1:]], tokenizer)
    assert trained(tokenizer, ids, mask) == ["2<|im_end|>"]


def test_reasoning_beside_the_content_is_not_left_out_in_silence(tokenizer: PreTrainedTokenizerFast):
    talk = [USER, {"role": "assistant", "content": "2", "reasoning_content": "1+1"}]
    with pytest.raises(DataError, match="has its reasoning beside its content"):
        conversation_samples(talk, tokenizer, loss_mask_type="distill_qwen")


@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"])
def test_a_generation_prompt_that_opens_a_reasoning_which_is_not_shown(
    tokenizer: PreTrainedTokenizerFast, thought: str
) -> None:
    """As DeepSeek-R1's, V3's and Nemotron 3's. Each refusal names what is accepted."""
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip() }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    talk = [USER, {"role": "assistant", "content": f"{thought}It is 2."}]
    with pytest.raises(DataError, match="differently than after its own generation prompt") as error:
        conversation_samples(talk, tokenizer)
    assert "--loss-mask-type qwen3_5" in error.value.remedy and "distill_qwen" in error.value.remedy
    if thought:
        [(ids, mask)] = conversation_samples(talk, tokenizer, loss_mask_type="distill_qwen")
        assert trained(tokenizer, ids, mask) == ["hm\n</think>\n\nIt is 2.<|im_end|>"]
    else:
        with pytest.raises(DataError, match="none where the prompt opens it") as error:
            conversation_samples(talk, tokenizer, loss_mask_type="distill_qwen")
        assert "--loss-mask-type qwen3_5" in error.value.remedy
    [(ids, mask)] = conversation_samples(talk, tokenizer, loss_mask_type="qwen3_5")
    assert trained(tokenizer, ids, mask) == ["It is 2.<|im_end|>"]
