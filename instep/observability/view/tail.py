"""JSON-lines files that a run may still write, read from where the last look has ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

Row = dict[str, Any]
T = TypeVar("T")
# What reading raises if a file has other content than a run writes.
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


class Tail(Generic[T]):
    """One file, which need not exist.

    Args:
        of: makes of a row and its offset what `read` returns. It raises one of DAMAGE if the row is not as expected.
        without: the last key of each row, a dict; `read` need not parse it.

    Attributes:
        offset: how many bytes have been read.
        size: of the file at the last look.
        num_damaged: lines that are no such rows; they are left out.
    """

    def __init__(self, path: Path, of: Callable[[int, Row], T], without: str | None = None):
        self._of = of
        self._last = f', "{without}": {{'.encode() if without else None
        self.path, self.offset, self.size, self.num_damaged = path, 0, 0, 0
        self._inode = -1

    @property
    def place(self) -> tuple[int, int]:
        """Where the last look has ended, in which file."""
        return self._inode, self.offset

    def read(self, seconds: float = math.inf) -> tuple[bool, list[T]]:
        """Return `of` the new complete rows, reading for about so many seconds.

        The first value says that the file is another one, as after a resume: earlier rows no longer count.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())  # of the file that is read: a resume may replace it meanwhile
                self.size = status.st_size
                replaced = self._inode not in (-1, status.st_ino) or status.st_size < self.offset
                self._inode = status.st_ino
                if replaced:
                    self.offset = self.num_damaged = 0
                file.seek(self.offset)
                return replaced, self._rows(file, time.monotonic() + seconds)
        except FileNotFoundError:
            return False, []

    def read_into(self, rows: list[T], seconds: float = math.inf) -> None:
        """Add what `read` returns to `rows`, without those of another file."""
        replaced, added = self.read(seconds)
        if replaced:
            rows.clear()
        rows += added

    def _rows(self, file: Any, deadline: float) -> list[T]:
        rows = []
        for line in file:
            if not line.endswith(b"\n"):
                break  # it is being written
            try:
                rows.append(self._of(self.offset, self._head(line)))
            except DAMAGE:
                self.num_damaged += 1
            self.offset += len(line)
            if time.monotonic() > deadline:
                break
        return rows

    def _head(self, line: bytes) -> Row:
        if self._last is not None:  # never within a text, whose quotes are escaped; within a dict it makes no row
            head, found, _ = line.rpartition(self._last)
            if found:
                with contextlib.suppress(*DAMAGE):
                    return _parsed(head + b"}")
        return _parsed(line)

    def at(self, offset: int) -> Row:
        """Return the row that begins at `offset`. Raises LookupError if there is no such row."""
        with self.path.open("rb") as file:
            file.seek(offset)
            line = file.readline()
        try:
            return _parsed(line)
        except DAMAGE:
            raise LookupError(f"no row of {self.path.name} begins at {offset}") from None


def _parsed(line: bytes) -> Row:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError("it is not a JSON object")
    return row
