"""Texts of byte-level tokenizers (Qwen, Llama 3, GPT-2, ...) without the tokenizer: each token is a few bytes.

The tokenizer's own `decode` takes several times as long for a whole response.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any


class ByteTexts:
    """What `tokenizer.decode` returns, for a byte-level tokenizer.

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
