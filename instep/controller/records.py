"""Records of rounds and evaluations besides their metrics: lines of samples.jsonl, and dumps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from instep.algorithms.catalog import algorithm_of
from instep.arguments.settings import HookSettings, Settings
from instep.controller import dumps
from instep.controller.round import Rollout, TrainedBatch
from instep.observability.run_logger import RunLogger
from instep.observability.samples import to_log
from instep.rollout.tokens import token_texts
from instep.types import Group, RolloutFnEvalOutput


class Records:
    """Write samples.jsonl and the dumps that the arguments ask for."""

    def __init__(self, args: Settings, hook_args: HookSettings, log: RunLogger):
        self._args = args
        self._log = partial(
            log.samples,
            limit=args.num_logged_samples,
            rewarded=algorithm_of(args).has_rewards,
            texts=partial(token_texts, hook_args),
        )

    def generated(self, rollout: Rollout, metrics: Mapping[str, float]) -> None:
        """Record a generated rollout; `metrics` come from the rollout function."""
        if self._args.save_debug_rollout_data:
            dumps.save_rollout(self._args.save_debug_rollout_data, rollout.rollout_id, rollout.groups, metrics)
        if self._args.debug_rollout_only:  # otherwise `trained` logs them with the trainer's log-probs
            self._log(rollout.rollout_id, rollout.groups, "train", reward_key=self._args.reward_key)

    def wanted(self, groups: list[Group]) -> set[int]:
        """Return the numbers (over all groups) of the samples whose log-probs and entropies `trained` needs."""
        logged = {id(s) for s in to_log(groups, self._args.num_logged_samples, self._args.reward_key)}
        samples = [s for group in groups for s in group]
        return {i for i, s in enumerate(samples) if self._args.save_debug_train_data or id(s) in logged}

    def trained(self, rollout: Rollout, trained: TrainedBatch | None) -> None:
        """Record a trained rollout; `trained` is None if the training failed."""
        samples = [s for group in rollout.groups for s in group]
        log_probs, entropies = dict[int, list[float]](), dict[int, list[float]]()
        if trained:
            for rows, column in ((trained.log_probs, log_probs), (trained.entropies, entropies)):
                column.update({id(samples[trained.sources[i]]): row.tolist() for i, row in rows.items()})
        log = partial(self._log, log_probs=log_probs, entropies=entropies)
        log(rollout.rollout_id, rollout.groups, "train", reward_key=self._args.reward_key)
        if trained and self._args.save_debug_train_data:
            dumps.save_train_data(self._args.save_debug_train_data, rollout.rollout_id, trained)

    def evaluated(self, rollout_id: int, output: RolloutFnEvalOutput) -> None:
        """Record an evaluation."""
        for name, result in output.data.items():
            key = next((d.reward_key for d in self._args.eval_datasets if d.name == name), None)
            key = key or self._args.reward_key
            self._log(rollout_id, [[s] for s in result["samples"]], f"eval/{name}", reward_key=key)
        if self._args.save_debug_rollout_data:
            dumps.save_evaluation(self._args.save_debug_rollout_data, rollout_id, output)
