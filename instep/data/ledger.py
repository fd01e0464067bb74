"""The ledger: it accounts for every group of a run, once.

The data source issues a group to a round. The group is finished when the round's rollout has returned it, and consumed
when it has been trained on. A checkpoint holds the samples of finished groups, which wait for the training. A group may
also be buffered for later (and issued again from there), or dropped with a reason. `generated = consumed + dropped +
buffered + outstanding (issued or finished)` is checked at every step, so that no group is lost or trained twice. Rounds
may overlap, in separate threads.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from instep.checkpoints.state_json import SAVABLE
from instep.errors import RolloutError
from instep.types import Group, Sample

OUTSTANDING = ("issued", "finished")


def begin_under(group: Group, version: int | None) -> None:
    """Note the version of the engines in the samples of a group that have no tokens yet."""
    for sample in group:
        if not sample.response_length:
            sample.begun_version = version


@dataclass
class _Entry:
    """A group that is not closed.

    Attributes:
        state: "issued" | "finished" | "buffered" | "again" (it was under way at a save or has become too old, and waits
            for a restart).
        rollout_id: the round that it was issued to.
        read: how the data source gives it again, {"cursor": its state before, "groups": all fresh ones of that call};
            None for a group made by a rollout function, or from a data source without `cursor()`.
        pristine: without `read`, a copy from when it was issued.
    """

    state: str
    rollout_id: int | None = None
    read: dict[str, Any] | None = None
    pristine: Group | None = None


class Ledger:
    """The states of groups by `group_index`. Closed groups are stored as a low-water mark and the few above it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: dict[int, _Entry] = {}  # in the order of their first issue
        self._finished: dict[int, Group] = {}  # with their samples, in the order of finishing
        self._closed_below = 0
        self._closed_above: set[int] = set()
        self.num_issued = 0  # first issues; a group from the buffer is not counted again
        self.num_consumed = 0
        self.dropped: Counter[str] = Counter()

    def issue(
        self, groups: Iterable[Any], rollout_id: int | None = None, cursor: Any = None, *, begin: bool = False
    ) -> None:
        """Record groups that a round takes.

        Args:
            cursor: the state of the data source before it gave them.
            begin: they begin now, so a save may find them under way.
        """
        with self._lock:
            indices = group_indices(groups)
            read = {"cursor": cursor, "groups": [i for i in indices if self._is_new(i)]} if cursor is not None else None
            for group, samples in zip(indices, groups, strict=True):
                entry = self._open.get(group)
                if self._is_closed(group) or (entry is not None and entry.state not in ("buffered", "again")):
                    raise _broken(group, "issued", self._state(group))
                self.num_issued += entry is None
                known = read if entry is None else entry.read
                pristine = _copied(group, samples) if begin and known is None else None
                self._open[group] = _Entry("issued", rollout_id, known, pristine)

    def adopt(self, groups: Iterable[Any], rollout_id: int | None = None) -> None:
        """Issue groups that a rollout function has made itself; each needs a distinct `group_index`."""
        with self._lock:
            new = [g for g, i in zip(groups, group_indices(groups), strict=True) if self._is_new(i)]
            self.issue(new, rollout_id)

    def finish(self, groups: Iterable[Any]) -> None:
        """Mark groups that the rollout function has returned. A checkpoint holds them until they are trained on."""
        with self._lock:
            self._set(groups, "finished", ("issued",))
            self._finished.update(zip(group_indices(groups), groups, strict=True))

    def wait_again(self, groups: Iterable[Any]) -> None:
        """Mark outstanding groups to be issued again. `groups` are as they were at their issue."""
        with self._lock:
            self._set(groups, "again")
            for group, samples in zip(group_indices(groups), groups, strict=True):
                self._open[group].pristine, self._open[group].read = samples, None

    def buffer(self, groups: Iterable[Any]) -> None:
        self._set(groups, "buffered")

    def consume(self, groups: Iterable[Any]) -> None:
        """Close groups that have been trained on."""
        with self._lock:
            self.num_consumed += self._set(groups, "consumed")

    def drop(self, groups: Iterable[Any], reason: str) -> None:
        with self._lock:
            if num := self._set(groups, f"dropped ({reason})"):
                self.dropped[reason] += num

    def drop_outstanding(self, reason: str, rollout_id: int | None = None) -> int:
        """Drop the groups that were issued to a round and never returned. Return how many."""
        with self._lock:
            left = [g for g, e in self._open.items() if e.state == "issued" and e.rollout_id == rollout_id]
            for group in left:
                self._close(group)
            if left:
                self.dropped[reason] += len(left)
            return len(left)

    @property
    def finished(self) -> list[Group]:
        """The groups that wait to be trained on, in the order of finishing."""
        with self._lock:
            return list(self._finished.values())

    @property
    def outstanding(self) -> list[int]:
        """Groups that are issued or finished, in the order of their first issue."""
        with self._lock:
            return [group for group, entry in self._open.items() if entry.state in OUTSTANDING]

    @property
    def issued(self) -> list[int]:
        """Groups that are issued and not finished, in the order of their first issue."""
        with self._lock:
            return [group for group, entry in self._open.items() if entry.state == "issued"]

    @property
    def num_outstanding(self) -> int:
        return len(self.outstanding)

    @property
    def num_buffered(self) -> int:
        with self._lock:
            return len(self._open) - self.num_outstanding

    @property
    def num_dropped(self) -> int:
        with self._lock:
            return sum(self.dropped.values())

    def check(self) -> None:
        """Raise RolloutError if a group is missing or counted twice."""
        with self._lock:
            accounted = self.num_consumed + self.num_dropped + self.num_buffered + self.num_outstanding
            if accounted != self.num_issued:
                what = f"the ledger does not balance: {self.state_dict()}"
                raise RolloutError(what, where="the ledger of groups", remedy="please report this")

    def counts(self) -> dict[str, Any]:
        """Return how many groups were issued and consumed, and how many dropped by reason."""
        with self._lock:
            return {"num_issued": self.num_issued, "num_consumed": self.num_consumed, "dropped": dict(self.dropped)}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole ledger. A checkpoint can hold its values if it can hold those of the samples.

        `finished` are samples. `reads` describe how the data source gives the issued groups again. `again` are those
        that it cannot give, as they were at their issue.
        """
        with self._lock:
            reads = {id(e.read): e.read for e in self._open.values() if e.read and e.state == "issued"}
            return {
                "open": {str(group): entry.state for group, entry in self._open.items()},
                "finished": [[s.to_dict() for s in group] for group in self._finished.values()],
                "reads": list(reads.values()),
                "again": [[s.to_dict() for s in e.pristine] for e in self._open.values() if e.pristine is not None],
                "closed_below": self._closed_below,
                "closed_above": sorted(self._closed_above),
                **self.counts(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict()`. Issued groups then belong to no round: their samples are gone."""
        reads = {group: read for read in state.get("reads", []) for group in read["groups"]}
        finished = [[Sample.from_dict(s) for s in group] for group in state.get("finished", [])]
        self._finished = dict(zip(group_indices(finished), finished, strict=True))
        states = {int(k): v for k, v in state["open"].items()}
        kept = {g for g, v in states.items() if v == "buffered" or g in self._finished}
        self._open = {g: _Entry(v if g in kept else "issued", None, reads.get(g)) for g, v in states.items()}
        self._closed_below, self._closed_above = int(state["closed_below"]), {int(i) for i in state["closed_above"]}
        self.num_issued, self.num_consumed = int(state["num_issued"]), int(state["num_consumed"])
        self.dropped = Counter({str(reason): int(n) for reason, n in state["dropped"].items()})

    def _is_new(self, group: int) -> bool:
        return group not in self._open and not self._is_closed(group)

    def _is_closed(self, group: int) -> bool:
        return group < self._closed_below or group in self._closed_above

    def _state(self, group: int) -> str:
        entry = self._open.get(group)
        return entry.state if entry is not None else "closed" if self._is_closed(group) else "never issued"

    def _set(self, groups: Iterable[Any], state: str, before: Collection[str] = OUTSTANDING) -> int:
        """Move groups to another state, and close them if it is not a state of `_Entry`. Return how many."""
        with self._lock:
            indices = group_indices(groups)
            for group in indices:
                if self._state(group) not in before:
                    raise _broken(group, state, self._state(group))
                self._finished.pop(group, None)
                if state in ("finished", "buffered", "again"):
                    self._open[group].state, self._open[group].pristine = state, None
                else:
                    self._close(group)
            return len(indices)

    def _close(self, group: int) -> None:
        del self._open[group]
        self._closed_above.add(group)
        while self._closed_below in self._closed_above:
            self._closed_above.remove(self._closed_below)
            self._closed_below += 1


