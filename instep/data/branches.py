"""The turns of a conversation that are trained on, each after the very text that an engine gets as its prompt.

The prompt of a turn is what the chat template makes of the messages before it, with the generation prompt. Where the
prompt of the next turn begins with all of that and the turn itself, both stand in one text. A template may write a turn
otherwise once others follow it (Qwen3 drops its reasoning, others move the tools or put a tool's answer into it): then
the next turn begins a branch, a text of its own.

To render every prompt whole would take a time that grows with the square of the number of turns. So a turn is rendered
in a window, which leaves out what lies between the user's message and the turn before the last; what it adds to the
turn before it there is what it adds in the whole conversation. Of each branch the last turn is rendered whole, and
those at a half, a quarter, ... of it, and compared; where one differs, every turn of the branch is rendered whole.
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
        index: of its message.
        before: the text from the end of the turn before it in its branch to the end of its own generation prompt; of
            the first turn of a branch the whole prompt.
        text: what the template writes after that, through the turn's end-of-turn token.
        rest: what the template writes after that token.
    """

    index: int
    before: str
    text: str
    rest: str = ""


Branch = list[Turn]


def whole_text(branch: Branch) -> str:
    """The text of a branch through the end of its last turn."""
    return "".join(turn.before + turn.text for turn in branch)


class Conversation:
    """The texts of one conversation.

    Args:
        special: the texts of the special tokens, of which one ends a turn.
        where: file and line, for errors.
    """

    def __init__(self, messages: list[Message], render: Render, special: list[str], where: str = ""):
        self._messages, self._render, self._special, self._where = messages, render, special, where
        self._rendered: tuple[int, str, str] = (-1, "", "")  # the last one of `_whole`

    def branches(self, turns: list[int]) -> Iterator[Branch]:
        """The turns `turns` (indices of messages, in order) in as few texts as give each its own prompt.

        Raises:
            DataError: the template refuses a part of the conversation, or writes a turn that does not begin with the
                prompt that it makes for it.
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
        """Whether whole renders give what the branch says: of its last turn, of the one at its half, and so on."""
        last = len(branch) - 1
        while last > 0:
            turn, prompt = branch[last], whole_text(branch[:last]) + branch[last].before
            if self._whole(turn.index) != (prompt, prompt + turn.text + turn.rest):
                return False
            last //= 2
        return True

    def _whole(self, turn: int) -> tuple[str, str]:
        """The prompt of a turn, and the text of the conversation that ends with it.

        Raises:
            DataError: the second does not begin with the first, or there is nothing before the turn.
        """
        if not turn:
            what = "the conversation begins with a message of the assistant: no engine would be asked for it"
            remedy = "begin with a user's message, set step_loss_mask 0 for it, or take --loss-mask-type qwen3_5"
            raise DataError(what, where=self._where, remedy=remedy)
        if self._rendered[0] != turn:
            prompt = self._render(self._messages[:turn], generation_prompt=True)
            whole = self._render(self._messages[: turn + 1], generation_prompt=False)
            if not whole.startswith(prompt):
                raise DataError(
                    f"the chat template writes message {turn} (assistant) otherwise than after its own generation "
                    "prompt: no engine would be where that turn begins",
                    where=self._where,
                    remedy="take --loss-mask-type qwen3_5, which trains turns as the template writes them at last; or, "
                    "if the content has reasoning, distill_qwen, which trains the last turn as it stands there; or set "
                    "step_loss_mask 0 for it",
                )
            self._rendered = turn, prompt, whole
        return self._rendered[1:]

    def _in_window(self, before: Turn, turn: int) -> Turn | None:
        """The turn `turn` as it follows `before`; None: the template does not extend that text, or takes no window, or
        the window would be the whole conversation."""
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
        """The turn with which `whole` ends, after a text of `start` characters."""
        return Turn(turn, prompt[start:], *ended(whole[len(prompt) :], self._special))


def ended(text: str, special: list[str]) -> tuple[str, str]:
    """The text of a turn through its end-of-turn token, and the blanks that the template writes after it."""
    stripped = text.rstrip()
    end = len(stripped) if stripped.endswith(tuple(special)) else len(text)
    return text[:end], text[end:]


def window(messages: list[Message], turn: int) -> tuple[list[Message], int]:
    """The messages that a window around `turn` begins with: the system's, and the user's that the turn belongs to; and
    the index of the message with which it goes on, the turn of the assistant before it or what follows the user's.

    Where there is no user's message nothing is left out.
    """
    head = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), 0)
    user = next((i for i in range(turn, head - 1, -1) if messages[i]["role"] == "user"), None)
    if user is None:
        return [], 0
    earlier = next((i for i in range(turn - 1, user, -1) if messages[i]["role"] == "assistant"), user + 1)
    return [*messages[:head], messages[user]], earlier
