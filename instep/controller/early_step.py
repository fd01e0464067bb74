"""The optimizer step of a rollout. It begins with finished groups while the engines generate the others.

    engines     | # responses                                              |
    workers     | .      # score and train 3, 5   .   # 0, 1   .           | # the rest, one step

The weights do not change meanwhile, and gradients are sums. Only one factor is unknown before the rollout ends: all its
samples share 1 / (their number), or 1 / (their tokens) with --calculate-per-token-loss. The gradients are multiplied by
it at the end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection

import torch

from instep.algorithms.catalog import algorithm_of
from instep.arguments.settings import Settings
from instep.controller.role import Metrics, RoleTrainer
from instep.errors import ConfigError, RolloutError
from instep.system.hooks.neighbours import is_own
from instep.types import Sample, Schedule, TokenBatch

OF_ALL = (  # hooks that see or change all samples of a rollout at once, or a step before its gradients
    "rollout_sample_filter_path rollout_all_samples_process_path custom_convert_samples_to_train_data_path "
    "custom_reward_post_process_path custom_advantage_function_path rollout_data_postprocess_path "
    "custom_megatron_before_train_step_hook_path"
).split()


def scores_early(args: Settings) -> bool:
    """Return whether the trainer is idle while engines generate, has its GPUs, and may score in several calls."""
    is_there = args.command == "train" and not (args.offload_train or args.offload_rollout)
    of_all = args.custom_megatron_before_log_prob_hook_path or args.use_routing_replay  # they need one single call
    # A sample's bits change with the other samples of its micro-batch.
    return is_there and not (args.deterministic_mode or of_all or args.use_rollout_routing_replay)


def why_not(args: Settings, samples_multiple: int = 1) -> str:
    """Return why a step cannot begin before the end of its rollout and stay the same; empty if it can.

    Args:
        samples_multiple: the ranks share this many samples evenly.
    """
    algorithm = algorithm_of(args)
    reasons = {
        "trainer and engines take turns, or a rollout must be one call": not scores_early(args),
        "a rollout has several steps": args.num_steps_per_rollout != 1,
        "the critic's values and returns": algorithm.has_critic,
        "advantages are whitened over the rollout": args.normalize_advantages
        or (algorithm.estimator is not None and algorithm.estimator.whitens),
        "a served model scores the rollout": args.ref_served_model is not None
        or (args.use_opd and args.opd_type != "model"),
        "a loss of the user": args.loss_type != "policy_loss",
        "a hook sees all samples": any(getattr(args, name) for name in OF_ALL),
        "a rollout function of the user": not is_own(args.rollout_function_path),
        "losses and biases of routers need all tokens of the step": args.moe_aux_loss_coeff
        or args.moe_z_loss_coeff
        or args.moe_router_bias_update_rate
        or any(name.startswith("moe_") for name in args.megatron_overrides),
        "ranks do not share a step's samples evenly": (args.global_batch_size or 0) % samples_multiple,
    }
    return next((why for why, holds in reasons.items() if holds), "")


class EarlyStep:
    """The step of one rollout; its first part is computed before the rollout ends.

    Args:
        num_groups: the groups of the rollout; the last ones wait for its end.
        complete: adds the columns that the loss reads to a batch of scored samples; their weights do not have the
            factor yet that all samples of the step share.

    Attributes:
        seconds: the workers' time for the early part.
    """

    def __init__(
        self,
        actor: RoleTrainer,
        rollout_id: int,
        num_groups: int,
        complete: Callable[[TokenBatch, list[Sample]], object],
    ):
        self.actor, self._rollout_id, self._complete = actor, rollout_id, complete
        self._token = secrets.token_hex(8)  # a repeated rollout has the same id
        self._num_left = num_groups
        self._parts: list[tuple[list[Sample], TokenBatch]] = []
        self._rows: dict[int, torch.Tensor] = {}  # log-probs and entropies, by id of the sample
        self.seconds = 0.0

    def begin(self, num_groups: int, samples: list[Sample], batch: TokenBatch) -> None:
        """Compute the gradients of finished groups, unless these are the last ones."""
        if num_groups >= self._num_left:
            return
        try:
            self._complete(batch, samples)
        except RolloutError:
            return  # the end of the rollout raises it, unless a hook repairs the samples first
        began = time.monotonic()
        rows = self.actor.begin_step(batch, self.actor.plan(batch, num_steps=1), self._token)()
        self.seconds += time.monotonic() - began
        self._num_left -= num_groups
        self._parts.append((samples, batch))
        self._rows.update({id(samples[i]): row for i, row in rows.items()})

    def train_rest(
        self,
        batch: TokenBatch,
        samples: list[Sample],
        schedule: Schedule,
        num_steps_before: int,
        keep: Collection[int],
        gap_limit: float,
    ) -> Callable[[], tuple[list[Metrics], dict[int, torch.Tensor]]]:
        """Begin `RoleTrainer.train` for the whole rollout, but compute only what is not computed yet.

        If early samples are no longer a part of the rollout, drop the early part and compute everything.
        """
        left = self._left(batch, samples) if len(schedule) == 1 else []
        train, more = self.actor.train, (gap_limit, self._rollout_id)
        if not left:
            return train(batch, schedule, num_steps_before, keep, *more)
        part = batch.select(left)
        try:
            rest = self.actor.plan(part, num_steps=1)
        except ConfigError:  # ranks cannot share it evenly, after fan-out
            return train(batch, schedule, num_steps_before, keep, *more)
        place = {i: n for n, i in enumerate(left)}
        of_rest = {place[i] for i in keep if i in place}
        wait = train(part, rest, num_steps_before, of_rest, *more, scale=float(batch.sample_columns["loss_scale"][0]))

        def finish() -> tuple[list[Metrics], dict[int, torch.Tensor]]:
            steps, kept = wait()
            known = {i: self._rows[id(samples[i])] for i in keep if i not in place}
            return steps, known | {left[n]: row for n, row in kept.items()}

        return finish

    def _left(self, batch: TokenBatch, samples: list[Sample]) -> list[int]:
        """Return the samples that are not computed yet; none if an early sample is gone or has changed."""
        place = {id(sample): i for i, sample in enumerate(samples)}
        begun = [[place.get(id(sample), -1) for sample in ours] for ours, _ in self._parts]
        if not begun or any(-1 in part for part in begun):
            return []
        scale = float(batch.sample_columns["loss_scale"][0])
        for found, (_, part) in zip(begun, self._parts, strict=True):
            if not _same(_columns(part, scale), _columns(batch.select(found), 1.0)):
                return []
        return sorted({*range(len(samples))}.difference(*begun))


def _columns(batch: TokenBatch, scale: float) -> dict[str, torch.Tensor]:
    """Return all columns that the loss of the samples depends on, by name."""
    own = {"tokens": batch.tokens, "lengths": batch.response_lengths, "total": batch.total_lengths}
    own["temperature"] = batch.sample_columns["temperature"]
    own["older"] = torch.zeros_like(batch.token_columns["loss_mask"])
    return own | batch.token_columns | {"loss_weights": batch.token_columns["loss_weights"] * scale}


def _same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    if before.keys() != after.keys() or any(before[name].shape != x.shape for name, x in after.items()):
        return False
    # Other samples in the batch change the rounding of a sum; weights may be tiny.
    atol = {name: 0.0 if name == "loss_weights" else 1e-6 for name in after}
    return all(
        torch.equal(before[n], x)  # ten times faster than allclose; false with a NaN
        or (x.is_floating_point() and torch.allclose(before[n], x, rtol=1e-5, atol=atol[n], equal_nan=True))
        for n, x in after.items()
    )
