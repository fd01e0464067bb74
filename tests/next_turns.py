"""Multi-turn rollouts on a conversation that is known: a model that says what the chat template writes."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from instep.data.branches import ended
from instep.rollout.tokens import next_turn
from instep.types import Sample

Messages = list[dict[str, Any]]


def arguments(monkeypatch: Any, tokenizer: Any) -> Namespace:
    """Arguments whose tokenizer is `tokenizer`."""
    monkeypatch.setattr("instep.rollout.tokens.tokenizer_of", lambda args: tokenizer)
    monkeypatch.setattr("instep.rollout.tokens.encode", lambda args, text, **_: ids_of(tokenizer, text))
    return Namespace(
        hf_checkpoint="", trust_remote_code=False, chat_template_text=None, apply_chat_template_kwargs=None
    )


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def text_of(tokenizer: Any, messages: Messages, tools: Any, *, prompt: bool) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)


def roll_out(
    args: Any, tokenizer: Any, messages: Messages, tools: Any, ends: list[str], *, blanks: bool = True
) -> list[Sample]:
    """The samples of a rollout in which all of `messages` is said; each prompt is compared with a whole render.

    Without `blanks` those that the template writes otherwise later are left out of the comparison.
    """
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    first = messages[: turns[0]]
    tokens = ids_of(tokenizer, text_of(tokenizer, first, tools, prompt=True))
    samples = [Sample(prompt=first, tokens=tokens, metadata={"tools": tools} if tools else {})]
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        prompt = text_of(tokenizer, messages[:turn], tools, prompt=True)
        found = tokenizer.decode(samples[-1].tokens)
        assert found == prompt or (not blanks and "".join(found.split()) == "".join(prompt.split()))
        whole = text_of(tokenizer, messages[: turn + 1], tools, prompt=False)
        text = ended(whole[len(prompt) :], ends)[0] if whole.startswith(prompt) else str(messages[turn]["content"])
        said = ids_of(tokenizer, text)
        samples[-1].append_response_tokens(said, [-1.0] * len(said))
        samples[-1].status = Sample.Status.COMPLETED
        if following is not None:
            before = list(samples[-1].tokens)
            sample = next_turn(args, samples[-1], messages[turn:following])
            if sample is samples[-1]:
                assert sample.tokens[: len(before)] == before
                assert not any(sample.loss_mask[len(before) - len(sample.tokens) :])
            else:
                assert samples[-1].tokens == before and not sample.response_length
                samples.append(sample)
    return samples
