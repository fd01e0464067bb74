"""Early work of the trainer on finished groups, while the engines generate the others: log-probs, and gradients where
a rollout is one step (`early_step.py`).

    engines     | # responses                                       |
    workers     | .         # groups 3, 5  .  # group 0  .  # 1, 7  | # score the rest, steps

The watch of the rollout calls `Early.work` again and again, so that nothing else calls the workers meanwhile.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import cast

import torch

from instep.controller.early_step import EarlyStep
from instep.controller.role import RoleTrainer
from instep.errors import RewardError, RolloutError
from instep.rollout.outputs import flatten
from instep.types import Group, Schedule, TokenBatch

_Key = tuple[bytes, int, float]  # all that a score depends on: tokens, number of response tokens, temperature


class Early:
    """Scores of samples of one rollout, from before its end; the trainer's weights do not change until its training.

    Args:
        wanted: the token columns that each role computes.
        build: makes a batch of groups.
        step: begins with the scored groups; None: groups are only scored.

    Attributes:
        seconds: how long the workers have scored.
    """

    def __init__(
        self,
        wanted: list[tuple[RoleTrainer, list[str]]],
        build: Callable[[list[Group]], TokenBatch],
        step: EarlyStep | None = None,
    ):
        self._wanted, self._build, self.step = wanted, build, step
        self._waiting: list[Group] = []
        self._rows: defaultdict[_Key, dict[str, torch.Tensor]] = defaultdict(dict)  # columns of a sample
        self.seconds = 0.0

    def add(self, group: Group) -> None:
        """Take a group that will be trained on; any thread may call it."""
        self._waiting.append(group)

    def work(self) -> None:
        """Score the waiting groups, and begin the step with them."""
        if not (groups := self._take()):
            return
        try:
            batch = self._build(groups)
        except (RewardError, RolloutError):
            return  # the end of the rollout raises it, unless a hook repairs the sample first
        self._score(batch)
        if self.step is not None:
            self.step.begin(len(groups), [sample for group in groups for sample in flatten(group)], batch)

    def _take(self) -> list[Group]:
        """Take the waiting groups that the ranks can share evenly, in order; take none if they are too few."""
        multiple = math.lcm(*(role.samples_multiple for role, _ in self._wanted))
        waiting, lengths, count, size = list(self._waiting), list[int](), 0, 0
        for n, group in enumerate(waiting, 1):
            lengths += [len(sample.tokens) for sample in flatten(group)]
            count, size = (n, len(lengths)) if len(lengths) % multiple == 0 else (count, size)
        if self.step is not None and not self.step.actor.fills_ranks(lengths[:size]):
            return []
        del self._waiting[:count]
        return waiting[:count]

    def _score(self, batch: TokenBatch) -> None:
        wanted = [(role, names) for role, names in self._wanted if names]
        if not wanted:
            return
        began = time.monotonic()
        for finish in [role.score(batch, role.plan(batch, num_steps=1), names) for role, names in wanted]:
            finish()
        self.seconds += time.monotonic() - began
        keys, lengths = _keys(batch), batch.response_lengths.tolist()
        for name in (name for _, names in wanted for name in names):
            for key, row in zip(keys, batch.token_columns[name].split(lengths), strict=True):
                self._rows[key][name] = row

    def metrics(self) -> dict[str, float]:
        """Return the seconds of the workers by metric name; omit what is not computed early."""
        out = {"perf/early_log_probs_seconds": self.seconds} if any(names for _, names in self._wanted) else {}
        return out if self.step is None else {**out, "perf/early_train_seconds": self.step.seconds}

    def score_rest(
        self, role: RoleTrainer, batch: TokenBatch, schedule: Schedule, names: list[str]
    ) -> Callable[[], None]:
        """Begin `role.score`, but compute only the rows that are not known yet."""
        rows = [self._rows.get(key, {}) for key in _keys(batch)]
        known = [i for i, row in enumerate(rows) if row.keys() >= {*names}]
        again = -(len(rows) - len(known)) % role.samples_multiple  # scored again: ranks then share the rest evenly
        if len(known) <= again:
            return role.score(batch, schedule, names)
        left = sorted({*range(len(rows))} - {*known[again:]})
        part = batch.select(left)
        wait = role.score(part, role.plan(part, num_steps=1), names) if left else None

        def finish() -> None:
            if wait is not None:
                wait()
            lengths = part.response_lengths.tolist()
            for name in names:
                found = [row.get(name) for row in rows]
                for i, fresh in zip(left, part.token_columns[name].split(lengths) if left else (), strict=True):
                    found[i] = fresh
                batch.token_columns[name] = torch.cat(cast("list[torch.Tensor]", found))

        return finish


def _keys(batch: TokenBatch) -> list[_Key]:
    tokens = [row.numpy().tobytes() for row in batch.tokens.split(batch.total_lengths.tolist())]
    columns = batch.response_lengths.tolist(), batch.sample_columns["temperature"].tolist()
    return list(zip(tokens, *columns, strict=True))