class LedgeredDataSource:
    """The data source that rollout functions get: the run's own, with every group recorded in the ledger.

    Args:
        rollout_id: the round whose groups are issued through it; see `of_round`.
        version: the engines' version in the round, if it is known.
        under_way: whether a save may find groups under way that a source without `cursor()` cannot give again.
    """

    __slots__ = ("_again", "_under_way", "_version", "books_lock", "ledger", "rollout_id", "source")

    def __init__(
        self,
        source: Any,
        ledger: Ledger,
        rollout_id: int | None = None,
        version: int | None = None,
        *,
        under_way: bool = True,
    ):
        self.source, self.ledger, self.rollout_id, self._version = source, ledger, rollout_id, version
        self._under_way = under_way
        self._again: list[Group] = []  # they come before those of the source
        self.books_lock = threading.RLock()  # while it is held, source and ledger agree

    def of_round(self, rollout_id: int, version: int | None = None) -> LedgeredDataSource:
        """Return a view of this data source that issues its groups to one round."""
        view = LedgeredDataSource(self.source, self.ledger, rollout_id, version, under_way=self._under_way)
        view.books_lock, view._again = self.books_lock, self._again
        return view

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        with self.books_lock:
            groups = self._again[:num_groups]
            del self._again[:num_groups]
            self.ledger.issue(groups, self.rollout_id, begin=self._under_way)
            if (left := num_groups - len(groups)) or not groups:
                cursor = self.source.cursor() if hasattr(self.source, "cursor") else None
                fresh = self.source.get_samples(left)
                self.ledger.issue(fresh, self.rollout_id, cursor, begin=self._under_way)
                groups = [*groups, *fresh]
            for group in groups if self._version is not None else ():
                begin_under(group, self._version)
            return groups

    __call__ = get_samples  # slime gives `--rollout-all-samples-process-path` the bound method

    def give_again(self, groups: list[Group]) -> None:
        """Let `get_samples` first return these groups, as they were at their issue, whatever the source can do."""
        with self.books_lock:
            self.ledger.wait_again(groups)
            self._again += groups

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Keep groups for a later rollout, begun or finished. `get_samples` returns them first, unchanged."""
        with self.books_lock:
            self.ledger.adopt(groups, self.rollout_id)
            for sample in (s for group in groups for s in _flat(group) if s.response_length):
                if sample.begun_version is None:  # made by the rollout function itself
                    sample.begun_version = self._version
            self.ledger.buffer(groups)
            self.source.add_samples(groups)

    def drop(self, groups: Iterable[Any], reason: str) -> None:
        self.ledger.drop(groups, reason)

    def finish_rollout(self, groups: list[list[Sample]]) -> None:
        """Finish the groups that the round's rollout function has returned. Drop its other groups."""
        for sample in (s for group in groups for s in group if s.begun_version is None):  # made by the function itself
            sample.begun_version = self._version
        self.ledger.adopt(groups, self.rollout_id)
        self.ledger.finish(groups)
        self.ledger.drop_outstanding("not returned by the rollout function", self.rollout_id)

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:  # a user's data source may offer more
        return getattr(self.source, name)

    def __setattr__(self, name: str, value: Any) -> None:  # its values outlive the round
        if name in self.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.source, name, value)


