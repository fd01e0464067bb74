"""The tokenizer of a checkpoint, one for the whole process, and the texts of its tokens."""

from __future__ import annotations

import codecs
import threading
from collections.abc import Sequence
from typing import Any

from instep.arguments.settings import HookSettings, Settings
from instep.checkpoints.remote_code import own_code_named
from instep.errors import CheckpointError, ConfigError
from instep.system.importing import first_import
from instep.system.run_context import cached_per_run

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
        what = f"no tokenizer could be loaded: {error}"
        raise CheckpointError(what, where=path, remedy="set --hf-checkpoint to one with a tokenizer") from error
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


class ByteTexts:
    """What `tokenizer.decode` returns, for a byte-level tokenizer (Qwen, Llama 3, GPT-2, ...), in a part of its time.

    Args:
        tokens: every token by its id, in the alphabet of byte-level tokenizers.
        special: the ids of special tokens.
    """

    def __init__(self, tokens: dict[int, str], special: set[int]):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        size, known = max(tokens, default=-1) + 1, {character: byte for byte, character in bytes_to_unicode().items()}
        self._whole = [_bytes_of(tokens.get(i, ""), known) for i in range(size)]  # an id without a token has no text
        self._without_special = [b"" if i in special else text for i, text in enumerate(self._whole)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `ids`; bytes that are no character become U+FFFD. Raises IndexError: an id is too big."""
        texts = self._without_special if skip_special_tokens else self._whole
        return b"".join(map(texts.__getitem__, ids)).decode("utf-8", errors="replace")

    def each(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, special tokens too. A character of several tokens belongs to the last one."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        return [decode(self._whole[i], n == len(ids)) for n, i in enumerate(ids, 1)]


def byte_texts(tokenizer: Any) -> ByteTexts | None:
    """Return the texts of a Hugging Face tokenizer; None if it is not byte-level, or changes texts in another way."""
    from tokenizers.decoders import ByteLevel
    from transformers import PreTrainedTokenizerFast

    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    own = any(getattr(type(tokenizer), n, None) is not getattr(PreTrainedTokenizerFast, n) for n in _METHODS)
    if own or tokenizer.clean_up_tokenization_spaces or type(getattr(backend, "decoder", None)) is not ByteLevel:
        return None
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    return ByteTexts({i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}, special)


_METHODS = ("decode", "_decode")


def _bytes_of(token: str, known: dict[str, int]) -> bytes:
    try:
        return bytes([known[character] for character in token])
    except KeyError:  # an added token is its own text
        return token.encode()
