"""The order in which the rows of one or several data sets are read. It depends only on counts of rows read."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from instep.data.dataset import Dataset, Record

MAX_SHUFFLED = 1 << 20  # rows that Python shuffles, as in slime; for more it would take seconds


class Order:
    """The rows of repeated passes over `size` rows: in file order, or with a `seed` shuffled by seed and epoch."""

    def __init__(self, size: int, seed: int | None):
        self._size, self._seed = size, seed
        self._epoch = -1
        self._rows: Any = ()

    def __getitem__(self, count: int) -> int:
        """Return the row that is read after `count` rows."""
        epoch, i = divmod(count, self._size)
        if self._seed is None:
            return i
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, np.arange(self._size)
            if self._size > MAX_SHUFFLED:
                np.random.default_rng(self._seed + epoch).shuffle(self._rows)
            else:
                random.Random(self._seed + epoch).shuffle(self._rows)
        return int(self._rows[i])


class Mixture:
    """Data sets that are read together.

    Without weights they act as one: an epoch passes over the rows of the first, then of the next, or over all of them
    in a shuffled order. With weights each has its own passes. Among the rows read so far, each data set has its share,
    to less than one row.

    The state of reading is a list of counts of rows read: one per data set, or without weights one for all.

    Args:
        seed: of the shuffled orders; None: file order.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float] | None, seed: int | None):
        self.datasets = datasets
        self._ends = list(accumulate(map(len, datasets)))
        self._shares = [w / sum(weights) for w in weights] if weights else [1.0]
        sizes = [len(d) for d in datasets] if weights else [len(self)]
        seeds = [seed if seed is None else seed + (i << 32) for i in range(len(sizes))]  # no two files share an order
        self._orders = [Order(size, one) for size, one in zip(sizes, seeds, strict=True)]

    def __len__(self) -> int:
        """Return the number of rows of all data sets."""
        return self._ends[-1]

    def start(self) -> list[int]:
        return [0] * len(self._orders)

    def next(self, counts: list[int]) -> Record:
        """Return the row after those that `counts` covers, and count it there."""
        num = sum(counts) + 1
        which = max(range(len(counts)), key=lambda i: self._shares[i] * num - counts[i])
        row = self._orders[which][counts[which]]
        counts[which] += 1
        if len(counts) == 1:
            which = bisect(self._ends, row)
            row -= self._ends[which] - len(self.datasets[which])
        return self.datasets[which][row]
