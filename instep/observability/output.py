"""What a run prints goes on when nobody takes it any more: `| head` has ended, a disk is full, a terminal is closed."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_lost: list[str] = []


def lost_output() -> list[str]:
    """A sentence for each of stdout and stderr that was lost, and where it goes since."""
    return list(_lost)


@contextlib.contextmanager
def lasting_output(folder: Path) -> Iterator[None]:
    """While the block runs, stdout and stderr that cannot be written any more go on in `folder`/stdout.txt and so on.

    The descriptor itself is redirected, so that the libraries' and the interpreter's own output goes there, too.
    """
    _lost.clear()
    before = sys.stdout, sys.stderr
    lasting: list[Any] = [_Lasting(sys.stdout, "stdout", folder), _Lasting(sys.stderr, "stderr", folder)]
    sys.stdout, sys.stderr = lasting
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # somebody has closed it
            sys.stdout.flush()
        sys.stdout, sys.stderr = before


class _Lasting:
    """A text stream whose `write` and `flush` raise no OSError; all else is that of `stream` (None: it is closed)."""

    def __init__(self, stream: Any, name: str, folder: Path):
        self._stream: IO[str] = stream if stream is not None else open(os.devnull, "w")
        self._name, self._folder = name, folder

    def write(self, text: str) -> int:
        self._do(self._stream.write, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._do(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _do(self, work: Any, *args: Any) -> None:
        try:
            work(*args)
        except OSError as error:
            for path in (self._folder / f"{self._name}.txt", Path(os.devnull)):
                with contextlib.suppress(OSError):
                    self._redirect(path, error)
                    break

    def _redirect(self, path: Path, error: OSError) -> None:
        """Send the descriptor to `path`; what the stream has kept of its last lines is written there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        said = f"{self._name} was lost ({error.strerror or error}) at {time.strftime('%Y-%m-%d %H:%M:%S')}"
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{said}; from here on it is written here\n")
            file.flush()
            os.dup2(file.fileno(), self._stream.fileno())
        self._stream.flush()
        _lost.append(f"{said}; the rest of it is in {path}")
        if self._name == "stdout":
            print(f"{_lost[-1]}; the run goes on", file=sys.stderr)
