"""`instep serve` with real tokenizers: pieces of streams, and stop strings that end inside tokens and characters."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from instep.data.tokenizer import ByteTexts, byte_texts
from tests.e2e.test_serve import Server
from tests.real.folders import make_folder, reciting_model
from tests.real.test_texts import ids_of

# The model says as much of it as has no token twice.
TEXT = (
    "Hi \U0001f469\u200d\U0001f680, \u4f60\u597d\u3002 \u092e\u0938\u094d cafe\u0301\tx \U0001f1ef\U0001f1f5 \ud55c"
    "\u2028\r\n \u0e19\u0e49 \u00fcber \U00020000"
)
ASKED = [{"role": "user", "content": "?"}]


def broken_tokens(table: ByteTexts, size: int) -> dict[int, str]:
    """Tokens with parts of characters, and their texts."""
    texts = {i: table.decode([i], skip_special_tokens=False) for i in range(size)}
    return {i: text for i, text in texts.items() if "\ufffd" in text}


def parted(table: ByteTexts, broken: dict[int, str]) -> list[int]:
    """Two tokens: text with the beginning of a character, and the end of that, with more text if there is such."""
    first = [i for i, text in broken.items() if text[0] != "\ufffd" and text.index("\ufffd") == len(text) - 1]
    first.sort(key=lambda i: not broken[i][:-1].strip().isalpha())
    second = [i for i, text in broken.items() if text.startswith("\ufffd")]
    second.sort(key=lambda i: -len(broken[i].strip("\ufffd")))
    pairs = ([i, j] for i in first for j in second)
    return next(pair for pair in pairs if "\ufffd" not in table.decode(pair, skip_special_tokens=False))


class Reciting:
    """A server of a model that says what is known.

    Attributes:
        ids: all that it says after the token `start`, with which prompts of the chat template end.
    """

    def __init__(self, name: str, tokenizer: Any, server: Server, said: list[int]):
        self.name, self.tokenizer, self.server, (self.start, *self.ids) = name, tokenizer, server, said
        self.text: str = tokenizer.decode(self.ids, skip_special_tokens=True)

    def complete(self, prompt: list[int], **more: Any) -> Any:
        more = {"temperature": 0, "max_tokens": 100, "extra_body": {"return_token_ids": True}, **more}
        return self.server.client.completions.create(model=self.server.model, prompt=prompt, **more)


@pytest.fixture(scope="module")
def reciting(name: str, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reciting]:
    start = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)[-1]
    text = ""
    for character in TEXT:
        ids = [start, *ids_of(tokenizer, text + character)]
        text += character if len(set(ids)) == len(ids) else ""
    ids = [start, *ids_of(tokenizer, text)]
    table = byte_texts(tokenizer)
    assert table is not None
    broken = {i: text for i, text in broken_tokens(table, len(tokenizer)).items() if i not in ids}
    said = [*ids, *parted(table, broken), tokenizer.eos_token_id]
    root = tmp_path_factory.mktemp("reciting")
    make_folder(name, root / "hf", reciting_model(name, said, sorted(broken.keys() - {*said})))
    with Server(root, "--rollout-backend", "embedded", "--rollout-num-gpus", "1") as server:
        yield Reciting(name, tokenizer, server.wait_for("Ctrl-C ends it"), said)
        assert server.end() == 0, server.text


def pieces_of(stream: Any) -> list[str]:
    return [choice.text for chunk in stream for choice in chunk.choices]


def test_pieces_of_a_stream_are_whole_characters(reciting: Reciting) -> None:
    assert {"\u200d", "\u4f60", "\ud55c"} <= set(reciting.text) and "\ufffd" not in reciting.text
    asked: dict[str, Any] = {"model": reciting.server.model, "messages": ASKED, "temperature": 0}
    whole = reciting.server.client.chat.completions.create(**asked).choices[0]
    assert whole.message.content == reciting.text and whole.finish_reason == "stop"
    stream = reciting.server.client.chat.completions.create(**asked, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == reciting.text and not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 14


def test_a_stream_of_broken_characters_is_the_whole_answer(reciting: Reciting) -> None:
    other = next(i for i in range(1000, 2000) if i not in reciting.ids)  # after which any token may come
    for seed in range(4):
        more: dict[str, Any] = {"temperature": 1, "seed": seed, "max_tokens": 24}
        whole = reciting.complete([other], **more).choices[0]
        assert whole.text == reciting.tokenizer.decode(whole.token_ids, skip_special_tokens=True)
        assert "".join(pieces_of(reciting.complete([other], stream=True, **more))) == whole.text
        assert whole.text.count("\ufffd") > 4


def test_a_stop_string_ends_the_response_with_the_token_that_completes_it(reciting: Reciting) -> None:
    """Also within that token, or where it holds the beginning of the next character, too."""
    decode, ids, text = reciting.tokenizer.decode, reciting.ids, reciting.text
    stops = sorted({text[i : i + n] for i in range(len(text)) for n in (1, 2, 4)})
    before = [decode(ids[:k]).rstrip("\ufffd") for k in range(len(ids))]  # what has been said as whole characters
    ends = {stop: next(k for k in range(len(ids)) if stop in before[k]) for stop in stops}
    within = [stop for stop, k in ends.items() if not before[k].endswith(stop)]
    of_parts = [stop for stop, k in ends.items() if "\ufffd" in decode(ids[k - 1 : k])]
    begun = [stop for stop, k in ends.items() if decode(ids[:k]).endswith("\ufffd")]
    assert len(within) > 5 and len(of_parts) > 5 and begun

    def check(stop: str) -> None:
        told = text[: text.index(stop)]
        (choice,) = reciting.complete([reciting.start], stop=[stop]).choices
        assert (choice.token_ids, choice.text) == (ids[: ends[stop]], told), stop
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        assert "".join(pieces_of(reciting.complete([reciting.start], stop=[stop], stream=True))) == told

    with ThreadPoolExecutor(4) as pool:  # about three of each
        list(pool.map(check, [stop for kind in (within, of_parts, begun) for stop in kind[:: 1 + len(kind) // 3]]))
