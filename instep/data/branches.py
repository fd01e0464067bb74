"""The trained turns of a conversation, each after exactly the text that an engine gets as its prompt.

The prompt of a turn is the chat template's text of the messages before it, with the generation prompt. If the next
prompt begins with this prompt and the turn itself, both turns are in one text. A template may write a turn differently
once others follow it: Qwen3 drops its reasoning, others move the tools or put a tool's answer into it. Then the next
turn begins a branch, which is a separate text.

To render every prompt as a whole would take a time quadratic in the number of turns. So a turn is rendered in a window,
without the messages between the user's message and the turn before the last. What the turn adds to the turn before it
in the window, it also adds in the whole conversation. To check this, some turns of each branch are rendered as a whole
and compared: the last one, and those at a half, a quarter, ... of it. If one differs, every turn of the branch is
rendered as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from instep.errors import DataError

Message = dict[str, Any]
Render = Callable[..., str]  # (messages, *, generation_prompt) -> text


@dataclass
class Turn:
    """A turn of the assistant.

    Attributes:
        index: the index of its message.
        before: the text from the end of the previous turn in its branch to the end of its own generation prompt; for
            the first turn of a branch the whole prompt.
        text: the template's text after that, through the turn's end-of-turn token.
        rest: the template's text after that token.
    """

    index: int
    before: str
    text: str
    rest: str = ""


Branch = list[Turn]


def whole_text(branch: Branch) -> str:
    """Return the text of a branch through the end of its last turn."""
    return "".join(turn.before + turn.text for turn in branch)


class Conversation:
    """The texts of one conversation.

    Args:
        special: the texts of the special tokens; one of them ends a turn.
        where: file and line, for errors.
    """

    def __init__(self, messages: list[Message], render: Render, special: list[str], where: str = ""):
        self._messages, self._render, self._special, self._where = messages, render, special, where
        self._rendered: tuple[int, str, str] = (-1, "", "")  # the last result of `_whole`

    def branches(self, turns: list[int]) -> Iterator[Branch]:
        """Put the turns `turns` (indices of messages, in order) into as few texts as give each turn its own prompt.

        Raises:
            DataError: the template refuses a part of the conversation, or writes a turn that does not begin with its
                own generation prompt.
        """
        while turns:
            branch = self._branch(turns, windows=True)
            if not self._confirmed(branch):
                branch = self._branch(turns, windows=False)
            yield branch
            turns = turns[len(branch) :]

    def _branch(self, turns: list[int], *, windows: bool) -> Branch:
        branch = [self._turn(turns[0], *self._whole(turns[0]), 0)]
        for turn in turns[1:]:
            following = self._in_window(branch[-1], turn) if windows else None
            if following is None:
                text, (prompt, whole) = whole_text(branch), self._whole(turn)
                if not prompt.startswith(text):
                    break
                following = self._turn(turn, prompt, whole, len(text))
            branch.append(following)
        return branch

    def _confirmed(self, branch: Branch) -> bool:
        """Return whether whole renderings confirm the branch: of its last turn, of the one at its half, and so on."""
        last = len(branch) - 1
        while last > 0:
            turn, prompt = branch[last], whole_text(branch[:last]) + branch[last].before
            if self._whole(turn.index) != (prompt, prompt + turn.text + turn.rest):
                return False
            last //= 2
        return True

    def _whole(self, turn: int) -> tuple[str, str]:
        """Return the prompt of a turn, and the text of the conversation that ends with the turn.

        Raises:
            DataError: the text does not begin with the prompt, or there is nothing before the turn.
        """
        if not turn:
            what = "the conversation begins with a message of the assistant: no engine can generate it"
            remedy = "begin with a user's message, set step_loss_mask 0 for it, or use --loss-mask-type qwen3_5"
            raise DataError(what, where=self._where, remedy=remedy)
        if self._rendered[0] != turn:
            prompt = self._render(self._messages[:turn], generation_prompt=True)
            whole = self._render(self._messages[: turn + 1], generation_prompt=False)
            if not whole.startswith(prompt):
                raise DataError(
                    f"the chat template writes message {turn} (assistant) differently than after its own generation "
                    "prompt: no engine would begin that turn there",
                    where=self._where,
                    remedy="use --loss-mask-type qwen3_5, which trains turns as the template finally writes them; or, "
                    "if the content has reasoning, distill_qwen, which trains the last turn as in the data; or set "
                    "step_loss_mask 0 for it",
                )
            self._rendered = turn, prompt, whole
        return self._rendered[1:]

    def _in_window(self, before: Turn, turn: int) -> Turn | None:
        """Return the turn `turn` as it follows `before`, rendered in a window; None if that is not possible.

        The template may not extend that text or may refuse a window, or the window would be the whole conversation.
        """
        messages = self._messages
        kept, earlier = window(messages, before.index)
        if len(kept) == earlier:
            return None
        try:
            known = self._render([*kept, *messages[earlier : before.index + 1]], generation_prompt=False)
            prompt = self._render([*kept, *messages[earlier:turn]], generation_prompt=True)
            whole = self._render([*kept, *messages[earlier : turn + 1]], generation_prompt=False)
        except DataError:
            return None
        text = known.removesuffix(before.rest)
        extends = known.endswith(before.text + before.rest) and prompt.startswith(text) and whole.startswith(prompt)
        return self._turn(turn, prompt, whole, len(text)) if extends else None

    def _turn(self, turn: int, prompt: str, whole: str, start: int) -> Turn:
        """Return the turn at the end of `whole`, after a text of `start` characters."""
        return Turn(turn, prompt[start:], *ended(whole[len(prompt) :], self._special))


def ended(text: str, special: list[str]) -> tuple[str, str]:
    """Return the text of a turn through its end-of-turn token, and the template's blanks after it."""
    stripped = text.rstrip()
    end = len(stripped) if stripped.endswith(tuple(special)) else len(text)
    return text[:end], text[end:]


def window(messages: list[Message], turn: int) -> tuple[list[Message], int]:
    """Return the first messages of a window around `turn`, and the index of the message with which it continues.

    The first messages are the system's, and the user's that the turn belongs to. The window continues with the
    assistant's turn before it, or with what follows the user's message. Without a user's message nothing is left out.
    """
    head = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), 0)
    user = next((i for i in range(turn, head - 1, -1) if messages[i]["role"] == "user"), None)
    if user is None:
        return [], 0
    earlier = next((i for i in range(turn - 1, user, -1) if messages[i]["role"] == "assistant"), user + 1)
    return [*messages[:head], messages[user]], earlier
