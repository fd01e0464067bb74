"""How a process ended: the cause in its output, the hook that ran, and `os._exit`, which reports nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from instep.system.shared import shared_by_runs

_ERROR = re.compile(r"\b(\w*Error|ERROR)\b")
# The last line of a traceback, after vLLM's process and logger.
_RAISED = re.compile(r"(?:\(\w+ pid=\d+\) )*(?:ERROR [^\]]*\] )?([\w.]*(?:Error|Exception): .{1,400})")
_NEWS = re.compile(r"\bINFO\b")  # a log line of a healthy process
_FATAL = "Fatal Python error: "  # of Python's fault handler, which then writes the stack of each thread
_exit = os._exit


class Fault(NamedTuple):
    """The output of Python's fault handler.

    Attributes:
        what: the fault; empty without one.
        text: its line, and the stack of its thread.
        frames: file, line and name, the innermost first.
    """

    what: str
    text: str
    frames: list[tuple[str, str, str]]

    def place(self, hooks: Sequence[Sequence[str]]) -> tuple[str, str] | None:
        """Return the dotted path of the hook (of `hooks`: flag, path) that ran, and its place; None if none ran."""
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


def end_of_log(path: Path, num_bytes: int) -> list[str]:
    """Return the lines in the last bytes of a log, which may be large."""
    with path.open("rb") as log:
        log.seek(max(os.fstat(log.fileno()).st_size - num_bytes, 0))
        return log.read().decode(errors="replace").splitlines()


def cause_in(lines: Sequence[str]) -> str:
    """Return the first exception of the last block of an output; later ones often follow from it."""
    cause = ""
    for line in reversed(lines):
        if found := _RAISED.match(line):
            cause = found[1]
        elif cause and _NEWS.search(line):
            break
    return cause


def last_words(lines: Sequence[str]) -> str:
    """Return the last line of an output that names an error, else its last line."""
    return next((line for line in reversed(lines) if _ERROR.search(line)), lines[-1] if lines else "")


@shared_by_runs
def raise_for_exit() -> Callable[[], None]:
    """Let `os._exit`, which ends a process silently, raise SystemExit. A forked child keeps the original function.

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
