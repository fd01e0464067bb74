"""The turns of a conversation as the chat template finally renders it, or as they are in the data.

No engine has seen exactly the text before such a turn: the template may have dropped reasoning from it since.
"""

from __future__ import annotations

from instep.data.branches import Branch, Message, Render, Turn, ended, window
from instep.errors import DataError

_MARK = "\ue000"  # private use: in no conversation


def as_rendered(messages: list[Message], turns: list[int], text_of: Render, special: list[str], where: str) -> Branch:
    """Return the turns `turns` (indices of messages) of a conversation that is rendered once, as a whole.

    The place of a turn is found in a window of the conversation, and verified in the whole text. If that fails, it is
    found in the whole conversation.

    Raises:
        DataError: the template hides where a turn begins and ends.
    """
    text = text_of(messages, generation_prompt=False)
    branch: Branch = []
    end = 0
    for turn in turns:
        found = _in_window(messages, branch[-1].index, turn, text_of, special) if branch else None
        if found is None or not text.startswith(found[0] + found[1], end):
            span = _turn_span(messages, turn, text, text_of, special)
            start, stop = (max(span[0], end), span[1]) if span else (0, -1)
            if stop < start:
                what = f"the chat template hides where message {turn} (assistant) begins and ends"
                remedy = "set step_loss_mask 0 for it, or remove --loss-mask-type qwen3_5"
                raise DataError(what, where=where, remedy=remedy)
            found = text[end:start], text[start:stop]
        branch.append(Turn(turn, found[0], ended(found[1], special)[0]))
        end += len(found[0]) + len(branch[-1].text)
    return branch


def as_it_stands(messages: list[Message], text_of: Render, special: list[str], where: str) -> Branch:
    """Return the last message after its prompt: its content, and the template's end-of-turn token after it.

    The generation prompt may end with a tag such as `<think>`. It is not generated, so it is removed from the content.
    """
    prompt = text_of(messages[:-1], generation_prompt=True)
    rendered = text_of(messages, generation_prompt=False).rstrip()
    said, end = messages[-1], next((t for t in special if rendered.endswith(t)), "")
    content, tag = str(said["content"]), prompt[prompt.rfind("<") :].rstrip()
    opened = tag == "<think>" and "</think>" not in content
    if said.get("tool_calls") or said.get("reasoning_content") or opened:
        what = "the last message has tool calls, has its reasoning beside its content or none where the prompt opens it"
        remedy = "write <think>...</think> into the content; or use --loss-mask-type qwen3_5"
        raise DataError(what, where=where, remedy=remedy)
    if tag.startswith("<") and content.startswith(tag):
        content = content.removeprefix(tag).removeprefix(prompt[len(prompt.rstrip()) :])
    return [Turn(len(messages) - 1, prompt, content.removesuffix(end) + end)]


def _in_window(
    messages: list[Message], before: int, turn: int, text_of: Render, special: list[str]
) -> tuple[str, str] | None:
    """Return the text between the turns `before` and `turn`, and that of `turn`; None if they cannot be found.

    They are rendered with a few messages around them.
    """
    kept, earlier = window(messages, before)
    following = [i for i in range(turn + 1, len(messages)) if messages[i]["role"] in ("user", "assistant")]
    assistant = next((i for i in following if messages[i]["role"] == "assistant"), len(messages) - 1)
    user = [i for i in following if messages[i]["role"] == "user" and i > assistant][:1]
    part = [*kept, *messages[earlier : assistant + 1], *(messages[i] for i in user)]
    if len(part) >= len(messages):
        return None
    shift = len(kept) - earlier
    try:
        text = text_of(part, generation_prompt=False)
        one, other = (_turn_span(part, i + shift, text, text_of, special) for i in (before, turn))
    except DataError:
        return None
    if one is None or other is None:
        return None
    end = one[0] + len(ended(text[slice(*one)], special)[0])
    return (text[end : other[0]], text[slice(*other)]) if other[0] >= end else None


def _turn_span(
    messages: list[Message], turn: int, text: str, text_of: Render, special: list[str]
) -> tuple[int, int] | None:
    """Return where the turn's text begins and ends in `text`; None if the template hides it.

    The prefixes of the conversation give the places, unless the template renders a turn differently when others follow
    it (as Qwen3's, which shows reasoning only in the last turns). Then a mark replaces the turn, and the turn is the
    text at the mark. A turn that contains a tool's answer is hidden, too: it is not the model's.
    """
    start = _prefix_length(messages[:turn], text, text_of, generation_prompt=True)
    end = _prefix_length(messages[: turn + 1], text, text_of, generation_prompt=False)
    if start is not None and end is not None:
        return start, end
    place = _place_of(messages, turn, {"role": "assistant", "content": _MARK}, text, text_of)
    if place is None:
        return None
    if end is None:
        marker = next((t for t in special if text.startswith(t, place[1])), "")
        end = place[1] + len(marker)
    start = place[0] if start is None else start
    for i, message in enumerate(messages[turn + 1 :], turn + 1):  # some templates write a tool's answer into the turn
        if message["role"] in ("system", "user", "assistant"):
            break
        answer = _place_of(messages, i, {**message, "content": _MARK}, text, text_of)
        if answer is None or (answer[0] < end and answer[1] > start):
            return None
    return start, end


def _place_of(
    messages: list[Message], index: int, marked: Message, text: str, text_of: Render
) -> tuple[int, int] | None:
    """Return the part of `text` that the mark replaces when message `index` becomes `marked`; None if unknown."""
    try:
        changed = text_of([*messages[:index], marked, *messages[index + 1 :]], generation_prompt=False)
    except DataError:  # some templates need the tool calls
        return None
    before, mark, after = changed.partition(_MARK)
    if not mark or not text.startswith(before) or not text.endswith(after) or len(before + after) > len(text):
        return None
    return len(before), len(text) - len(after)


def _prefix_length(messages: list[Message], text: str, text_of: Render, *, generation_prompt: bool) -> int | None:
    if not messages:
        return None
    try:
        prefix = text_of(messages, generation_prompt=generation_prompt)
    except DataError:  # some templates refuse a part of a conversation
        return None
    return len(prefix) if text.startswith(prefix) else None
