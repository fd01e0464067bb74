"""Log-probs of a rollout's finished groups, which the trainer computes while the engines generate the others.

    engines     | # responses                                       |
    workers     | .         # groups 3, 5  .  # group 0  .  # 1, 7  | # score the rest, steps

Who watches the rollout calls `EarlyScores.score` again and again, so that nothing else asks the workers meanwhile.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from instep.controller.role import RoleTrainer
from instep.errors import RolloutError
from instep.rollout.outputs import flatten
from instep.types import Group, Schedule, TokenBatch

if TYPE_CHECKING:
    from instep.arguments.settings import Settings

_Key = tuple[bytes, int, float]  # all that a score depends on: tokens, how many of them respond, temperature


def scores_early(args: Settings) -> bool:
    """Whether the trainer is there and has nothing to do while engines generate, and may score in several calls."""
    is_there = args.command == "train" and not (args.offload_train or args.offload_rollout)
    of_all = args.custom_megatron_before_log_prob_hook_path or args.use_routing_replay  # of the rollout's one call
    # With other samples in its micro-batch a sample has other bits.
    return is_there and not (args.deterministic_mode or of_all or args.use_rollout_routing_replay)


class EarlyScores:
    """What is known of the samples of one rollout before it has ended; the trainer's weights are those of its training.

    Args:
        wanted: the token columns that each role computes.
        build: makes a batch of groups.

    Attributes:
        seconds: in which the workers have computed it.
    """

    def __init__(self, wanted: list[tuple[RoleTrainer, list[str]]], build: Callable[[list[Group]], TokenBatch]):
        self._wanted, self._build = wanted, build
        self._waiting: list[Group] = []
        self._rows: defaultdict[_Key, dict[str, torch.Tensor]] = defaultdict(dict)  # columns of a sample
        self.seconds = 0.0

    def add(self, group: Group) -> None:
        """Take a group that is going to be trained on; any thread may call it."""
        self._waiting.append(group)

    def score(self) -> None:
        """Score the groups that wait, but for the last ones if the ranks could not share them evenly."""
        multiple = math.lcm(*(role.samples_multiple for role, _ in self._wanted))
        waiting, size, count = list(self._waiting), 0, 0
        for n, group in enumerate(waiting, 1):
            size += sum(1 for _ in flatten(group))
            count = n if size % multiple == 0 else count
        if not count:
            return
        del self._waiting[:count]
        try:
            batch = self._build(waiting[:count])
        except RolloutError:
            return  # that of the whole rollout raises it, if no hook mends the sample before
        began = time.monotonic()
        for finish in [role.score(batch, role.plan(batch, num_steps=1), names) for role, names in self._wanted]:
            finish()
        self.seconds += time.monotonic() - began
        keys, lengths = _keys(batch), batch.response_lengths.tolist()
        for name in (name for _, names in self._wanted for name in names):
            for key, row in zip(keys, batch.token_columns[name].split(lengths), strict=True):
                self._rows[key][name] = row

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
