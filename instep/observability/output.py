"""Keep a run's output when its receiver is gone: `| head` ended, the disk is full, or the terminal was closed."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from instep.system.shared import shared_by_runs

_folders: list[Path] = []  # of the runs that write now
lost_output: list[str] = []  # a sentence for each lost stream (stdout, stderr), with its new place


@contextlib.contextmanager
def lasting_output(folder: Path) -> Iterator[None]:
    """Within the block, continue a broken stdout or stderr in `folder`/stdout.txt or stderr.txt.

    The descriptor itself is redirected, so that output of libraries and of the interpreter goes there, too.
    """
    _folders.append(folder)
    undo = _replace_streams()
    try:
        yield
    finally:
        undo()
        _folders.remove(folder)


@shared_by_runs
def _replace_streams() -> Callable[[], None]:
    lost_output.clear()
    before = sys.stdout, sys.stderr
    lasting: list[Any] = [s and _Lasting(s, f"{n}.txt") for s, n in zip(before, ("stdout", "stderr"), strict=True)]
    sys.stdout, sys.stderr = lasting

    def undo() -> None:
        sys.stdout, sys.stderr = before

    return undo


class _Lasting:
    """A text stream whose `write` and `flush` raise no OSError; the rest is from `stream`."""

    def __init__(self, stream: TextIO, name: str):
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        self._do(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._do(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _do(self, work: Callable[..., object], *args: str) -> None:
        try:
            work(*args)
        except OSError as error:
            ours = _folders[-1] / self._name
            said = f"{ours.stem} was lost ({error.strerror or error}) at {time.strftime('%Y-%m-%d %H:%M:%S')}"
            for path in (ours, Path(os.devnull)):
                with contextlib.suppress(OSError):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with open(path, "a", encoding="utf-8") as file:
                        print(f"{said}; from here on it is written here", file=file, flush=True)
                        os.dup2(file.fileno(), self._stream.fileno())
                    self._stream.flush()  # its buffered last lines
                    break
            lost_output.append(f"{said}; the rest of it is in {path}")
            if self._name == "stdout.txt":
                print(f"{lost_output[-1]}; the run goes on", file=sys.stderr)
