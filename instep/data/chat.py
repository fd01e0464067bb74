"""Conversations -> token ids and loss masks, through the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import jinja2

from instep.data.branches import Branch, Conversation, Message, Turn, whole_text
from instep.data.rendered import as_it_stands, as_rendered
from instep.data.template import TemplateTooLarge, apply_template, text_messages
from instep.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[list[int], list[int]]  # ids, and loss mask


def render(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    *,
    generation_prompt: bool,
    where: str = "",
) -> str:
    """Return the conversation as text. The template does not see `step_loss_mask`, a key of instep.

    Raises:
        DataError: the template refuses the messages, or the content of one is not text.
        CheckpointError: there is no template, or it computes too much (`template.py`).
    """
    clean = [{k: v for k, v in message.items() if k != "step_loss_mask"} for message in messages]
    try:
        text = apply_template(
            tokenizer,
            clean,
            where,
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **(template_kwargs or {}),
        )
    except TemplateTooLarge as error:
        remedy = "check its chat_template before you use this checkpoint: it computes without end"
        raise CheckpointError(str(error), where=where, remedy=remedy) from error
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        if tokenizer.chat_template is None:
            remedy = "give one: --chat-template FILE"
            raise CheckpointError("the tokenizer has no chat template", where=where, remedy=remedy) from error
        roles = ", ".join(str(m.get("role")) for m in messages)
        what = f"the chat template refuses the messages (roles {roles}): {error}"
        remedy = "fix the row, or use a checkpoint whose template knows these roles"
        raise DataError(what, where=where, remedy=remedy) from error
    return str(text)


def conversation_samples(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None = None,
    *,
    loss_mask_type: str = "qwen",
    template_kwargs: dict[str, Any] | None = None,
    where: str = "",
) -> list[Tokens]:
    """Return the samples of a conversation: token ids, and a loss mask of the same length, 1 where a turn is trained.

    The trained tokens of a turn are those that a model would generate after the generation prompt, through its
    end-of-turn token. The tokens before it are exactly the ids that an engine gets for the messages before it. A
    conversation makes several samples if its template writes a turn differently when others follow, or its tokenizer
    joins it with them (`branches.py`). Each turn is trained in one of them. A turn with `step_loss_mask: 0` is not
    trained.

    `loss_mask_type` has slime's names. `qwen` and `qwen3` work as above. With `qwen3_5` there is one sample, the
    conversation as the template finally renders it, and a turn is trained as it is there. With `distill_qwen` only the
    last message is trained. Its content is as in the data, whatever the template would drop of it.

    Raises:
        DataError: no trainable token, or a template that hides where a turn begins and ends.
    """
    messages = text_messages(tokenizer, messages, where)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("step_loss_mask", 1)]
    if loss_mask_type == "distill_qwen":
        turns = [i for i in turns if i == len(messages) - 1]
    if not turns:
        remedy = "add an assistant message with step_loss_mask 1, or skip such rows with --skip-bad-rows"
        raise DataError("the conversation has no assistant turn to train on", where=where, remedy=remedy)
    text_of = partial(render, tokenizer=tokenizer, tools=tools, template_kwargs=template_kwargs, where=where)
    special = special_tokens(tokenizer)
    if loss_mask_type == "distill_qwen":
        branches: Iterable[Branch] = [as_it_stands(messages, text_of, special, where)]
    elif loss_mask_type == "qwen3_5":
        branches = [as_rendered(messages, turns, text_of, special, where)]
    else:
        branches = Conversation(messages, text_of, special, where).branches(turns)
    exact = loss_mask_type != "qwen3_5"
    samples = [sample for branch in branches for sample in _tokenized(branch, tokenizer, where, exact=exact)]
    samples = [(ids, mask) for ids, mask in samples if any(mask)]
    if not samples:
        what = "the conversation has no trainable token: its assistant turns are empty"
        remedy = "fill its assistant turns, or skip such rows with --skip-bad-rows"
        raise DataError(what, where=where, remedy=remedy)
    return samples


def tokenize_conversation(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, tools: Any = None, *, where: str = "", **how: Any
) -> Tokens:
    """Return the only sample of a conversation, as in `conversation_samples`.

    Raises:
        DataError: as there, or there are several.
    """
    samples = conversation_samples(messages, tokenizer, tools, where=where, **how)
    if len(samples) > 1:
        raise DataError(
            f"the conversation becomes {len(samples)} samples: its chat template writes a turn differently when others "
            "follow, or its tokenizer joins it with them",
            where=where,
            remedy="set step_loss_mask 0 for all turns but the last, or use --loss-mask-type qwen3_5, which takes all "
            "turns as the whole conversation shows them",
        )
    return samples[0]


def _tokenized(branch: Branch, tokenizer: PreTrainedTokenizerBase, where: str, *, exact: bool) -> list[Tokens]:
    """Return the samples of a branch, with turns tokenized separately, as a model makes them.

    There is one, or, with `exact`, several if the ids of a prompt do not begin with those of the turns in it.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    joined = _joined(branch, encode, lambda ids, turn, prompt: ids + encode(turn.before))
    if exact and len(branch) > 1:  # the last prompt contains all others
        (ids, mask, _), last = joined[0], branch[-1]
        end = len(mask) - mask[::-1].index(1) - len(encode(last.text)) if any(mask) else 0
        if encode(whole_text(branch[:-1]) + last.before) != ids[:end]:
            joined = _joined(branch, encode, lambda ids, turn, prompt: encode(prompt))
    for ids, mask, text in joined:
        mask[:1] = [0]  # nothing predicts the first token
        if ids != (whole := encode(text)) and tokenizer.decode(ids) != tokenizer.decode(whole):
            what = "the conversation's turns cannot be tokenized one by one: their tokens do not give its text"
            remedy = "use a byte-level tokenizer; sentencepiece tokenizers that add a space are not supported"
            raise DataError(what, where=where, remedy=remedy)
    return [(ids, mask) for ids, mask, _ in joined]


def _joined(
    branch: Branch, encode: Callable[[str], list[int]], prompt_ids: Callable[[list[int], Turn, str], list[int]]
) -> list[tuple[list[int], list[int], str]]:
    """Return the ids, mask and text of a branch's turns in sequence.

    They restart wherever the ids of a prompt do not continue the ids so far. `prompt_ids` gets the ids so far, the turn
    and the text of its prompt.
    """
    ids, mask, text, rest = list[int](), list[int](), "", ""
    out = []

    def close() -> None:
        blanks = encode(rest)
        out.append((ids + blanks, mask + [0] * len(blanks), text + rest))

    for turn in branch:
        prompt = prompt_ids(ids, turn, text + turn.before)
        if prompt[: len(ids)] != ids:
            close()
            mask = []
        answer = encode(turn.text)
        mask += [0] * (len(prompt) - len(mask)) + [1] * len(answer)
        ids, text, rest = prompt + answer, text + turn.before + turn.text, turn.rest
    close()
    return out


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of all special tokens, the longest first."""
    added = [str(t) for t in tokenizer.added_tokens_decoder.values()]
    return sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
