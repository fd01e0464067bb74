"""Text to token ids and back, with one tokenizer per checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from instep.arguments.settings import Settings
from instep.data.branches import Message, window
from instep.data.chat import render, special_tokens
from instep.data.dataset import require_chat_template
from instep.data.template import text_messages
from instep.data.tokenizer import byte_texts, text_ids, tokenizer_of
from instep.errors import DataError
from instep.types import Sample

_MARK = "\ue003"  # private use: marks what follows a turn
_OF_RESPONSE = (  # fields of a sample that belong to it alone
    *("response", "response_length", "reward", "loss_mask", "rollout_log_probs", "rollout_routed_experts"),
    *("weight_versions", "status", "sampling_params", "sampling_turns", "remove_sample", "non_generation_time"),
)
_ANYTHING: list[Message] = [{"role": "user", "content": "?"}]  # replaces an unknown prompt
TOKENS_BEFORE = "tokens_before"  # in `extra` of a sibling: how many of the responses it continues (for its seed)
MAX_TOKENS_INLINE = 256  # below this, the transfer to a thread and back takes longer than the decoding
_decoder = ThreadPoolExecutor(1, thread_name_prefix="detokenize")


def without_end(args: Settings, response: str) -> str:
    """Return the text of a response without the special tokens at its end (`<|im_end|>`, ...)."""
    return _without_ends(response.rstrip(), tokenizer_of(args).all_special_tokens).rstrip()


def where_of(sample: Sample) -> str:
    """Return file and line of the sample's prompt if they are known, else its group; for errors."""
    return str(sample.extra.get("where", f"group {sample.group_index}"))


def prompt_ids(args: Settings, sample: Sample) -> list[int]:
    """Return the token ids of the sample's prompt: from `tokens`, its text, or its messages by chat template."""
    if sample.tokens:
        return list(sample.tokens[: sample.prompt_length])
    text, where = sample.prompt, where_of(sample)
    add_bos = args.add_bos_token and isinstance(text, str)
    if not isinstance(text, str):
        tokenizer, kwargs = require_chat_template(tokenizer_of(args)), args.apply_chat_template_kwargs
        text = render(text, tokenizer, sample.metadata.get("tools"), kwargs, generation_prompt=True, where=where)
    ids = encode(args, text, add_bos=add_bos)
    if not ids:
        raise DataError("the prompt has no tokens", where=where, remedy="remove the row")
    return ids


def encode(args: Settings, text: str, *, add_bos: bool = False) -> list[int]:
    """Return the token ids of a text (`text_ids`)."""
    return list(_encode(tokenizer_of(args), text, add_bos))


@functools.lru_cache(maxsize=1024)  # the samples of a group have one prompt
def _encode(tokenizer: Any, text: str, add_bos: bool) -> tuple[int, ...]:
    return tuple(text_ids(tokenizer, text, add_bos))


def next_turn(args: Settings, sample: Sample, messages: list[dict[str, Any]]) -> Sample:
    """Return the sample that ends where the model's next turn begins, after `messages` (such as a tool's answer).

    If the chat template continues the text of the model, it is `sample` with the tokens between the two turns. Blanks
    that a template changes stay the model's. Names of special tokens are removed from the contents, because they would
    become these tokens. `messages` may begin with the model's turn as a message (`assistant`, with its `tool_calls`),
    because some templates need it.

    A template may write the turn differently once others follow, for example without its reasoning. Then it returns
    another sample, a fan-out sibling. Its prompt is the conversation as the template writes it now, tokenized again. A
    generate function returns the sibling in a list with the earlier samples.

    The conversation is known if the prompt is one (without --apply-chat-template). Only a sibling needs a full
    rendering. Other turns leave out the text before the last user's message; before a tool's answer they also leave out
    the turns between that message and the previous turn. So all turns together take a time that is linear in their
    number.

    Raises:
        DataError: the template refuses the messages, or does not show one of them; or a sibling is needed, but the
            prompt is a text.
    """
    said, messages = _said_and_others(args, messages)
    state = sample.extra.get("next_turn") or {"start": 0, "messages": []}
    at = state["start"]
    if at and not (at <= sample.response_length and sample.loss_mask and not sample.loss_mask[at - 1]):
        state, at = {"start": 0, "messages": []}, 0  # of a response that has restarted since
    is_talk = isinstance(sample.prompt, list)
    known = [*(sample.prompt if is_talk else _ANYTHING), *state["messages"]]
    kept, earlier = window([*known, {"role": "assistant"}], len(known))
    if any(m["role"] != "tool" for m in messages):  # they may change all turns since the last user's message
        earlier = next((i + 1 for i in reversed(range(len(known))) if known[i]["role"] == "user"), 0)
    talk = _Talk(args, [*kept, *known[earlier:]], sample.metadata.get("tools"), where_of(sample))
    ids = sample.tokens[sample.prompt_length + at :]
    turn = tokenizer_of(args).decode(ids, skip_special_tokens=False)
    said = said or {"role": "assistant", "content": talk.opening + _without_ends(turn, talk.ends)}
    talk.must_show(said, messages)
    rest = _rest(talk.after(said, messages), talk.prompt + turn)
    messages = [*state["messages"], said, *messages]
    if rest is not None:
        sample.append_response_tokens(encode(args, rest), trainable=False)
        sample.extra = {**sample.extra, "next_turn": {"start": sample.response_length, "messages": messages}}
        return sample
    if not is_talk:
        raise talk.refusal(messages[len(state["messages"]) + 1 :])
    messages = [*sample.prompt, *messages]
    empty = Sample()
    fresh = {name: getattr(empty, name) for name in _OF_RESPONSE}
    return dataclasses.replace(
        sample,
        **fresh,
        prompt=messages,
        tokens=text_ids(tokenizer_of(args), talk.render(messages, generation_prompt=True)),  # asked for once
        metadata=dict(sample.metadata),
        extra={name: value for name, value in sample.extra.items() if name != "next_turn"}
        | {TOKENS_BEFORE: sample.extra.get(TOKENS_BEFORE, 0) + sample.response_length},
    )


