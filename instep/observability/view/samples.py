"""The samples of a run, by an index of offsets: a page reads its own rows, and no others stay in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from instep.observability.samples import gaps, reward_number
from instep.observability.show_samples import reward_key
from instep.observability.view.tail import Row, Tail
from instep.observability.view.turns import turns_of

INDEX_SECONDS = 1.0  # of reading in one request; the page asks again until all is read
MOST_ROWS = 200  # of a page
EXCERPT = 240  # characters
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample in the index; None: unknown."""

    offset: int
    split: str
    rollout: int
    group: int | None
    index: int | None
    status: str
    reward: float | None
    length: int
    gap: float | None  # the largest of its trained tokens, in nats
    versions: str


_ORDERS: dict[str, Callable[[Entry], Any]] = {
    "reward": lambda e: e.reward if e.reward is not None else float("inf"),
    "-reward": lambda e: -e.reward if e.reward is not None else float("inf"),
    "length": lambda e: e.length,
    "-length": lambda e: -e.length,
    "-gap": lambda e: -e.gap if e.gap is not None else float("inf"),
    "new": lambda e: (-e.rollout, -1 if e.group is None else e.group, e.offset),
    "old": lambda e: e.offset,
}
_RANGES = {"rollout": ("from", "to")} | {name: (f"min_{name}", f"max_{name}") for name in ("reward", "length")}


class Samples:
    """The index of `samples.jsonl` in a run's folder."""

    def __init__(self, folder: Path):
        self._folder, self.tail = folder, Tail(folder / "samples.jsonl", self._entry, without="tokens")
        self._entries: list[Entry] = []
        self._lock = threading.Lock()
        self._keys: dict[str, str | None] = {}

    def page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the samples that a query asks for, and what there is to ask for.

        Args:
            query: `split`, `status`, `group`; `from` and `to` (rollouts), `min_reward`, `max_reward`, `min_length`,
                `max_length`; `order` (`reward`, `-reward`, `length`, `-length`, `-gap`, `new`, `old`), `page` from 0,
                `size`. Those that are absent or empty leave nothing out.

        Raises:
            ValueError: a value is no number.
        """
        with self._lock:
            self.tail.read_into(self._entries, INDEX_SECONDS)
            entries = list(self._entries)
        splits = list(dict.fromkeys(entry.split for entry in entries))
        split = query.get("split") or ("train" if "train" in splits else next(iter(splits), ""))
        mine = [entry for entry in entries if entry.split == split]
        found = list(filter(_condition(query), mine))
        found.sort(key=_ORDERS.get(query.get("order", ""), _ORDERS["new"]))
        size = min(int(query.get("size") or 50), MOST_ROWS)
        first = int(query.get("page") or 0) * size
        return {
            "split": split,
            "splits": splits,
            "statuses": sorted({entry.status for entry in mine}),
            "rollouts": [min((e.rollout for e in mine), default=0), max((e.rollout for e in mine), default=0)],
            "total": len(mine),
            "matching": len(found),
            "first": first,
            "read": self.tail.offset,
            "size": self.tail.size,
            "rows": [self._head(entry) for entry in found[first : first + size]],
        }

    def sample(self, offset: int) -> dict[str, Any]:
        """Return the row that begins at `offset`, with its turns, its gaps and the offsets of its group's samples.

        Raises:
            LookupError: no sample begins there.
        """
        with self._lock:
            self.tail.read_into(self._entries, INDEX_SECONDS)
            entry = next((e for e in self._entries if e.offset == offset), None)
            if entry is None:
                raise LookupError(f"no sample begins at byte {offset} of samples.jsonl")
            group = (entry.split, entry.rollout, entry.group)
            same = [e.offset for e in self._entries if (e.split, e.rollout, e.group) == group]
            same = same if entry.group is not None else [offset]
        row = self.tail.at(offset)
        return {**row, "offset": offset, "gaps": gaps(row), "turns": turns_of(row), "group": same}

    def _entry(self, offset: int, row: Row) -> Entry:
        split = str(row.get("split"))
        if split not in self._keys:
            self._keys[split] = reward_key(self._folder, split)
        versions = list(dict.fromkeys(map(str, row.get("weight_versions") or ())))
        return Entry(
            offset,
            split,
            int(row.get("rollout_id") or 0),
            _known(int, row.get("group_index")),
            _known(int, row.get("index")),
            str(row.get("status")),
            reward_number(row.get("reward"), self._keys[split]),
            int(row.get("response_length") or 0),
            _known(float, row.get("gap_max")),
            versions[0] if len(versions) == 1 else f"{versions[0]}\u2013{versions[-1]}" if versions else "",
        )

    def _head(self, entry: Entry) -> dict[str, Any]:
        """Return what a list shows of a sample."""
        row = self.tail.at(entry.offset)
        more: Row = {name: row[name] for name in ("loss", "pair", "num_samples") if name in row}
        return {**asdict(entry), **more, "response": str(row.get("response") or "")[:EXCERPT]}


def _known(kind: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else kind(value)


def _condition(query: Mapping[str, str]) -> Callable[[Entry], bool]:
    """Return a function that says whether a query asks for a sample."""
    texts = {name: query[name] for name in ("status", "group") if query.get(name)}
    ends = {name: (query.get(least), query.get(most)) for name, (least, most) in _RANGES.items()}
    ranges = {n: (float(least or "-inf"), float(most or "inf")) for n, (least, most) in ends.items() if least or most}

    def fits(entry: Entry) -> bool:
        values = {name: getattr(entry, name) for name in ranges}
        inside = (v is not None and ranges[name][0] <= v <= ranges[name][1] for name, v in values.items())
        return all(str(getattr(entry, name)) == text for name, text in texts.items()) and all(inside)

    return fits
