"""Conversations -> token ids and loss mask, through the tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from instep.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOSS_MASK_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
_MARK = "\ue000"  # private use: in no conversation
Message = dict[str, Any]


def render(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    *,
    generation_prompt: bool,
    where: str = "",
) -> str:
    """The conversation as text. The template does not see `step_loss_mask`, a key of instep.

    Raises:
        DataError: the template refuses the messages.
    """
    import jinja2

    clean = [{k: v for k, v in message.items() if k != "step_loss_mask"} for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            clean,
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **(template_kwargs or {}),
        )
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise DataError(
            f"the chat template refuses the messages (roles {roles}): {error}",
            where=where,
            remedy="mend the row, or use a checkpoint whose template knows these roles",
        ) from error
    return str(text)


def tokenize_conversation(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None = None,
    *,
    loss_mask_type: str = "qwen",
    template_kwargs: dict[str, Any] | None = None,
    where: str = "",
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and a loss mask of the same length: 1 for the tokens of the assistant's turns.

    The trained tokens of a turn are those that a model would generate after the generation prompt, through its
    end-of-turn token, without the text that the template writes around the turn. A turn with `step_loss_mask: 0` is not
    trained on. The text of the whole conversation (in which a template may drop old reasoning) is divided where turns
    begin and end, and the parts are tokenized one by one, because an engine tokenizes the prompt of a turn alone.

    `loss_mask_type` takes the names of slime and vime; one implementation serves all of them, and other templates.

    Raises:
        ConfigError: an unknown `loss_mask_type`.
        DataError: no trainable token, or a template that gives no way to tell where a turn begins and ends.
    """
    if loss_mask_type not in LOSS_MASK_TYPES:
        raise ConfigError(
            f"--loss-mask-type {loss_mask_type!r} is unknown",
            remedy=f"one of {', '.join(LOSS_MASK_TYPES)}",
            where="--loss-mask-type",
        )
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("step_loss_mask", 1)]
    if not turns:
        raise DataError(
            "the conversation has no assistant turn to train on",
            where=where,
            remedy="add an assistant message with step_loss_mask 1, or skip such rows with --skip-bad-rows",
        )
    text_of = partial(render, tokenizer=tokenizer, tools=tools, template_kwargs=template_kwargs, where=where)
    text = text_of(messages, generation_prompt=False)
    token_ids: list[int] = []
    loss_mask: list[int] = []
    end = 0
    for turn in turns:
        span = _turn_span(messages, turn, text, text_of, tokenizer)
        start, next_end = (max(span[0], end), span[1]) if span else (0, -1)
        if next_end < start:
            raise DataError(
                f"the chat template hides where message {turn} (assistant) begins and ends",
                where=where,
                remedy="set step_loss_mask 0 for it (for all turns but the last), or use a template in which no turn "
                "depends on what follows and a tool's answer stands in a turn of its own",
            )
        for part, trained in ((text[end:start], 0), (text[start:next_end], 1)):
            ids = tokenizer(part, add_special_tokens=False)["input_ids"] if part else []
            token_ids += ids
            loss_mask += [trained] * (_end_of_turn(ids, tokenizer) if trained else 0)
            loss_mask += [0] * (len(token_ids) - len(loss_mask))
        end = next_end
    rest = tokenizer(text[end:], add_special_tokens=False)["input_ids"] if text[end:] else []
    token_ids += rest
    loss_mask += [0] * len(rest)
    loss_mask[:1] = [0]  # nothing predicts the first token
    if not any(loss_mask):
        raise DataError(
            "the conversation has no trainable token: its assistant turns are empty",
            where=where,
            remedy="fill its assistant turns, or skip such rows with --skip-bad-rows",
        )
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    if token_ids != whole and tokenizer.decode(token_ids) != tokenizer.decode(whole):
        raise DataError(
            "the conversation's turns cannot be tokenized one by one: their tokens do not spell its text",
            where=where,
            remedy="use a byte-level tokenizer; sentencepiece tokenizers that add a space are not supported",
        )
    return token_ids, loss_mask


def _turn_span(
    messages: list[Message], turn: int, text: str, text_of: Callable[..., str], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, int] | None:
    """The places in `text` where the turn's text begins and ends; None if the template hides them.

    The prefixes of the conversation give the places, unless the template renders a turn differently when others follow
    it (as Qwen3's, which shows reasoning in the last turns only). Then the turn is replaced by a mark, and the text in
    the place of the mark is the turn. A turn that a tool's answer stands in is hidden, too: it is not the model's.
    """
    start = _prefix_length(messages[:turn], text, text_of, generation_prompt=True)
    end = _prefix_length(messages[: turn + 1], text, text_of, generation_prompt=False)
    if start is not None and end is not None:
        return start, end
    place = _place_of(messages, turn, {"role": "assistant", "content": _MARK}, text, text_of)
    if place is None:
        return None
    if end is None:
        marker = next((t for t in special_tokens(tokenizer) if text.startswith(t, place[1])), "")
        end = place[1] + len(marker)
    start = place[0] if start is None else start
    for i, message in enumerate(messages[turn + 1 :], turn + 1):  # some templates write a tool's answer into the turn
        if message["role"] in ("system", "user", "assistant"):
            break
        answer = _place_of(messages, i, {**message, "content": _MARK}, text, text_of)
        if answer is None or (answer[0] < end and answer[1] > start):
            return None
    return start, end


def _place_of(
    messages: list[Message], index: int, marked: Message, text: str, text_of: Callable[..., str]
) -> tuple[int, int] | None:
    """The part of `text` whose place the mark takes when message `index` becomes `marked`; None: it cannot be told."""
    try:
        changed = text_of([*messages[:index], marked, *messages[index + 1 :]], generation_prompt=False)
    except DataError:  # some templates want the tool calls
        return None
    before, mark, after = changed.partition(_MARK)
    if not mark or not text.startswith(before) or not text.endswith(after) or len(before + after) > len(text):
        return None
    return len(before), len(text) - len(after)


def _prefix_length(
    messages: list[Message], text: str, text_of: Callable[..., str], *, generation_prompt: bool
) -> int | None:
    if not messages:
        return None
    try:
        prefix = text_of(messages, generation_prompt=generation_prompt)
    except DataError:  # some templates refuse a part of a conversation
        return None
    return len(prefix) if text.startswith(prefix) else None


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of all special tokens, the longest first."""
    added = [str(t) for t in tokenizer.added_tokens_decoder.values()]
    return sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)


def _end_of_turn(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of a turn's tokens that a model would generate, without blank text after the end-of-turn token."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for i in range(len(ids), 0, -1):
        if ids[i - 1] in special:
            return i
        if str(tokenizer.decode([ids[i - 1]])).strip():
            break
    return len(ids)