class _Talk:
    """A conversation up to a turn of the model, as the chat template writes it, and the text after it.

    Attributes:
        ends: the special tokens that end a turn.
        prompt: the text before the turn.
        opening: the reasoning tag at the end of the prompt, if there is one.
    """

    def __init__(self, args: Settings, before: list[Message], tools: Any, where: str):
        self.tokenizer, self.before, self.where = require_chat_template(tokenizer_of(args)), before, where
        added = self.tokenizer.added_tokens_decoder.values()
        self.ends = tuple({*(str(t) for t in added if t.special), *self.tokenizer.all_special_tokens})
        kwargs = args.apply_chat_template_kwargs
        self.render = functools.partial(
            render, tokenizer=self.tokenizer, tools=tools, template_kwargs=kwargs, where=where
        )
        self.prompt: str = self.render(before, generation_prompt=True)
        at = self.prompt.rfind("<think>")
        self.opening = self.prompt[at:] if self.prompt.rstrip().endswith("<think>") else ""

    def after(self, said: Message, messages: list[Message]) -> str:
        """Return the next prompt when `messages` follow the turn."""
        return self.render([*self.before, said, *messages], generation_prompt=True)

    def must_show(self, said: Message, messages: list[Message]) -> None:
        """Raise a DataError if the template leaves out one of `messages`."""
        marked = [m | {"content": f"{_MARK}{i}."} if m["content"].strip() else m for i, m in enumerate(messages)]
        text = self.after(said, marked)
        lost = [m["role"] for m in marked if m["content"].strip() and m["content"] not in text]
        if lost:
            raise DataError(
                f"the chat template does not show what the {lost[0]} says after a turn of the model",
                where=self.where,
                remedy="give the model's turn with its tool_calls as the first message if the template writes "
                "answers next to their calls; or use a role that it shows, such as user",
            )

    def refusal(self, messages: list[Message]) -> DataError:
        roles = ", ".join(m["role"] for m in messages)
        return DataError(
            f"the chat template writes a turn of the model differently once messages ({roles}) follow, such as without "
            "its reasoning or with another end: the next prompt does not begin with the model's text",
            where=self.where,
            remedy="use conversations as prompts (without --apply-chat-template), so that a fan-out sibling can "
            "begin with what the template writes",
        )


def _said_and_others(args: Settings, messages: list[Message]) -> tuple[Message | None, list[Message]]:
    """Return the model's turn, if `messages` begin with it, and the others without names of special tokens."""
    special, messages = special_tokens(tokenizer_of(args)), text_messages(tokenizer_of(args), messages, "next_turn")
    first = messages[0] if messages and messages[0]["role"] == "assistant" else None
    others = messages if first is None else messages[1:]
    return first, [{**m, "content": _without(special, m["content"])} for m in others]


def _without_ends(text: str, ends: Iterable[str]) -> str:
    """Return `text` without the special tokens at its end and the blanks between them."""
    ends, cut, end = tuple(filter(None, ends)), len(text), len(text)
    while True:
        while text[end - 1 : end].isspace():
            end -= 1
        if not text.endswith(ends, 0, end):
            return text[:cut]
        cut = end = end - max(len(token) for token in ends if text.endswith(token, 0, end))


def _rest(text: str, beginning: str) -> str | None:
    """Return what follows `beginning` in `text`, blanks ignored; None: `text` begins differently."""
    if text.startswith(beginning):
        return text[len(beginning) :]
    at = 0
    for letter in "".join(beginning.split()):
        while text[at : at + 1].isspace():
            at += 1
        if not text.startswith(letter, at):
            return None
        at += 1
    return text[at:]


def _without(names: list[str], text: str) -> str:
    while any(name in text for name in names):  # a removal may join the parts of another name
        for name in names:
            text = text.replace(name, "")
    return text


def token_texts(args: Settings, ids: list[int]) -> list[str]:
    """Return the text of each token, special ones too. A character of several tokens belongs to the last one."""
    if (table := _byte_texts(tokenizer := tokenizer_of(args))) is not None:
        with contextlib.suppress(IndexError):  # see `decode`
            return table.each(ids)
    texts, held = [], []
    for i in ids:
        held.append(i)
        text = tokenizer.decode(held, skip_special_tokens=False)
        whole = "\ufffd" not in text or len(held) >= 8
        texts.append(text if whole else "")
        held = [] if whole else held
    if held:
        texts[-1] = tokenizer.decode(held, skip_special_tokens=False)
    return texts


async def decode(args: Settings, ids: list[int], *, skip_special_tokens: bool) -> str:
    """Return the text of `ids`. Many ids are decoded in a thread: the tokenizer then releases the interpreter lock."""
    if (texts := _byte_texts(tokenizer := tokenizer_of(args))) is not None:
        with contextlib.suppress(IndexError):  # a model may have more rows than its tokenizer has tokens
            return texts.decode(ids, skip_special_tokens=skip_special_tokens)
    work = functools.partial(tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)
    if len(ids) <= MAX_TOKENS_INLINE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_decoder, work)


_byte_texts = functools.lru_cache(8)(byte_texts)
