"""Rollouts of several turns under the chat templates of published models that TRL 1.16 brings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from instep.errors import DataError
from tests.chat import make_tokenizer
from tests.next_turns import arguments, roll_out, text_of

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob(".venv-trl-1.16/lib/python*/site-packages/trl/chat_templates/*.jinja"))
NAMES = re.compile(r"<\|[^<>\s{}']{1,40}>|<[^<>\s{}']{1,40}\|>|<\uff5c[^<>{}']{1,40}\uff5c>|</?(?:start|end)_of_turn>")
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "sum", "parameters": {}}}]
USER = {"role": "user", "content": "1 + 1?"}
THOUGHT = "<think>\nhm\n</think>\n\n"


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


TALKS = {
    "plain": [USER, said("It is 2."), USER, said("Yes."), USER, said("Bye.")],
    "reasoning": [USER, said(THOUGHT + "It is 2."), USER, said(THOUGHT + "Yes."), USER, said("Bye.")],
    "tool": [USER, said("", tool_calls=[CALL]), {"role": "tool", "content": "4711", "tool_call_id": "c1"}, said("2")],
}


def tokenizer_with(file: Path) -> Any:
    text = file.read_text()
    tokenizer = make_tokenizer(sorted({*NAMES.findall(text), "<bos>", "[gMASK]", "<sop>"}))
    tokenizer.bos_token, tokenizer.chat_template = "<bos>", text
    return tokenizer


@pytest.mark.skipif(not FILES, reason="`instep install trl` makes .venv-trl-1.16")
@pytest.mark.parametrize("talk", TALKS)
def test_every_prompt_is_what_the_template_makes_oracle(talk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compared with a whole render in `roll_out`; a few templates refuse such a conversation."""
    num_samples, refused = {}, []
    tools = TOOLS if talk == "tool" else None
    for file in FILES:
        tokenizer = tokenizer_with(file)
        ends = [str(token) for token in tokenizer.all_special_tokens]
        ends += [str(token) for token in tokenizer.added_tokens_decoder.values()]
        with monkeypatch.context() as patch:
            try:
                text_of(tokenizer, TALKS[talk], tools, prompt=False)
                args = arguments(patch, tokenizer)
                num_samples[file.stem] = len(roll_out(args, tokenizer, TALKS[talk], tools, ends, blanks=False))
            except (DataError, TemplateError, TypeError) as error:
                refused.append(f"{file.stem}: {error!r:.200}")
    assert len(num_samples) > 50, refused
    extended = {"tool": 40, "plain": 40, "reasoning": 30}[talk]
    assert list(num_samples.values()).count(1) > extended and max(num_samples.values()) > 1
