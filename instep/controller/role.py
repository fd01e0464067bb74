"""The workers of one role, actor or critic, as the controller drives them: a batch is divided among their ranks.

`score` and `train` return at once with the way to wait, so that actor and critic compute at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from instep.algorithms.catalog import algorithm_of
from instep.cluster.local import WorkerGroup
from instep.data.schedule import plan_steps, plan_whole_executions
from instep.errors import TrainingError
from instep.training.backend import ParallelInfo
from instep.training.lr_schedule import LRSchedule
from instep.types import Schedule, TokenBatch

logger = logging.getLogger(__name__)
MAX_SKIPPED_STEPS = 3  # in a row, before a run whose gradients are not finite is ended

Metrics = dict[str, float]


class _Share(NamedTuple):
    """Of one data-parallel rank.

    Attributes:
        order: the numbers of its samples in the whole batch.
        batch: these samples.
        steps: step -> micro-batch -> places in `batch`.
    """

    order: list[int]
    batch: TokenBatch
    steps: list[list[list[int]]]


class RoleTrainer:
    """Scores and trains one rollout after another on the workers of one role.

    Args:
        args: those of the role.
        layout: where each rank stands, as the workers reported it.
    """

    def __init__(self, args: Any, workers: WorkerGroup, layout: list[ParallelInfo], schedule: LRSchedule):
        self.args, self.workers = args, workers
        self._layout, self._lr = layout, schedule
        self._dp_size = layout[0].dp_size
        self._num_skipped = 0  # optimizer steps in a row

    def plan(self, batch: TokenBatch) -> Schedule:
        """Steps, which are the same for every role, and their micro-batches on the ranks of this one."""
        args = self.args
        plan = plan_whole_executions if algorithm_of(args).loss.of_pairs else plan_steps
        return plan(
            batch.sample_columns["execution_id"],
            batch.total_lengths.tolist(),
            global_batch_size=args.global_batch_size,
            dp_size=self._dp_size,
            micro_batch_size=None if args.use_dynamic_batch_size else args.micro_batch_size,
            max_tokens_per_gpu=args.max_tokens_per_gpu if args.use_dynamic_batch_size else None,
            balance_data=args.balance_data,
        )

    def _shares(self, batch: TokenBatch, schedule: Schedule) -> list[_Share]:
        """What each data-parallel rank gets of it."""
        shares = []
        for dp_rank in range(self._dp_size):
            order = [i for step in schedule for m in step[dp_rank] for i in m]
            place = {i: n for n, i in enumerate(order)}
            steps = [[[place[i] for i in m] for m in step[dp_rank]] for step in schedule]
            shares.append(_Share(order, batch.select(order), steps))
        return shares

    def score(self, batch: TokenBatch, schedule: Schedule, names: list[str]) -> Callable[[], None]:
        """Begin to compute the token columns `names`; the call that is returned waits and puts them into `batch`."""
        shares = self._shares(batch, schedule)
        per_rank = [
            (shares[p.dp_rank].batch, [m for step in shares[p.dp_rank].steps for m in step], names)
            for p in self._layout
        ]
        wait = self.workers.start("log_probs", timeout=self.args.train_timeout, per_rank=per_rank)

        def finish() -> None:
            results, lengths = wait(), batch.response_lengths.tolist()
            for name in names:
                rows: dict[int, torch.Tensor] = {}
                for place, result in zip(self._layout, results, strict=True):
                    if result is not None:
                        order = shares[place.dp_rank].order
                        rows.update(zip(order, result[name].split([lengths[i] for i in order]), strict=True))
                batch.token_columns[name] = torch.cat([rows[i] for i in range(batch.num_samples)])

        return finish

    def train(
        self, batch: TokenBatch, schedule: Schedule, num_steps_before: int
    ) -> Callable[[], tuple[list[Metrics], dict[int, torch.Tensor]]]:
        """Begin the optimizer steps of `schedule`.

        Returns:
            A call that waits. It returns the metrics of each step, and the log-probs that were wanted (see
            `Worker.train`); it raises TrainingError when steps keep being skipped.
        """
        shares = self._shares(batch, schedule)
        lrs = [self._lr.lr_at(num_steps_before + i) for i in range(len(schedule))]
        per_rank = [(shares[p.dp_rank].batch, shares[p.dp_rank].steps, lrs) for p in self._layout]
        wait = self.workers.start("train", timeout=self.args.train_timeout, per_rank=per_rank)

        def finish() -> tuple[list[Metrics], dict[int, torch.Tensor]]:
            answers = [r for r in wait() if r is not None]
            metrics: list[Metrics] = answers[0][0]
            self._check_steps(metrics)
            return metrics, {i: log_probs for _, kept in answers for i, log_probs in kept.items()}

        return finish

    def _check_steps(self, steps: list[Metrics]) -> None:
        """A step whose gradients are not finite was skipped, which may happen now and then; more must not."""
        for step in steps:
            self._num_skipped = self._num_skipped + 1 if step["skipped_steps"] else 0
        if not self._num_skipped:
            return
        check_weights(self.workers, self.args.train_timeout)
        if self._num_skipped >= MAX_SKIPPED_STEPS:
            critic = self.workers.role == "critic"
            raise TrainingError(
                f"the gradients of {self._num_skipped} optimizer steps in a row were not finite",
                where=f"the training worker ({self.workers.role}); no weight has changed since the last good step",
                remedy=f"look at rewards and {'returns' if critic else 'advantages'}, lower "
                f"{'--critic-lr' if critic else '--lr'}, or compute in --precision fp32",
            )
        logger.warning("the gradients of an optimizer step were not finite: it was skipped")


def check_weights(workers: WorkerGroup, timeout: float) -> None:
    """Raise TrainingError, by name, if weights of the role are not finite."""
    names = [name for names in workers.call("broken_weights", timeout=timeout) for name in names]
    if names:
        raise TrainingError(
            f"{len(names)} weights are not finite: {', '.join(names[:3])}",
            where=f"the {'critic' if workers.role == 'critic' else 'policy'} in the training worker",
            remedy="load another checkpoint (--ckpt-step, --hf-checkpoint); if it happened on the way, lower --lr",
        )
