"""A sample as turns of a conversation: messages of the prompt, then what the model wrote and what tools answered."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Turn = dict[str, Any]

# Where a message begins in a prompt that its template has made text: ChatML, Llama 3, Gemma.
_MESSAGE = re.compile(
    r"<\|im_start\|>(\w+)\n|<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*|<start_of_turn>(\w+)\n", re.ASCII
)
_END = re.compile(r"(<\|im_end\|>|<\|eot_id\|>|<end_of_turn>)\s*$")
_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|$)", re.S)


def turns_of(row: Mapping[str, Any]) -> list[Turn]:
    """Return the turns of a row of samples.jsonl: `role`, `text`, and for logged tokens of the response `start` and
    `end`, their numbers.

    Tokens that are not trained on are a turn of their own, "not trained on": a tool's answer, or one that a mask takes
    out. A call within the model's text is a turn "tool call".
    """
    return [*_prompt(prompt_of(row)), *_response(row)]


def prompt_of(row: Mapping[str, Any]) -> Any:
    """Return the prompt of a row. In a conversation of the data (SFT), the last message is the response."""
    prompt = row.get("prompt")
    return prompt[:-1] if "loss" in row and isinstance(prompt, list) and _role(prompt[-1:]) == "assistant" else prompt


def _prompt(prompt: Any) -> Iterator[Turn]:
    if isinstance(prompt, list):
        for message in prompt:
            known = message if isinstance(message, dict) else {"content": message}
            yield {"role": _role([message]), "text": text_of(known.get("content"))}
            for call in known.get("tool_calls") or ():
                yield {"role": "tool call", "text": text_of(call)}
        return
    text = text_of(prompt)
    found = list(_MESSAGE.finditer(text))
    if not found or text[: found[0].start()].strip():
        before = text[: found[0].start()] if found else text
        yield {"role": "prompt", "text": before}
    for match, following in itertools.zip_longest(found, found[1:]):
        end = following.start() if following else len(text)
        content = _END.sub("", text[match.end() : end])
        if content:
            yield {"role": next(filter(None, match.groups())), "text": content}


def _role(messages: Sequence[Any]) -> str:
    return str(messages[0].get("role", "?")) if messages and isinstance(messages[0], dict) else "?"


def _response(row: Mapping[str, Any]) -> Iterator[Turn]:
    tokens = row.get("tokens") or {}
    texts: Sequence[str] = tokens.get("texts") or ()
    if not texts:
        yield {"role": "model", "text": text_of(row.get("response"))}
        return
    start = 0
    for trained, part in itertools.groupby(tokens["loss_mask"]):
        end = start + len(list(part))
        if trained:
            yield from _calls(texts, start, end)
        else:
            yield _turn("not trained on", texts, start, end)
        start = end


def _calls(texts: Sequence[str], start: int, end: int) -> Iterator[Turn]:
    """Yield the model's text from token `start` to `end`, with its calls apart."""
    base, begins = start, [0, *itertools.accumulate(len(text) for text in texts[start:end])]  # in characters
    for match in _CALL.finditer("".join(texts[start:end])):
        first = base + bisect.bisect_right(begins, match.start()) - 1
        last = base + bisect.bisect_left(begins, match.end())
        if start < first:
            yield _turn("model", texts, start, first)
        yield _turn("tool call", texts, max(start, first), last)
        start = last
    if start < end:
        yield _turn("model", texts, start, end)


def _turn(role: str, texts: Sequence[str], start: int, end: int) -> Turn:
    return {"role": role, "text": "".join(texts[start:end]), "start": start, "end": end}


def text_of(value: Any) -> str:
    """Return a text as it is, and another value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
