"""Conversations -> token ids and loss mask, through the tokenizer's own chat template."""

from __future__ import annotations

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
    """The conversation as text. `step_loss_mask` is ours and not shown to the template.

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
    except (jinja2.TemplateError, TypeError) as error:
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
    """Token ids of a conversation and, for each, 1 where it is trained on: the assistant's turns.

    A trained turn is what a model would generate after the generation prompt, through its end-of-turn token; what the
    template writes around it is not trained on. A turn with `step_loss_mask: 0` is not either. The text is that of the
    whole conversation (so a template that drops old reasoning drops it here), split where turns begin and end; the
    parts are tokenized on their own, as an engine sees them: a turn's tokens follow exactly the prompt's tokens.

    `loss_mask_type` names are those of the seeds; one way serves all of them, and any other chat template.

    Returns:
        token_ids, loss_mask: lists of equal length.

    Raises:
        ConfigError: an unknown `loss_mask_type`.
        DataError: no trainable token, or a template that gives no way to tell where a turn begins and ends.
    """
    if loss_mask_type not in LOSS_MASK_TYPES:
        raise ConfigError(
            f"--loss-mask-type {loss_mask_type!r} is unknown", remedy=f"one of {', '.join(LOSS_MASK_TYPES)}"
        )
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("step_loss_mask", 1)]
    if not turns:
        raise DataError(
            "the conversation has no assistant turn to train on",
            where=where,
            remedy="add an assistant message with step_loss_mask 1, or skip such rows with --skip-bad-rows",
        )
    context = (tokenizer, tools, template_kwargs or {}, where)
    text = _text(messages, context)
    token_ids: list[int] = []
    loss_mask: list[int] = []
    end = 0
    for turn in turns:
        start, next_end = _turn_span(messages, turn, text, context)
        start = max(start, end)
        if next_end < start:
            raise _untellable(turn, where)
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
        raise DataError("the conversation has no trainable token: its assistant turns are empty", where=where)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    if token_ids != whole and tokenizer.decode(token_ids) != tokenizer.decode(whole):
        raise DataError(
            "the conversation's turns cannot be tokenized one by one: their tokens do not spell its text",
            where=where,
            remedy="use a byte-level tokenizer; sentencepiece tokenizers that add a space are not supported",
        )
    return token_ids, loss_mask


def response_length(loss_mask: list[int]) -> int:
    """Of a conversation as a sample: its response begins at the first token that is trained on."""
    return len(loss_mask) - loss_mask.index(1)


_Context = tuple[Any, Any, dict[str, Any], str]


def _text(messages: list[Message], context: _Context, *, generation_prompt: bool = False) -> str:
    tokenizer, tools, kwargs, where = context
    return render(messages, tokenizer, tools, kwargs, generation_prompt=generation_prompt, where=where)


def _turn_span(messages: list[Message], turn: int, text: str, context: _Context) -> tuple[int, int]:
    """Where the turn's text begins and ends in `text`.

    The prefixes of the conversation tell it where the template renders them as it renders the whole. A template that
    renders a turn by what follows (as Qwen3's, which shows reasoning in the last turns only) does not; there, the turn
    is replaced by a mark, and whatever the mark stands for is the turn.
    """
    start = _prefix_length(messages[:turn], text, context, generation_prompt=True)
    end = _prefix_length(messages[: turn + 1], text, context, generation_prompt=False)
    if start is not None and end is not None:
        return start, end
    marked = [*messages[:turn], {"role": "assistant", "content": _MARK}, *messages[turn + 1 :]]
    other = _text(marked, context)
    before, mark, after = other.partition(_MARK)
    if not mark or not text.startswith(before) or not text.endswith(after) or len(before + after) > len(text):
        raise _untellable(turn, context[3])
    if start is None:
        start = len(before)
    if end is None:
        end = len(text) - len(after)
        marker = next((t for t in special_tokens(context[0]) if after.startswith(t)), "")
        end += len(marker)
    return start, end


def _prefix_length(messages: list[Message], text: str, context: _Context, *, generation_prompt: bool) -> int | None:
    if not messages:
        return None
    try:
        prefix = _text(messages, context, generation_prompt=generation_prompt)
    except DataError:  # some templates refuse a part of a conversation
        return None
    return len(prefix) if text.startswith(prefix) else None


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of all of them, the longest first."""
    added = [str(t) for t in tokenizer.added_tokens_decoder.values()]
    return sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)


def _end_of_turn(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """How many of a turn's tokens a model would generate: through the end-of-turn token, if blank text follows it."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for i in range(len(ids), 0, -1):
        if ids[i - 1] in special:
            return i
        if str(tokenizer.decode([ids[i - 1]])).strip():
            break
    return len(ids)


def _untellable(turn: int, where: str) -> DataError:
    return DataError(
        f"the chat template hides where message {turn} (assistant) begins and ends",
        where=where,
        remedy="train on the last turn only (step_loss_mask 0 for the others), or use a simpler template",
    )
