"""Texts of real tokenizers: their ids are the publishers', and the table of byte texts is their `decode`."""

from __future__ import annotations

import asyncio
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.data.tokenizer import byte_texts
from instep.rollout.tokens import decode, token_texts
from tests.real.templates import TEXTS

SAID = "Hello! \u6bd5\u8001\u5e08\uff011 + 1 = 2 \u0120\u00d1\u0124\u00d0\u00b2\u00d1\u012c\u00d1\u0122"
# What the package's documentation says of SAID.
OF_QWEN = [9419, 0, 220, 97169, 97621, 6115, 16, 478, 220, 16, 283, 220, 17, 9551, 254, 68933, 128, 97, 91914, 28495]
OF_QWEN += [68933, 128, 105, 68933, 128, 95]
SPECIAL = {
    "deepseek": {"<\uff5cUser\uff5c>": 128803, "<think>": 128821},
    "qwen3": {"<|im_end|>": 151645, "<tool_call>": 151657, "</think>": 151668},
    "qwen3.6": {"<|im_start|>": 248045, "<think>": 248068, "</think>": 248069},
    "mistral": {"[INST]": 3, "[TOOL_CALLS]": 9, "[/SYSTEM_PROMPT]": 18, "<SPECIAL_999>": 999},
}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_ids_are_the_publishers(name: str, tokenizer: Any) -> None:
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL[name]} == SPECIAL[name]
    assert name != "qwen3.6" or ids_of(tokenizer, SAID) == OF_QWEN
    normal = tokenizer.backend_tokenizer.normalizer
    for text in TEXTS:
        assert tokenizer.decode(ids_of(tokenizer, text)) == (normal.normalize_str(text) if normal else text)


def test_the_table_of_byte_texts_is_decode(tokenizer: Any) -> None:
    """8,000 random sequences: of any tokens, of those that are parts of characters or were added, and of texts."""
    table, rng, size = byte_texts(tokenizer), random.Random(0), len(tokenizer)
    assert table is not None
    parts = [i for i in range(size) if "\ufffd" in table.decode([i], skip_special_tokens=False)]
    parts += tokenizer.added_tokens_decoder
    assert len(parts) > 800
    texts = [i for text in TEXTS for i in ids_of(tokenizer, text)]
    kinds: list[Callable[[], int]] = [lambda: rng.randrange(size), lambda: rng.choice(parts), lambda: rng.choice(texts)]
    num_broken = 0
    for number in range(8000):
        draw = kinds[number % 4 % 3]
        ids = [draw() if rng.random() < 0.8 else kinds[0]() for _ in range(rng.randrange(40))]
        skip = number % 8 < 4
        text = table.decode(ids, skip_special_tokens=skip)
        assert text == tokenizer.decode(ids, skip_special_tokens=skip), ids
        num_broken += "\ufffd" in text
    assert num_broken > 2000


def test_texts_of_tokens_join_to_the_text(folder: Path, tokenizer: Any) -> None:
    args = Namespace(hf_checkpoint=folder, trust_remote_code=False, chat_template_text=None)
    padded = len(tokenizer) + 3  # models have more rows than their tokenizers have tokens
    for text in TEXTS:
        ids = ids_of(tokenizer, text)
        assert "".join(token_texts(args, ids)) == tokenizer.decode(ids)
        assert asyncio.run(decode(args, [*ids, padded], skip_special_tokens=True)) == tokenizer.decode(ids)
