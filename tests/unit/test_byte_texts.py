"""The texts of byte-level tokenizers without the tokenizer are the tokenizer's own."""

import random
from argparse import Namespace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from instep.data.tokenizer import byte_texts
from instep.rollout.tokens import token_texts


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [Path(__file__).read_text(), "na\u00efve \u4f60\u597d\U0001f600 \u0142\u00f3d\u017a\n\t"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(["<|im_end|>"])
    made.add_tokens([AddedToken("<a b>"), AddedToken("\u4f60\u4eec")])  # not in the alphabet
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")


def test_texts_are_the_tokenizers(tokenizer: PreTrainedTokenizerFast) -> None:
    texts, rng = byte_texts(tokenizer), random.Random(0)
    assert texts is not None
    size = len(tokenizer)
    rows = [[rng.randrange(size) for _ in range(rng.randrange(30))] for _ in range(500)]
    rows += [[rng.choice(range(size - 3, size)) for _ in range(4)] for _ in range(20)]  # added ones
    rows.append(tokenizer.encode("na\u00efve \u4f60\u597d \U0001f600<|im_end|> <a b>\u4f60\u4eec"))
    for skip in (True, False):
        assert [texts.decode(ids, skip_special_tokens=skip) for ids in rows] == [
            tokenizer.decode(ids, skip_special_tokens=skip) for ids in rows
        ]
    with pytest.raises(IndexError):
        texts.decode([size + 5], skip_special_tokens=True)


def test_the_text_of_each_token_is_its_part_of_the_whole(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A U+FFFD may be one, and after it a character of many tokens is as whole as elsewhere."""
    texts, rng = byte_texts(tokenizer), random.Random(1)
    assert texts is not None
    rows = [tokenizer.encode("\ufffd" * n + "\U0001f600 a<|im_end|>") for n in range(5)]
    rows += [[rng.randrange(len(tokenizer)) for _ in range(20)] for _ in range(200)]
    assert all("".join(texts.each(ids)) == tokenizer.decode(ids) for ids in rows)
    monkeypatch.setattr("instep.rollout.tokens.tokenizer_of", lambda _: tokenizer)
    assert all("".join(token_texts(Namespace(), ids)) == tokenizer.decode(ids) for ids in rows)
    ids = tokenizer.encode("\u6c34a")
    assert texts.each(ids) == ["", "", "\u6c34", "a"] and texts.each(ids[:2]) == ["", "\ufffd"] and texts.each([]) == []


def test_other_tokenizers_decode_themselves(tokenizer: PreTrainedTokenizerFast) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert byte_texts(PreTrainedTokenizerFast(tokenizer_object=words)) is None
    cleaned = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, clean_up_tokenization_spaces=True)
    assert byte_texts(cleaned) is None

    class Own(PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs) -> str:
            return "mine"

    assert byte_texts(Own(tokenizer_object=tokenizer.backend_tokenizer)) is None
