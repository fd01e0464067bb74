"""Messages in the forms of OpenAI's API, as chat templates expect them. Imports no jinja, torch or transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from instep.system.run_context import PerRun

Message = dict[str, Any]
STARTED = "INSTEP_RUN_STARTED"  # in the environment of the run's engines: `RunClock.started`


class RunClock:
    """The clock of chat templates that show a date.

    Attributes:
        started: when the run began, which is the time in all of its prompts; None without a run (`instep serve`).
    """

    def __init__(self) -> None:
        self.started: str | None = os.environ.get(STARTED)


clock = PerRun(RunClock)


def checked_message(message: Any, i: int, bad: Callable[[str], Exception]) -> Message:
    """Return the message without its nulls, which mean "absent", and with content: text, or its text parts.

    Raises:
        Exception: `bad` of a text that names message `i`: it is not a message, or its content is not text.
    """
    if not isinstance(message, dict):
        raise bad(f"message {i} must be an object with role and content, not {short(message)}")
    message = {key: value for key, value in message.items() if value is not None}
    content, place = message.setdefault("content", ""), f"content of message {i} ({message.get('role')})"
    if not isinstance(content, (str, list)):
        raise bad(f"{place} must be text or a list of text parts, not {short(content)}")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, str) and not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else None
            raise bad(f"{place} has a part that is not text: {short(kind or part)}")
    return message


def with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    """Return the message with the arguments of each tool call changed, if it has any."""

    def changed(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return call | {"function": changed(call["function"])}
        return call | {"arguments": change(call["arguments"])} if "arguments" in call else call

    calls = message.get("tool_calls")
    return message | {"tool_calls": [changed(call) for call in calls]} if isinstance(calls, list) else message


def as_object(arguments: Any) -> Any:
    """Return arguments that are JSON text, as in OpenAI's API, as their object; others unchanged."""
    try:
        found = json.loads(arguments or "{}") if isinstance(arguments, str) or arguments is None else arguments
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