def _copied(group: int, samples: Any) -> Any:
    try:
        return copy.deepcopy(samples)
    except TypeError as error:
        what = f"a checkpoint cannot hold a sample as the data source gave it: {error}"
        raise RolloutError(what, where=f"group {group}", remedy=SAVABLE) from error


def _flat(group: Iterable[Any]) -> Iterator[Sample]:
    for part in group:
        yield from _flat(part) if isinstance(part, list) else (part,)


def group_indices(groups: Iterable[Any]) -> list[int]:
    """Return the `group_index` of each group; a group may nest lists (fan-out)."""
    out = []
    for group in groups:
        leaf = group
        while isinstance(leaf, list):
            if not leaf:
                what = "a rollout function returned an empty group"
                raise RolloutError(what, where="--rollout-function-path", remedy="leave the group out")
            leaf = leaf[0]
        if leaf.group_index is None:
            remedy = "keep the samples that data_source.get_samples gave, or set group_index as it does"
            raise RolloutError("a sample has no group_index", where="--rollout-function-path", remedy=remedy)
        out.append(leaf.group_index)
    return out


def _broken(group: int, wanted: str, state: str) -> RolloutError:
    remedy = "a rollout function returned or gave back a group twice, or one that it never took"
    return RolloutError(f"group {group} cannot be {wanted}: it is {state}", where="ledger", remedy=remedy)
