"""JSON-lines files that a run may still write, read from where the last look has ended."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Tail:
    """One file, which need not exist.

    Args:
        without: the last key of each row, a dict; `read` need not parse it.

    Attributes:
        offset: how many bytes have been read.
        size: of the file at the last look.
        num_damaged: lines that are no JSON objects; they are left out.
    """

    def __init__(self, path: Path, without: str | None = None):
        self._last = f', "{without}": {{'.encode() if without else None
        self.path, self.offset, self.size, self.num_damaged = path, 0, 0, 0
        self._inode = -1

    @property
    def place(self) -> tuple[int, int]:
        """Where the last look has ended, in which file."""
        return self._inode, self.offset

    def read(self, seconds: float = math.inf) -> tuple[bool, list[tuple[int, Row]]]:
        """Return the new complete rows with their offsets, reading for about so many seconds.

        The first value says that the file is another one, as after a resume: earlier rows no longer count.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())  # of the file that is read: a resume may replace it meanwhile
                self.size, anew = status.st_size, self._inode not in (-1, status.st_ino) or status.st_size < self.offset
                self.offset, self._inode = 0 if anew else self.offset, status.st_ino
                file.seek(self.offset)
                return anew, self._rows(file, time.monotonic() + seconds)
        except FileNotFoundError:
            return False, []

    def _rows(self, file: Any, deadline: float) -> list[tuple[int, Row]]:
        rows = []
        for line in file:
            if not line.endswith(b"\n"):
                break  # it is being written
            row = self._head(line)
            if row is not None:
                rows.append((self.offset, row))
            self.num_damaged += row is None
            self.offset += len(line)
            if time.monotonic() > deadline:
                break
        return rows

    def _head(self, line: bytes) -> Row | None:
        if self._last is not None:  # never within a text, whose quotes are escaped; within a dict it makes no row
            head, found, _ = line.rpartition(self._last)
            if found and (row := _parsed(head + b"}")) is not None:
                return row
        return _parsed(line)

    def at(self, offset: int) -> Row:
        """Return the row that begins at `offset`. Raises LookupError: none does."""
        with self.path.open("rb") as file:
            file.seek(offset)
            row = _parsed(file.readline())
        if row is None:
            raise LookupError(f"no row of {self.path.name} begins at {offset}")
        return row


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
