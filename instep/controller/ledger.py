"""The ledger: every group of a run is accounted for, once.

A group is issued by the data source, and then finished and consumed by a training round, buffered for later (from
where it is issued again), or dropped with a reason. `generated = consumed + dropped + buffered` is checked at every
step, so that nothing is lost and nothing is trained twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from instep.errors import RolloutError
from instep.types import Sample


class Ledger:
    """States of groups by `group_index`; closed groups are kept as a low-water mark and the few above it."""

    def __init__(self) -> None:
        self._open: dict[int, str] = {}  # group -> "issued" | "buffered"
        self._closed_below = 0
        self._closed_above: set[int] = set()
        self.num_issued = 0  # first issues; a group that comes back from the buffer is not counted again
        self.num_consumed = 0
        self.dropped: Counter[str] = Counter()

    def issue(self, groups: Iterable[Any]) -> None:
        for group in group_indices(groups):
            state = self._open.get(group)
            if state == "issued" or self._is_closed(group):
                raise _broken(group, "issued", state or "closed")
            self.num_issued += state is None
            self._open[group] = "issued"

    def adopt(self, groups: Iterable[Any]) -> None:
        """Issue the groups that a rollout function has made by itself; each needs a `group_index` of its own."""
        self.issue([g for g, i in zip(groups, group_indices(groups), strict=True) if self._is_new(i)])

    def buffer(self, groups: Iterable[Any]) -> None:
        for group in group_indices(groups):
            self._expect(group, "buffered")
            self._open[group] = "buffered"

    def consume(self, groups: Iterable[Any]) -> None:
        for group in group_indices(groups):
            self._expect(group, "consumed")
            self._close(group)
            self.num_consumed += 1

    def drop(self, groups: Iterable[Any], reason: str) -> None:
        for group in group_indices(groups):
            self._expect(group, f"dropped ({reason})")
            self._close(group)
            self.dropped[reason] += 1

    def drop_outstanding(self, reason: str) -> int:
        """Close what was issued and never came back; returns how many groups."""
        left = [group for group, state in self._open.items() if state == "issued"]
        for group in left:
            self._close(group)
        if left:
            self.dropped[reason] += len(left)
        return len(left)

    @property
    def num_buffered(self) -> int:
        return sum(state == "buffered" for state in self._open.values())

    @property
    def num_outstanding(self) -> int:
        return len(self._open) - self.num_buffered

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    def check(self) -> None:
        """Raise if the books do not balance."""
        accounted = self.num_consumed + self.num_dropped + self.num_buffered + self.num_outstanding
        if accounted != self.num_issued:
            raise RolloutError(f"the ledger does not balance: {self.state_dict()}", remedy="please report this")

    def state_dict(self) -> dict[str, Any]:
        return {
            "open": {str(k): v for k, v in self._open.items()},
            "closed_below": self._closed_below,
            "closed_above": sorted(self._closed_above),
            "num_issued": self.num_issued,
            "num_consumed": self.num_consumed,
            "dropped": dict(self.dropped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._open = {int(k): v for k, v in state["open"].items()}
        self._closed_below, self._closed_above = state["closed_below"], set(state["closed_above"])
        self.num_issued, self.num_consumed = state["num_issued"], state["num_consumed"]
        self.dropped = Counter(state["dropped"])

    def _is_new(self, group: int) -> bool:
        return group not in self._open and not self._is_closed(group)

    def _is_closed(self, group: int) -> bool:
        return group < self._closed_below or group in self._closed_above

    def _expect(self, group: int, wanted: str) -> None:
        state = self._open.get(group)
        if state != "issued":
            raise _broken(group, wanted, state or ("closed" if self._is_closed(group) else "never issued"))

    def _close(self, group: int) -> None:
        del self._open[group]
        self._closed_above.add(group)
        while self._closed_below in self._closed_above:
            self._closed_above.remove(self._closed_below)
            self._closed_below += 1


class LedgeredDataSource:
    """The data source that rollout functions get: the run's own, with every group entered in the ledger."""

    def __init__(self, source: Any, ledger: Ledger):
        self.source, self.ledger = source, ledger

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        groups = self.source.get_samples(num_groups)
        self.ledger.issue(groups)
        return groups

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.ledger.adopt(groups)
        self.ledger.buffer(groups)
        self.source.add_samples(groups)

    def drop(self, groups: Iterable[Any], reason: str) -> None:
        self.ledger.drop(groups, reason)

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:  # a user's own data source may offer more
        return getattr(self.source, name)


def group_indices(groups: Iterable[Any]) -> list[int]:
    """`group_index` of each group; a group may nest lists (fan-out)."""
    out = []
    for group in groups:
        leaf = group
        while isinstance(leaf, list):
            if not leaf:
                raise RolloutError("a rollout function returned an empty group", remedy="return no group instead")
            leaf = leaf[0]
        if leaf.group_index is None:
            raise RolloutError(
                "a sample has no group_index",
                remedy="keep the samples that data_source.get_samples gave, or set group_index as it does",
            )
        out.append(leaf.group_index)
    return out


def _broken(group: int, wanted: str, state: str) -> RolloutError:
    return RolloutError(
        f"group {group} cannot be {wanted}: it is {state}",
        where="ledger",
        remedy="a rollout function returned or gave back a group twice, or one that it never took",
    )
