"""The values of a round, which the loop passes on (Rollout, then TrainedRollout), and the training on one rollout.

The controller stores nothing of a round, so that a rollout may run ahead of the training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

import torch

from instep.algorithms.catalog import algorithm_of, uses_reference
from instep.algorithms.losses.policy import flags_that_compare
from instep.algorithms.reductions import loss_scales, loss_weights
from instep.arguments.settings import HookSettings, Settings
from instep.controller.advantage_columns import add_advantages
from instep.controller.early import Early
from instep.controller.early_step import EarlyStep, scores_early, why_not
from instep.controller.role import Metrics, RoleTrainer
from instep.controller.round_metrics import critic_metrics
from instep.data.batch import build_batch, older_tokens
from instep.data.conversion import FLAG, read_conversion
from instep.data.schedule import steps_of_samples
from instep.errors import RolloutError
from instep.rollout.outputs import flatten
from instep.rollout.scorer import ServedScorer, served_reference
from instep.rollout.teacher import served_teacher
from instep.system.hooks import Hook
from instep.system.processes import watched
from instep.system.spans import span
from instep.training.gap import COLUMN as FRESH
from instep.training.gap import fresh_tokens
from instep.types import Group, Sample, TokenBatch


@dataclass
class Rollout:
    """The result of `Controller.generate`.

    Attributes:
        groups: with rewards, in training order; they are finished in the ledger.
        metrics: `rollout/*` and the metrics of the rollout function.
        seconds: the duration of each phase of the rollout, by name.
        early: what the trainer computed during the rollout.
    """

    rollout_id: int
    groups: list[Group]
    metrics: Metrics
    seconds: dict[str, float]
    early: Early | None = None

    @property
    def num_response_tokens(self) -> int:
        return sum(sample.response_length for group in self.groups for sample in group)


@dataclass
class TrainedRollout:
    """The result of `Controller.train`.

    Attributes:
        metrics: `train/*` and `critic/*`.
        seconds: the duration of each phase of the training, by name.
        num_tokens: the tokens of prompts and responses.
    """

    metrics: Metrics
    seconds: dict[str, float]
    num_tokens: int


@dataclass
class Step:
    """A finished round: trained, sent to the engines, and saved and evaluated if its turn has come.

    Attributes:
        samples: by group, with rewards, as they were trained.
        metrics: the row of metrics.jsonl.
        evaluation: `eval/*`, if the policy was evaluated after this round.
    """

    rollout_id: int
    samples: list[Group]
    metrics: Metrics
    evaluation: Metrics


@dataclass
class TrainedBatch:
    """A trained batch, and the results of the workers.

    Attributes:
        steps: the metrics of each optimizer step of the actor; empty if only the critic was trained.
        metrics: of the rollout as a whole, by full name; includes `critic/*`.
        batch: all samples as the workers got them.
        step_of_sample: the optimizer step of each sample.
        log_probs: the trainer's log-probs, float32 `[response_length]`, with the weights at the start of the round, by
            number of each requested sample. A sample of a later step has them only if the rollout was scored first.
        entropies: of the policy at each response token, as the sample's step found it; float32 `[response_length]`.
        sources: the number of each sample in the rollout; -1 for a sample that the user's conversion made.
        num_critic_steps: optimizer steps of the critic.
    """

    steps: list[Metrics]
    metrics: Metrics
    batch: TokenBatch
    step_of_sample: list[int]
    log_probs: dict[int, torch.Tensor]
    sources: list[int]
    num_critic_steps: int = 0
    entropies: dict[int, torch.Tensor] = field(default_factory=dict)


class TrainingRound:
    """Run the optimizer steps of one rollout on the workers of the actor, and of PPO's critic.

    Args:
        hook_args: the view of `args` that hooks get.
    """

    def __init__(self, args: Settings, hook_args: HookSettings, actor: RoleTrainer, critic: RoleTrainer | None = None):
        self._args, self._hook_args = args, hook_args
        self._actor, self._critic = actor, critic
        self._has_rewards = algorithm_of(args).has_rewards
        self._teacher = served_teacher(args)
        self.uses_reference = uses_reference(args)

    def run(
        self,
        groups: list[Group],
        num_steps_before: int,
        keep: Collection[int] = (),
        *,
        num_critic_steps_before: int = 0,
        critic_only: bool = False,
        version: int = 0,
        gap_limit: float = math.inf,
        rollout_id: int = 0,
        early: Early | None = None,
    ) -> TrainedBatch:
        """Train on one rollout.

        Args:
            num_steps_before: optimizer steps of the actor so far, in the whole run.
            keep: numbers of the rollout's samples (over all groups) whose log-probs and entropies the caller wants.
            critic_only: the actor is not trained.
            version: the version of the workers' weights on the engines; 0: no engine has these weights.
            gap_limit: the largest mean log-prob gap of this version's tokens for which the actor is trained.
            early: results that were computed during the rollout.

        Raises:
            SyncError: the gap is above `gap_limit`.
        """
        args = self._args
        with span("batch"):
            batch, samples, sources = self._batch(groups)
        keep = {i for i, number in enumerate(sources) if number in keep}
        schedule = self._actor.plan(batch)
        step_of_sample = steps_of_samples(schedule, batch.num_samples)
        self._mark(batch, samples, version)
        self._weigh(batch, step_of_sample)
        out = TrainedBatch([], {}, batch, step_of_sample, {}, sources)
        critic_schedule = self._critic.plan(batch) if self._critic is not None else []
        wanted = self._scored_names(0 if critic_only else len(schedule))
        wanted = [name for name in wanted if name not in batch.token_columns]  # a conversion may bring them
        names, score = self._own(wanted), RoleTrainer.score if early is None else early.score_rest
        began, num_columns = time.monotonic(), len(batch.token_columns)
        scores = [score(self._actor, batch, schedule, names)] if names else []
        if self._critic is not None:
            scores.append(score(self._critic, batch, critic_schedule, ["values"]))
        if self._teacher is not None and "teacher_log_probs" not in batch.token_columns:  # while the workers score
            batch.token_columns["teacher_log_probs"] = self._ask(self._teacher, batch)
        if "ref_log_probs" in wanted and (reference := served_reference(args, self._hook_args)) is not None:
            batch.token_columns["ref_log_probs"] = self._ask(reference, batch)
        for finish in scores:
            finish()
        if len(batch.token_columns) > num_columns:
            out.metrics["perf/log_probs_seconds"] = time.monotonic() - began
        if self._has_rewards:
            with span("advantages"):
                out.metrics |= add_advantages(batch, samples, args, self._hook_args)
        critic = None
        if self._critic is not None:
            critic = self._critic.train(batch, critic_schedule, num_critic_steps_before, rollout_id=rollout_id)
        scored = batch.token_columns.get("log_probs")
        if scored is not None:
            rows = scored.split(batch.response_lengths.tolist())
            out.log_probs = {i: rows[i] for i in keep}
        if not critic_only:
            given = schedule, num_steps_before, keep, gap_limit
            if early is not None and early.step is not None:
                finish_steps = early.step.train_rest(batch, samples, *given)
            else:
                finish_steps = self._actor.train(batch, *given, rollout_id)
            out.steps, kept = finish_steps()
            out.log_probs = out.log_probs or {i: row[0] for i, row in kept.items() if step_of_sample[i] == 0}
            out.entropies = {i: row[1] for i, row in kept.items()}
        if critic is not None:
            steps, _ = critic()
            out.num_critic_steps = len(steps)
            out.metrics |= critic_metrics(steps, batch)
        return out

    def early(self, rollout_id: int, version: int, *, critic_only: bool = False) -> Early | None:
        """Return the work that the workers may do during a rollout (see `scores_early` and `why_not`), or None.

        `rollout_id`, `version` and `critic_only` are those of `run`."""
        args, step = self._args, None
        names = self._own(self._scored_names(0 if critic_only else args.num_steps_per_rollout or 1))
        if not why_not(args, self._actor.samples_multiple):
            complete = partial(self._complete, version=version)
            step = EarlyStep(self._actor, rollout_id, args.rollout_batch_size, complete)
        wanted = [(self._actor, names)] if names or step is not None else []
        if self._critic is not None:
            wanted.append((self._critic, ["values"]))
        if not wanted or not scores_early(args):
            return None
        return Early(wanted, partial(self._build, needs_reward=step is not None), step)

    def _complete(self, batch: TokenBatch, samples: list[Sample], *, version: int) -> None:
        """Add to scored samples what `run` adds to the whole rollout; see `EarlyStep`."""
        self._mark(batch, samples, version)
        self._weigh(batch, [0] * batch.num_samples)
        scales = batch.sample_columns["loss_scale"]
        batch.token_columns["loss_weights"] /= scales[0]
        batch.sample_columns["loss_scale"] = torch.ones_like(scales)
        add_advantages(batch, samples, self._args, self._hook_args)

    def _mark(self, batch: TokenBatch, samples: list[Sample], version: int) -> None:
        """Add the columns that say which weights generated a token."""
        if version and "rollout_log_probs" in batch.token_columns:
            batch.token_columns[FRESH] = fresh_tokens(samples, version)
        if version and self._has_rewards and bool((older := older_tokens(batch, version, samples)).any()):
            batch.token_columns["older"] = older

    def _own(self, names: list[str]) -> list[str]:
        """Return the `names` that the actor's workers compute."""
        return names if self.uses_reference else [name for name in names if name != "ref_log_probs"]

    def _weigh(self, batch: TokenBatch, step_of_sample: list[int]) -> None:
        """Add `loss_weights` and `loss_scale`: with them a step's loss is a mean, for any split into micro-batches."""
        mask, lengths = batch.token_columns["loss_mask"], batch.response_lengths.tolist()
        shares = mask, lengths, step_of_sample, batch.sample_columns["execution_id"]
        per_token = self._args.calculate_per_token_loss
        batch.token_columns["loss_weights"] = loss_weights(
            *shares,
            per_token=per_token,
            constant_length=self._args.constant_loss_length,
            tokens_of_execution=batch.sample_columns.get("rollout_mask_sums"),
        )
        batch.sample_columns["loss_scale"] = loss_scales(*shares, per_token=per_token)

    def _batch(self, groups: list[Group]) -> tuple[TokenBatch, list[Sample], list[int]]:
        """Return the batch of a rollout, its samples, and their numbers in the rollout (`TrainedBatch.sources`)."""
        args, samples = self._args, [sample for group in groups for sample in flatten(group)]
        if args.custom_convert_samples_to_train_data_path is None:
            return self._build(groups, needs_reward=self._has_rewards), samples, list(range(len(samples)))
        hook = Hook(FLAG, args.custom_convert_samples_to_train_data_path)
        answer = hook.call(self._hook_args, list(samples))
        made = read_conversion(
            hook, answer, samples, needs_reward=self._has_rewards, global_batch_size=args.global_batch_size
        )
        try:
            batch = self._build([[sample] for sample in made.samples], needs_reward=False)
        except RolloutError as error:
            error.where = hook.place(error.where)
            raise
        batch.token_columns |= made.token_columns
        batch.sample_columns |= made.sample_columns
        return batch, made.samples, made.sources

    def _build(self, groups: list[Group], *, needs_reward: bool) -> TokenBatch:
        args = self._args
        return build_batch(
            groups,
            needs_reward=needs_reward,
            reward_key=args.reward_key,
            default_temperature=args.rollout_temperature if self._has_rewards else 1.0,  # without sampling
            replays=args.use_rollout_routing_replay,
            compares=" and ".join(flags_that_compare(algorithm_of(args).loss.name, args)),
        )

    def _ask(self, scorer: ServedScorer, batch: TokenBatch) -> torch.Tensor:
        """Get the log-probs of a served model; if a process of the run dies meanwhile, the error names it."""
        return watched(lambda: scorer.log_probs(batch), f"asks {scorer.name}", self._actor.workers.watch)

    def _scored_names(self, num_steps: int) -> list[str]:
        """Return the names of the needed log-probs. With one on-policy step the old policy is the current one."""
        args = self._args
        if not self._has_rewards:
            return ["ref_log_probs"] if self.uses_reference else []
        names = ["ref_log_probs"] if args.kl_coef or (args.use_kl_loss and num_steps) else []
        # A loss of the user may always read old log-probs.
        differs = num_steps > 1 or (args.loss_type == "custom_loss" and num_steps > 0)
        shown = args.custom_advantage_function_path or args.rollout_data_postprocess_path
        compares = args.kl_coef or args.use_opd or shown
        if (differs and not args.use_rollout_logprobs) or compares:
            names.append("log_probs")
        if args.use_opd and args.opd_type == "model":
            names.append("teacher_log_probs")
        return names
