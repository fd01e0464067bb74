"""The typed interface to the workers of one role, actor or critic: every call from the controller to them.

A batch is divided among the data-parallel ranks. `score`, `train` and the methods named `begin_...` return at
once, each with a function that waits for the result. So actor and critic compute at the same time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from instep.algorithms.catalog import algorithm_of
from instep.arguments.settings import Settings
from instep.cluster.local import WorkerGroup
from instep.data.schedule import plan_steps, plan_whole_executions
from instep.errors import SyncError, TrainingError
from instep.models.sizes import shape_of
from instep.training.backend import ParallelInfo
from instep.training.lr_schedule import LRSchedule
from instep.types import Schedule, TokenBatch
from instep.weights.way import Order

logger = logging.getLogger(__name__)
ENOUGH_TOKENS, ENOUGH_ON_CPU = 8192, 256  # per rank: from here on a pass does not wait for its launches
MAX_SKIPPED_STEPS = 3  # in a row: then a run whose gradients are not finite ends

Metrics = dict[str, float]


class _Share(NamedTuple):
    """The part of a batch that one data-parallel rank gets.

    Attributes:
        order: the numbers of its samples in the whole batch.
        batch: these samples, in this order.
        steps: places in `batch`, by step and micro-batch.
    """

    order: list[int]
    batch: TokenBatch
    steps: list[list[list[int]]]


class RoleTrainer:
    """The workers of one role: they score rollouts, train on them, and load, save and publish the weights.

    Args:
        args: the arguments of the role.
        layout: the place of each rank, as the workers reported it.
    """

    def __init__(self, args: Settings, workers: WorkerGroup, layout: list[ParallelInfo], schedule: LRSchedule):
        self.args, self.workers = args, workers
        self.is_critic = workers.role == "critic"
        self._layout, self._lr = layout, schedule
        self._dp_size = layout[0].dp_size
        self._num_skipped = 0  # optimizer steps in a row
        self.rank_memory: list[dict[str, float]] = []  # of each rank, as `memory` has last read it

    # ---- training ------------------------------------------------------------------------------------------------

    @property
    def samples_multiple(self) -> int:
        """Any multiple of this number of samples gives every rank the same number of micro-batches."""
        return self._dp_size * self._layout[0].micro_batch_multiple

    def fills_ranks(self, lengths: Sequence[int]) -> bool:
        """Return whether samples of these lengths fill a micro-batch of each rank, or suffice for an efficient one."""
        args, unit = self.args, self.samples_multiple
        if not args.use_dynamic_batch_size:
            return len(lengths) >= unit * (args.micro_batch_size or 1)
        enough = ENOUGH_ON_CPU if args.device == "cpu" else ENOUGH_TOKENS
        return sum(lengths) >= unit * min(args.max_tokens_per_gpu or 0, enough) * self._layout[0].cp_size

    def plan(self, batch: TokenBatch, num_steps: int | None = None) -> Schedule:
        """Plan the optimizer steps, the same for every role, and their micro-batches on this role's ranks.

        Args:
            num_steps: by default as many as `--global-batch-size` gives.
        """
        args = self.args
        place = self._layout[0]  # context-parallel ranks share the tokens of a micro-batch
        capacity = (args.max_tokens_per_gpu or 0) * place.cp_size if args.use_dynamic_batch_size else None
        plan = plan_whole_executions if algorithm_of(args).loss.of_pairs else plan_steps
        lengths, shape = batch.total_lengths.tolist(), shape_of(args.hf_checkpoint)
        chunks = 2 * place.cp_size if place.cp_size > 1 else 1  # samples are padded to this many chunks
        return plan(
            batch.sample_columns["execution_id"],
            [-(-n // chunks) * chunks for n in lengths],
            costs=None if shape is None else [shape.flops(n) for n in lengths],
            num_steps=num_steps,
            global_batch_size=None if num_steps else args.global_batch_size,
            dp_size=self._dp_size,
            micro_batch_size=None if args.use_dynamic_batch_size else args.micro_batch_size,
            max_tokens_per_gpu=capacity,
            balance_data=args.balance_data,
            balance_by_flops=args.balance_by_flops,
            micro_batch_multiple=place.micro_batch_multiple,
        )

    def _shares(self, batch: TokenBatch, schedule: Schedule) -> list[_Share]:
        shares = []
        batch = batch.without_routes() if self.is_critic else batch
        for dp_rank in range(self._dp_size):
            order = [i for step in schedule for m in step[dp_rank] for i in m]
            place = {i: n for n, i in enumerate(order)}
            steps = [[[place[i] for i in m] for m in step[dp_rank]] for step in schedule]
            whole = order == list(range(batch.num_samples))
            shares.append(_Share(order, batch if whole else batch.select(order), steps))
        return shares

    def _start(self, method: str, parts: list[tuple[Any, ...]]) -> Callable[[], list[tuple[int, Any]]]:
        """Begin a call with the arguments of each share; return a function that waits for (dp_rank, answer)."""
        per_rank = [parts[p.dp_rank] for p in self._layout]  # ranks of one share get the same bytes
        wait = self.workers.start(method, timeout=self.args.train_timeout, per_rank=per_rank)
        return lambda: [(p.dp_rank, r) for p, r in zip(self._layout, wait(), strict=True) if r is not None]

    def score(self, batch: TokenBatch, schedule: Schedule, names: list[str]) -> Callable[[], None]:
        """Begin to compute the token columns `names`; return a function that waits and puts them into `batch`."""
        shares = self._shares(batch, schedule)
        wait = self._start("log_probs", [(s.batch, [m for step in s.steps for m in step], names) for s in shares])

        def finish() -> None:
            results, lengths = wait(), batch.response_lengths.tolist()
            for name in names:
                rows: dict[int, torch.Tensor] = {}
                for dp_rank, result in results:
                    order = shares[dp_rank].order
                    rows.update(zip(order, result[name].split([lengths[i] for i in order]), strict=True))
                batch.token_columns[name] = torch.cat([rows[i] for i in range(batch.num_samples)])

        return finish

    def begin_step(self, batch: TokenBatch, schedule: Schedule, token: str) -> Callable[[], dict[int, torch.Tensor]]:
        """Begin `Worker.begin_step`; return a function that waits for its rows, by number of the sample."""
        shares = self._shares(batch, schedule)
        wait = self._start("begin_step", [(share.batch, share.steps[0], token) for share in shares])

        def finish() -> dict[int, torch.Tensor]:
            return {shares[dp].order[n]: row for dp, answer in wait() for n, row in answer.items()}

        return finish

    def train(
        self,
        batch: TokenBatch,
        schedule: Schedule,
        num_steps_before: int,
        keep: Collection[int] = (),
        gap_limit: float = math.inf,
        rollout_id: int = 0,
        scale: float | None = None,
    ) -> Callable[[], tuple[list[Metrics], dict[int, torch.Tensor]]]:
        """Begin the optimizer steps of `schedule`.

        Args:
            keep: the numbers of the samples whose log-probs and entropies the caller wants.
            gap_limit, scale: see `Worker.train`.

        Returns:
            A function that waits. It returns the metrics of each step, and log-probs and entropies `[2,
            response_length]` by number of the sample, from the forward pass of its step. It raises TrainingError when
            too many steps in a row are skipped, and SyncError when `gap_limit` forbids a step.
        """
        shares = self._shares(batch, schedule)
        lrs = [self._lr.lr_at(num_steps_before + i) for i in range(len(schedule))]
        kept = [[n for n, i in enumerate(share.order) if i in keep] for share in shares]
        parts = [(s.batch, s.steps, lrs, k, gap_limit, rollout_id, scale) for s, k in zip(shares, kept, strict=True)]
        wait = self._start("train", parts)

        def finish() -> tuple[list[Metrics], dict[int, torch.Tensor]]:
            answers = wait()
            metrics: list[Metrics] = answers[0][1][0]
            self._check_steps(metrics)
            gap: float | None = answers[0][1][2]
            if gap is not None and gap > gap_limit:
                raise SyncError(
                    f"the engine's log-probs of freshly sampled tokens differ from the trainer's by {gap:.3g} nats in "
                    f"the mean, more than {gap_limit:.3g}: the step was not trained",
                    where="--on-gap stop",
                    remedy="resume from the last checkpoint",
                )
            if gap is not None:
                metrics[0]["log_prob_gap_fresh"] = gap
            return metrics, {shares[dp].order[n]: row for dp, answer in answers for n, row in answer[1].items()}

        return finish

    def _check_steps(self, steps: list[Metrics]) -> None:
        """Raise if too many steps in a row were skipped for gradients that are not finite; a few do no harm."""
        for step in steps:
            self._num_skipped = self._num_skipped + 1 if step["skipped_steps"] else 0
        if not self._num_skipped:
            return
        self.check_weights(self.args.train_timeout)
        if self._num_skipped >= MAX_SKIPPED_STEPS:
            raise TrainingError(
                f"the gradients of {self._num_skipped} optimizer steps in a row were not finite",
                where=f"the training worker ({self.workers.role}); no weight has changed since the last good step",
                remedy=f"look at rewards and {'returns' if self.is_critic else 'advantages'}, lower "
                f"{'--critic-lr' if self.is_critic else '--lr'}, or compute in --precision fp32",
            )
        logger.warning("the gradients of an optimizer step were not finite: it was skipped")

    def memory(self) -> dict[str, float]:
        """Return the memory of the ranks by name (`Worker.memory`): the largest value, of free memory the smallest."""
        ranks: list[dict[str, float]] = self.workers.call("memory", timeout=self.args.train_timeout)
        self.rank_memory = ranks
        return {name: (min if "free" in name else max)(rank[name] for rank in ranks) for name in ranks[0]}

    def offload(self, *, weights: bool) -> Callable[[], Any]:
        """Begin `Worker.offload`; return a function that waits."""
        return self.workers.start("offload", weights, timeout=self.args.train_timeout)

    def onload(self, *, optimizer: bool) -> Callable[[], Any]:
        """Begin `TrainBackend.onload`; return a function that waits."""
        return self.workers.start("onload", optimizer, timeout=self.args.train_timeout)

    # ---- models and weights --------------------------------------------------------------------------------------

    def load(self, checkpoint: Path, *, optimizer: bool) -> None:
        """Load a checkpoint that `begin_save` wrote."""
        self.workers.call("load", checkpoint, optimizer, timeout=self.args.worker_start_timeout)

    def load_weights(self, path: Path, *, fresh_head: bool = False) -> None:
        """Load the weights of a Hugging Face or instep checkpoint; `fresh_head`: a critic starts from an actor."""
        self.workers.call("load_weights", path, fresh_head, timeout=self.args.worker_start_timeout)

    def begin_save(self, folder: Path) -> Callable[[], Any]:
        """Let every rank write its part of a checkpoint; return a function that waits for the digests of each."""
        return self.workers.start("save", folder, timeout=self.args.train_timeout)

    def export_hf(self, path: Path) -> None:
        """Write the weights as a Hugging Face checkpoint, or only the adapter in peft's format (--save-hf-as)."""
        adapter = self.args.save_hf_as == "adapter"
        self.workers.call("export_hf", path, adapter, timeout=self.args.train_timeout)

    def check_weights(self, timeout: float) -> None:
        """Raise TrainingError with the names of weights that are not finite, if there are any."""
        names = [name for names in self.workers.call("broken_weights", timeout=timeout) for name in names]
        if names:
            raise TrainingError(
                f"{len(names)} weights are not finite: {', '.join(names[:3])}",
                where=f"the {'critic' if self.is_critic else 'policy'} in the training worker",
                remedy="load another checkpoint (--ckpt-step, --hf-checkpoint); if it happened in this run, lower --lr",
            )

    # ---- a sync session ------------------------------------------------------------------------------------------

    def publish(self, way: str, order: Order, *, timeout: float, on_event: Callable[[Any], None]) -> None:
        """Let every rank send its part of the weights by `way`; `on_event` gets the events of the ranks meanwhile."""
        self.workers.call("publish", way, order, timeout=timeout, on_event=on_event)

    def weight_digests(self, way: str, timeout: float) -> dict[str, str]:
        """Return the digest of every weight by its Hugging Face name, from the trainer's current weights."""
        return next(digests for digests in self.workers.call("weight_digests", way, timeout=timeout) if digests)

    def unwritten_weights(self, timeout: float) -> list[str]:
        """Return the weights that are not complete, bit for bit, in the memory that engines share."""
        found = self.workers.call("unwritten_weights", timeout=timeout)
        return sorted({name for names in found for name in names})

    def probe_log_probs(self, batch: TokenBatch, timeout: float) -> tuple[list[float], list[float]]:
        """Return the log-probs of the response tokens of `batch`, also with one more rounding (`Worker.score`)."""
        results = self.workers.call("score", batch, timeout=timeout)
        plain, rounded = next(result for result in results if result is not None).tolist()
        return plain, rounded
