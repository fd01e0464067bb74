"""One training round as the controller sees it: samples -> flat batch -> log-probs -> advantages -> optimizer steps.

Statistics over groups belong here, because the samples of a group may lie on several data-parallel ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from instep.algorithms.advantages import group_advantages, penalised_rewards, to_tokens, whiten
from instep.algorithms.kl import approx_kl
from instep.algorithms.reductions import loss_scales, loss_weights
from instep.cluster.local import WorkerGroup
from instep.data.batch import build_batch
from instep.data.schedule import plan_steps, steps_of_samples
from instep.errors import RolloutError, TrainingError
from instep.hooks import load_function
from instep.rollout.outputs import flatten
from instep.training.backend import ParallelInfo
from instep.training.lr_schedule import LRSchedule
from instep.types import Group, Sample, Schedule, TokenBatch

logger = logging.getLogger(__name__)
MAX_SKIPPED_STEPS = 3  # in a row, before a run whose gradients are not finite is ended


@dataclass
class TrainedRollout:
    """What a round did.

    Attributes:
        steps: the metrics of each optimizer step.
        batch: all samples as the workers got them.
        step_of_sample: the optimizer step of each sample.
        log_probs: by number of the sample, float32 `[response_length]`: the trainer's log-probs under the weights that
            the round began with. Of the samples that were wanted; a sample of a later step has them only if the
            rollout was scored first.
    """

    steps: list[dict[str, float]]
    batch: TokenBatch
    step_of_sample: list[int]
    log_probs: dict[int, torch.Tensor]


class TrainingRound:
    """Drives the actor's workers through the optimizer steps of one rollout.

    Args:
        hook_args: what hooks see of `args`.
        layout: where each rank stands, as the workers reported it.
    """

    def __init__(
        self, args: Any, hook_args: Any, workers: WorkerGroup, layout: list[ParallelInfo], schedule: LRSchedule
    ):
        self._args, self._hook_args = args, hook_args
        self._workers, self._layout, self._lr = workers, layout, schedule
        self._dp_size = layout[0].dp_size
        self._num_skipped = 0  # optimizer steps in a row
        self.uses_reference = bool(args.loss_type != "sft_loss" and (args.use_kl_loss or args.kl_coef))

    def run(self, groups: list[Group], num_steps_before: int, keep: Collection[int] = ()) -> TrainedRollout:
        """Train on one rollout.

        Args:
            keep: numbers of the samples (counted through all groups) whose log-probs are wanted.
        """
        args = self._args
        batch = build_batch(
            groups,
            reward_key=args.reward_key,
            needs_reward=args.loss_type != "sft_loss",
            default_temperature=args.rollout_temperature,
        )
        executions = batch.sample_columns["execution_id"]
        schedule = plan_steps(
            executions,
            batch.total_lengths.tolist(),
            global_batch_size=args.global_batch_size,
            dp_size=self._dp_size,
            micro_batch_size=None if args.use_dynamic_batch_size else args.micro_batch_size,
            max_tokens_per_gpu=args.max_tokens_per_gpu if args.use_dynamic_batch_size else None,
            balance_data=args.balance_data,
        )
        step_of_sample = steps_of_samples(schedule, batch.num_samples)
        shares = batch.token_columns["loss_mask"], batch.response_lengths.tolist(), step_of_sample, executions
        per_token = args.calculate_per_token_loss
        batch.token_columns["loss_weights"] = loss_weights(*shares, per_token=per_token)
        batch.sample_columns["loss_scale"] = loss_scales(*shares, per_token=per_token)
        if args.loss_type != "sft_loss":
            names = self._scored_names(len(schedule))
            if names:
                self._score(batch, schedule, names)
            self._add_advantages(batch, [s for g in groups for s in flatten(g)])
        lrs = [self._lr.lr_at(num_steps_before + i) for i in range(len(schedule))]
        if "log_probs" in batch.token_columns:
            rows = batch.token_columns["log_probs"].split(batch.response_lengths.tolist())
            kept = {i: rows[i] for i in keep}
            steps, _ = self._train(batch, schedule, lrs)
        else:
            batch.sample_columns["keep_log_probs"] = [i if i in keep else -1 for i in range(batch.num_samples)]
            steps, kept = self._train(batch, schedule, lrs)
        self._check_steps(steps)
        return TrainedRollout(steps, batch, step_of_sample, kept)

    def _check_steps(self, steps: list[dict[str, float]]) -> None:
        """A step whose gradients are not finite was skipped, which may happen now and then; more must not."""
        for step in steps:
            self._num_skipped = self._num_skipped + 1 if step["skipped_steps"] else 0
        if not self._num_skipped:
            return
        check_weights(self._workers, self._args.train_timeout)
        if self._num_skipped >= MAX_SKIPPED_STEPS:
            raise TrainingError(
                f"the gradients of {self._num_skipped} optimizer steps in a row were not finite",
                where="the training worker; no weight has changed since the last good step",
                remedy="look at rewards and advantages, lower --lr, or compute in --precision fp32",
            )
        logger.warning("the gradients of an optimizer step were not finite: it was skipped")

    def _scored_names(self, num_steps: int) -> list[str]:
        """Which forward passes are needed. With one on-policy step the old policy is the current one."""
        args = self._args
        names = ["ref_log_probs"] if self.uses_reference else []
        differs = num_steps > 1 or args.loss_type == "custom_loss"  # which may ask for old log-probs in any case
        if (differs and not args.use_rollout_logprobs) or args.kl_coef:
            names.append("log_probs")
        return names

    def _score(self, batch: TokenBatch, schedule: Schedule, names: list[str]) -> None:
        parts, micro_batches = [], []
        for dp_rank in range(self._dp_size):
            order = [i for step in schedule for m in step[dp_rank] for i in m]
            local = {i: n for n, i in enumerate(order)}
            micro_batches.append([[local[i] for i in m] for step in schedule for m in step[dp_rank]])
            parts.append((order, batch.select(order)))
        per_rank = [(parts[p.dp_rank][1], micro_batches[p.dp_rank], names) for p in self._layout]
        results = self._workers.call("log_probs", timeout=self._args.train_timeout, per_rank=per_rank)
        lengths = batch.response_lengths.tolist()
        for name in names:
            rows: list[torch.Tensor | None] = [None] * batch.num_samples
            for place, result in zip(self._layout, results, strict=True):
                if result is None:
                    continue
                order = parts[place.dp_rank][0]
                split = result[name].split([lengths[i] for i in order])
                for i, row in zip(order, split, strict=True):
                    rows[i] = row
            batch.token_columns[name] = torch.cat([r for r in rows if r is not None])

    def _add_advantages(self, batch: TokenBatch, samples: list[Sample]) -> None:
        args = self._args
        rewards = batch.sample_columns["rewards"].double()
        lengths, mask = batch.response_lengths.tolist(), batch.token_columns["loss_mask"]
        if args.kl_coef:
            kl = approx_kl(batch.token_columns["log_probs"], batch.token_columns["ref_log_probs"], args.kl_loss_type)
            rewards = penalised_rewards(rewards, kl, mask, lengths, args.kl_coef)
        if args.custom_reward_post_process_path:
            _, processed = load_function(args.custom_reward_post_process_path)(self._hook_args, samples)
            if len(processed) != batch.num_samples:
                raise RolloutError(
                    f"{len(processed)} rewards came back for {batch.num_samples} samples",
                    where=f"--custom-reward-post-process-path {args.custom_reward_post_process_path}",
                    remedy="return (raw_rewards, rewards), one of each per sample",
                )
            advantages = torch.as_tensor(processed, dtype=torch.float64)
        else:
            advantages = group_advantages(
                rewards,
                batch.sample_columns["group_index"].tolist(),
                execution_ids=batch.sample_columns["execution_id"],
                normalize=args.rewards_normalization,
                std_normalization=args.grpo_std_normalization,
            )
        flat = to_tokens(advantages.float(), lengths)
        if args.normalize_advantages:
            flat = whiten(flat, mask)
        batch.token_columns["advantages"] = flat

    def _train(
        self, batch: TokenBatch, schedule: Schedule, lrs: list[float]
    ) -> tuple[list[dict[str, float]], dict[int, torch.Tensor]]:
        parts, steps = [], []
        for dp_rank in range(self._dp_size):
            order = [i for step in schedule for m in step[dp_rank] for i in m]
            local = {i: n for n, i in enumerate(order)}
            parts.append(batch.select(order))
            steps.append([[[local[i] for i in m] for m in step[dp_rank]] for step in schedule])
        per_rank = [(parts[p.dp_rank], steps[p.dp_rank], lrs) for p in self._layout]
        results = self._workers.call("train", timeout=self._args.train_timeout, per_rank=per_rank)
        answers = [r for r in results if r is not None]
        return answers[0][0], {i: log_probs for _, kept in answers for i, log_probs in kept.items()}


def check_weights(workers: WorkerGroup, timeout: float) -> None:
    """Raise TrainingError, by name, if weights of the policy are not finite."""
    names = [name for names in workers.call("broken_weights", timeout=timeout) for name in names]
    if names:
        raise TrainingError(
            f"{len(names)} weights are not finite: {', '.join(names[:3])}",
            where="the policy in the training worker",
            remedy="load another checkpoint (--ckpt-step, --hf-checkpoint); if it happened on the way, lower --lr",
        )
