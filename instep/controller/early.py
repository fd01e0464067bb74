"""What the trainer computes of a rollout's finished groups while the engines generate the others: their log-probs, and
where a rollout is one step, gradients (`early_step.py`).

    engines     | # responses                                       |
    workers     | .         # groups 3, 5  .  # group 0  .  # 1, 7  | # score the rest, steps

Who watches the rollout calls `Early.work` again and again, so that nothing else asks the workers meanwhile.
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

_Key = tuple[bytes, int, float]  # all that a score depends on: tokens, how many of them respond, temperature


class Early:
    """What is known of the samples of one rollout before it has ended; the trainer's weights are those of its training.

    Args:
        wanted: the token columns that each role computes.
        build: makes a batch of groups.
        step: is begun with what was scored; None: groups are only scored.

    Attributes:
        seconds: in which the workers have scored.
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
        """Take a group that is going to be trained on; any thread may call it."""
        self._waiting.append(group)

    def work(self) -> None:
        """Score the groups that wait, and begin the step with them."""
        if not (groups := self._take()):
            return
        try:
            batch = self._build(groups)
        except (RewardError, RolloutError):
            return  # that of the whole rollout raises it, if no hook repairs the sample before
        self._score(batch)
        if self.step is not None:
            self.step.begin(len(groups), [sample for group in groups for sample in flatten(group)], batch)

    def _take(self) -> list[Group]:
        """The groups that wait, without the last ones if the ranks cannot share them evenly; none if they are few."""
        multiple = math.lcm(*(role.samples_multiple for role, _ in self._wanted))
        waiting, lengths, count, size = list(self._waiting), list[int](), 0, 0
        for n, group in enumerate(waiting, 1):
            lengths += [len(sample.tokens) for sample in flatten(group)]
            count, size = (n, len(lengths)) if len(lengths) % multiple == 0 else (count, size)
        if self.step is not None and not self.step.has_enough(lengths[:size]):
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
        """The seconds of the workers, by name of the metric; of what is not computed early none."""
        out = {"perf/early_log_probs_seconds": self.seconds} if any(names for _, names in self._wanted) else {}
        return out if self.step is None else {**out, "perf/early_train_seconds": self.step.seconds}

    def score_rest(
        self, role: RoleTrainer, batch: TokenBatch, schedule: Schedule, names: list[str]
    ) -> Callable[[], None]:
        """`role.score`, where only what is not known yet is computed."""
        rows = [self._rows.get(key, {}) for key in _keys(batch)]
        known = [i for i, row in enumerate(rows) if row.keys() >= {*names}]
        again = -(len(rows) - len(known)) % role.samples_multiple  # so many, for ranks to share the rest evenly
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
