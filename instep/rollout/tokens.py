"""Text to token ids and back, with one tokenizer per checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from instep.data.byte_texts import ByteTexts, byte_texts
from instep.data.chat import render, special_tokens
from instep.data.dataset import require_chat_template
from instep.data.tokenizer import load_tokenizer
from instep.errors import DataError
from instep.types import Sample

if TYPE_CHECKING:
    from instep.arguments.settings import Settings

_TURN = "\ue001"  # private use: stands for a turn of the model
MAX_TOKENS_INLINE = 256  # the transfer to a thread and back takes longer than to decode so many
_decoder = ThreadPoolExecutor(1, thread_name_prefix="detokenize")


def tokenizer_of(args: Settings) -> Any:
    """The tokenizer of `--hf-checkpoint`."""
    return load_tokenizer(str(args.hf_checkpoint), args.trust_remote_code)


def forget_tokenizers() -> None:
    """Let another run in this process read its tokenizer anew: the checkpoint may have been replaced."""
    for cached in (load_tokenizer, _encode, _byte_texts):
        cached.cache_clear()


def without_end(args: Settings, response: str) -> str:
    """The text of a response without the special tokens that it ends with (`<|im_end|>`, ...)."""
    special = tuple(tokenizer_of(args).all_special_tokens)
    while (cut := next((t for t in special if t and response.endswith(t)), "")) or response != response.rstrip():
        response = response.removesuffix(cut).rstrip()
    return response


def where_of(sample: Sample) -> str:
    """The file and line of the sample's prompt if they are known, else its group; for errors."""
    return str(sample.extra.get("where", f"group {sample.group_index}"))


def prompt_ids(args: Settings, sample: Sample) -> list[int]:
    """Token ids of the sample's prompt: those in `tokens`, else of its text, or of its messages by chat template."""
    if sample.tokens:
        return list(sample.tokens[: sample.prompt_length])
    text, where = sample.prompt, where_of(sample)
    if not isinstance(text, str):
        tokenizer, kwargs = require_chat_template(tokenizer_of(args)), args.apply_chat_template_kwargs
        text = render(text, tokenizer, sample.metadata.get("tools"), kwargs, generation_prompt=True, where=where)
    ids = _encode(str(args.hf_checkpoint), args.trust_remote_code, text)
    if not ids:
        raise DataError("the prompt has no tokens", where=where, remedy="remove the row")
    return list(ids)


@functools.lru_cache(maxsize=1024)  # the samples of a group have one prompt
def _encode(path: str, trust_remote_code: bool, text: str) -> tuple[int, ...]:
    return tuple(load_tokenizer(path, trust_remote_code)(text, add_special_tokens=False)["input_ids"])


def next_turn_ids(args: Settings, messages: list[dict[str, Any]]) -> list[int]:
    """Token ids between two turns of the model: `messages` (a tool's answer, a user's words) in the chat template.

    They begin after the end-of-turn token that the model has sampled and end where its next turn begins, so that
    `sample.append_response_tokens(ids, trainable=False)` makes the next prompt and no token is tokenized again. Names
    of special tokens are removed from the contents, because they would become these tokens.

    Raises:
        DataError: the template refuses the messages, or ends a turn with no special token.
    """
    tokenizer, kwargs = tokenizer_of(args), args.apply_chat_template_kwargs
    special = special_tokens(tokenizer)
    messages = [{**message, "content": _without(special, str(message["content"]))} for message in messages]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}, *messages]
    text = render(turns, tokenizer, None, kwargs, generation_prompt=True, where="next_turn_ids").partition(_TURN)[2]
    end = next((token for token in special if text.startswith(token)), None)
    if end is None:
        raise DataError(
            f"the chat template ends a turn of the model with no special token, but with {text[:20]!r}",
            where="next_turn_ids",
            remedy="make the tokens between two turns yourself, as the model's template writes them",
        )
    return list(_encode(str(args.hf_checkpoint), args.trust_remote_code, text.removeprefix(end)))


def _without(names: list[str], text: str) -> str:
    while any(name in text for name in names):  # a removal may join the parts of another name
        for name in names:
            text = text.replace(name, "")
    return text


def token_texts(args: Settings, ids: list[int]) -> list[str]:
    """The text of each token, special ones too; a character of several tokens is the text of the last of them."""
    tokenizer = tokenizer_of(args)
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
    """The text of `ids`; many are decoded in a thread, because the tokenizer then releases the interpreter lock."""
    if (texts := _byte_texts(str(args.hf_checkpoint), args.trust_remote_code)) is not None:
        with contextlib.suppress(IndexError):  # a model may have more rows than its tokenizer has tokens
            return texts.decode(ids, skip_special_tokens=skip_special_tokens)
    tokenizer = tokenizer_of(args)
    work = functools.partial(tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)
    if len(ids) <= MAX_TOKENS_INLINE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_decoder, work)


@functools.cache
def _byte_texts(path: str, trust_remote_code: bool) -> ByteTexts | None:
    return byte_texts(load_tokenizer(path, trust_remote_code))


def stop_string(text: str, before_last: str, stops: str | Sequence[str]) -> str | None:
    """The stop string that the last token of a response completed, for an engine that does not report it.

    Args:
        text: the text of the whole response.
        before_last: the text of all its tokens but the last.
    """
    whole = len(before_last.rstrip("\ufffd"))  # half a character is no text yet
    for stop in [stops] if isinstance(stops, str) else stops:
        if (at := text.rfind(stop)) >= 0 and at + len(stop) > whole:
            return stop
    return None


def trim_stop(text: str, stop: str, start: int = 0, kept: int = 0) -> str:
    """`text` up to the stop string that ended it, searched from `start` on, with the first `kept` characters of it."""
    at = text.find(stop, max(0, start))
    return text if at < 0 else text[: at + kept]
