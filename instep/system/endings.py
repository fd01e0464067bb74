"""How a process ended: what its output says of it, which hook was at work, and `os._exit`, which says nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

_ERROR = re.compile(r"\b(\w*Error|ERROR)\b")
# The last line of a traceback, with vLLM's process and logger before it.
_RAISED = re.compile(r"(?:\(\w+ pid=\d+\) )*(?:ERROR [^\]]*\] )?([\w.]*(?:Error|Exception): .{1,400})")
_NEWS = re.compile(r"\bINFO\b")  # what a process says that is well
_FATAL = "Fatal Python error: "  # of Python's fault handler, which then writes the stack of each thread
_exit = os._exit


class Fault(NamedTuple):
    """What Python's fault handler wrote.

    Attributes:
        what: the fault; empty for none.
        text: its line and the stack of the thread that it came in.
        frames: file, line and name, the innermost first.
    """

    what: str
    text: str
    frames: list[tuple[str, str, str]]

    def place(self, hooks: Sequence[Sequence[str]]) -> tuple[str, str] | None:
        """The dotted path of the one of `hooks` (flag and path) that was at work, and where; None if none was."""
        for file, line, name in self.frames:
            for flag, path in hooks:
                module = path.rpartition(".")[0].replace(".", "/")
                if file.endswith((f"/{module}.py", f"/{module}/__init__.py")):
                    return path, f"{flag} {path}, {file}:{line} in {name}"
        return None


def fault_of(output: str) -> Fault:
    """Return the last fault in the output of a process."""
    dump = output.rpartition(_FATAL)
    if not dump[1]:
        return Fault("", "", [])
    what = dump[2].partition("\n")[0]
    stack = dump[2].partition("Current thread")[2].partition("\n\n")[0]
    frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', stack, re.MULTILINE)
    return Fault(what, f"{_FATAL}{what}\nCurrent thread{stack}", frames)


def cause_in(lines: Sequence[str]) -> str:
    """Return the first exception of the block that ends an output; those after it are often its results."""
    cause = ""
    for line in reversed(lines):
        if found := _RAISED.match(line):
            cause = found[1]
        elif cause and _NEWS.search(line):
            break
    return cause


def last_words(lines: Sequence[str]) -> str:
    """Return the last line of an output that names an error, else the last line."""
    return next((line for line in reversed(lines) if _ERROR.search(line)), lines[-1] if lines else "")


def raise_for_exit() -> Callable[[], None]:
    """Let `os._exit`, which ends a process without a word, raise SystemExit. In a forked child it acts as before.

    Returns:
        A function that undoes it.
    """
    owner = os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() != owner:
            _exit(status)
        raise SystemExit(f"os._exit({status})")

    def take_back() -> None:
        os._exit = _exit

    os._exit = leave
    return take_back
