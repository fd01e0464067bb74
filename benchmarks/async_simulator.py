"""A simulator of the schedules that `async.py` measures: the samples a second that they can reach at given rates.

It has one engine, which runs all its requests at once, and one trainer. A request is `first` seconds on its way; then a
decode step takes `step` seconds and `running` more for each request, and a response is one token longer after it. The
trainer takes `train` seconds a token; a sync stops both, and costs the engine nothing else: the tokens that it reads
again after one are what a schedule may lose to its bound. On two devices neither slows the other. On one card both are
`slow` times as slow while both are at work: kernels of two processes take turns there, so `slow` is the sum of the
shares of the time in which each of them alone keeps the card busy, and at least 1. Everything else (rewards, files) is
`other`, during which the trainer waits, and the engine too if it has nothing to do.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

IN_TURNS, AHEAD = "in turns", "one step ahead"  # schedules; a number is that of --max-staleness


@dataclass(frozen=True)
class Rates:
    """Seconds, each where nothing else is at work.

    Attributes:
        step: of a decode step without its requests.
        running: of a decode step for each of its requests.
        train: of the trainer for each token, with those of prompts.
        sync: of a weight sync.
        other: of a round, for all else.
        first: from the issue of a request to its first decode step.
        most_running: requests that decode at a time.
    """

    step: float
    running: float
    train: float
    sync: float
    other: float = 0.0
    first: float = 0.0
    most_running: int = 512


@dataclass
class _Machine:
    """The clock, the engine's requests and the trainer's work.

    `decoded` counts the tokens that a request would have that had run from the beginning.
    """

    rates: Rates
    slow: float
    now: float = 0.0
    decoded: float = 0.0
    coming: deque[tuple[float, int, int]] = field(default_factory=deque)  # (when, length, group), in order
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (length, group)
    running: list[tuple[float, int]] = field(default_factory=list)  # (`decoded` at its end, group), a heap
    left: dict[int, int] = field(default_factory=dict)  # responses of a group that have not ended

    def begin(self, group: int, lengths: Sequence[int]) -> None:
        self.left[group] = len(lengths)
        self.coming.extend((self.now + self.rates.first, length, group) for length in lengths)

    def is_ready(self, group: int) -> bool:
        return not self.left[group]

    def wait(self, done: Callable[[], bool]) -> None:
        while not done():
            self._go(self._next(1.0), 1.0)

    def train(self, seconds: float, slow: float | None = None) -> None:
        """Let `seconds` of work be done while the engine goes on."""
        while seconds > 0:
            factor = (self.slow if slow is None else slow) if self.running else 1.0
            passed = min(self._next(factor), seconds * factor)
            self._go(passed, factor)
            seconds -= passed / factor

    def sync(self) -> None:
        """Stop everything."""
        self.now += self.rates.sync

    def _step(self) -> float:
        return self.rates.step + self.rates.running * len(self.running)

    def _next(self, factor: float) -> float:
        """Seconds until a response ends or a request is there, the engine being `factor` times as slow."""
        ends = (self.running[0][0] - self.decoded) * self._step() * factor if self.running else float("inf")
        comes = max(0.0, self.coming[0][0] - self.now) if self.coming else float("inf")
        return min(ends, comes)

    def _go(self, seconds: float, factor: float) -> None:
        self.now += seconds
        if self.running:
            self.decoded += seconds / factor / self._step()
        while self.running and self.running[0][0] <= self.decoded + 1e-9:
            self.left[heapq.heappop(self.running)[1]] -= 1
        while self.coming and self.coming[0][0] <= self.now + 1e-9:
            self.waiting.append(self.coming.popleft()[1:])
        while self.waiting and len(self.running) < self.rates.most_running:
            length, group = self.waiting.popleft()
            heapq.heappush(self.running, (self.decoded + length, group))


def samples_per_s(
    groups: Sequence[Sequence[int]],
    batch: int,
    schedule: str | int,
    rates: Rates,
    *,
    prompt: int = 0,
    slow: float = 1.0,
    skipped: int = 0,
) -> float:
    """Samples a second of all rounds but the first ones.

    Args:
        groups: the lengths of the responses, in tokens, of each group in the order in which groups begin.
        batch: groups of a round.
        schedule: `IN_TURNS` (a rollout, then its training), `AHEAD`, or the bound of `--max-staleness`, at least 1.
        prompt: tokens of a prompt.
        slow: 1 on two devices; on one, how much slower both are while both work.
        skipped: rounds at the beginning that do not count.
    """
    machine = _Machine(rates, slow)
    run = _groups_ahead if isinstance(schedule, int) else _rounds
    ends = run(machine, groups, batch, schedule, prompt)
    counted = ends[-1] - (ends[skipped - 1] if skipped else 0.0)
    return sum(len(group) for group in groups[skipped * batch : len(ends) * batch]) / counted


def _train(machine: _Machine, groups: Sequence[Sequence[int]], chosen: Sequence[int], prompt: int) -> None:
    machine.train(machine.rates.train * sum(prompt + length for i in chosen for length in groups[i]))


def _rounds(machine: _Machine, groups: Sequence[Sequence[int]], batch: int, schedule: Any, prompt: int) -> list[float]:
    """`RoundsAhead` of controller/ahead.py; returns when each round has ended."""
    num_rounds, ends = len(groups) // batch, []
    rounds = [range(i * batch, (i + 1) * batch) for i in range(num_rounds)]

    def begin(round_id: int) -> None:
        for i in rounds[round_id]:
            machine.begin(i, groups[i])

    def wait(round_id: int) -> None:
        machine.wait(lambda: all(map(machine.is_ready, rounds[round_id])))

    for round_id in range(num_rounds):
        is_ahead = schedule == AHEAD and round_id + 1 < num_rounds
        if schedule == IN_TURNS or round_id == 0:
            begin(round_id)
        wait(round_id)
        if is_ahead:
            begin(round_id + 1)
        _train(machine, groups, rounds[round_id], prompt)
        if is_ahead:
            wait(round_id + 1)
        machine.sync()
        machine.train(machine.rates.other, slow=1.0)
        ends.append(machine.now)
    return ends


def _groups_ahead(
    machine: _Machine, groups: Sequence[Sequence[int]], batch: int, bound: Any, prompt: int
) -> list[float]:
    """`GroupsAhead` and `Stream`, with a sync after every round; returns when each round has ended."""
    num_rounds, ends, version = len(groups) // batch, list[float](), 0
    begun: dict[int, int] = {}  # version of each group that no round has taken

    def places(round_id: int, age: int) -> int:
        return batch * max(0, min(age, num_rounds - 1 - round_id))

    def open_for(room: int) -> None:
        while len(begun) < room:
            group = len(machine.left)
            machine.begin(group, groups[group])
            begun[group] = version

    def can_take() -> bool:
        entries = sorted((of, group) for group, of in begun.items())
        num_ready = 0
        for i, (of, group) in enumerate(entries):
            num_ready += machine.is_ready(group)
            is_last = i + 1 == len(entries) or entries[i + 1][0] > of
            wanted = min(batch, i + 1 - places(version, bound - (version - of)))
            if is_last and num_ready < wanted:
                return False
        return num_ready >= batch

    open_for(batch + places(0, bound))
    while version < num_rounds:  # the version that the engine has in the round of this number
        machine.wait(can_take)
        chosen = sorted((of, group) for group, of in begun.items() if machine.is_ready(group))[:batch]
        for of, group in chosen:
            assert version - of <= bound
            del begun[group]
        open_for(places(version, bound))
        _train(machine, groups, [group for _, group in chosen], prompt)
        machine.sync()
        version += 1
        open_for(batch + places(version, bound) if version < num_rounds else 0)
        machine.train(machine.rates.other, slow=1.0)
        ends.append(machine.now)
    return ends


def fit_engine(rounds: Sequence[Sequence[tuple[int, float]]]) -> tuple[float, float, float]:
    """The rates of an engine, from rounds in turns: (seconds to the first token, `step`, `running`).

    A response of length l ends at t0 + step * l + running * s(l), where s(l) are the tokens that all requests of the
    round have by then: least squares over all responses.

    Args:
        rounds: of each response its length and the seconds from the round's beginning to its end.
    """
    rows, seconds = [], []
    for responses in rounds:
        lengths = numpy.array([length for length, _ in responses])
        rows += [(1.0, length, float(numpy.minimum(lengths, length).sum())) for length in lengths]
        seconds += [end for _, end in responses]
    table, wanted = numpy.array(rows), numpy.array(seconds)
    used = [0, 1, 2]
    while True:  # a rate is not negative
        found = numpy.zeros(3)
        found[used] = numpy.linalg.lstsq(table[:, used], wanted, rcond=None)[0]
        if (found >= 0).all():
            return float(found[0]), float(found[1]), float(found[2])
        used = [i for i in used if found[i] >= 0]
