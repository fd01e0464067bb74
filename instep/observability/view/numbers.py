"""Rows of metrics.jsonl in little memory: 8 bytes for a number, and names once for all rows that have the same."""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

from instep.observability.view.tail import Row


class Numbers(NamedTuple):
    """The numbers of a row; NaN is its null."""

    step: int
    names: tuple[str, ...]
    values: array[float]

    def row(self) -> Row:
        """Return the row as it was."""
        values = (None if math.isnan(value) else value for value in self.values)
        return {"step": self.step, **dict(zip(self.names, values, strict=True))}


class Packer:
    """Make `Numbers` of the rows of one file; values that are neither numbers nor null are left out."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}

    def __call__(self, offset: int, row: Row) -> Numbers:
        step = int(row.pop("step"))
        row = {
            name: math.nan if v is None else v for name, v in row.items() if v is None or isinstance(v, (int, float))
        }
        names = tuple(row)
        return Numbers(step, self._names.setdefault(names, names), array("d", row.values()))
