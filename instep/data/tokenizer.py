"""The tokenizer of a checkpoint, one for the whole process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from instep.checkpoints.remote_code import own_code_named
from instep.errors import CheckpointError, ConfigError
from instep.system.importing import first_import
from instep.system.run_context import cached_per_run

if TYPE_CHECKING:
    from instep.arguments.settings import HookSettings, Settings

_one = threading.Lock()  # transformers imports its names on access, which two threads must not do at once


def tokenizer_of(args: HookSettings | Settings) -> Any:
    """Return the tokenizer of `--hf-checkpoint`, with the template of `--chat-template`."""
    return load_tokenizer(str(args.hf_checkpoint), args.trust_remote_code, args.chat_template_text)


@cached_per_run
def load_tokenizer(path: str, trust_remote_code: bool, chat_template: str | None = None) -> Any:
    """Return the tokenizer of a Hugging Face checkpoint, loaded once in a run: a later run may find it replaced.

    Args:
        chat_template: the text of a template that replaces the checkpoint's.

    Raises:
        CheckpointError: there is no tokenizer, or it is Python code of the checkpoint that is not trusted.
    """
    try:
        with _one, own_code_named(path, "tokenizer"), first_import("transformers.models.auto.tokenization_auto"):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"no tokenizer could be loaded: {error}", where=path, remedy="set --hf-checkpoint to one with a tokenizer"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def text_ids(tokenizer: Any, text: str, add_bos: bool = False) -> list[int]:
    """Return the token ids of a text without special tokens; `add_bos` puts a missing begin-of-text token first.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bos = tokenizer.bos_token_id
    if add_bos and bos is None:
        what = f"the tokenizer of {tokenizer.name_or_path} has no begin-of-text token"
        raise ConfigError(what, where="--add-bos-token", remedy="remove the flag")
    return [bos, *ids] if add_bos and ids[:1] != [bos] else ids


def end_tokens(tokenizer: Any, listed: int | list[int] | None) -> tuple[frozenset[int], list[int]]:
    """Return the ids that end a response, in vLLM, too, and the listed ids that are left out: not special tokens.

    They are the tokenizer's own, and those of the generation config (made from config.json if there is no file).
    """
    ids = {listed} if isinstance(listed, int) else set(listed or ())
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    return frozenset((ids & special) | ({tokenizer.eos_token_id} - {None})), sorted(ids - special)
