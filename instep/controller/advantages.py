"""From the rewards of a rollout to the column `advantages`: what depends on flags and hooks around `algorithms`.

Statistics over groups and over the rollout belong to the controller, because the samples of a group may lie on several
data-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from instep.algorithms.advantages import ESTIMATORS, Estimate, Estimator, Inputs
from instep.algorithms.advantages.dr_grpo import dr_grpo
from instep.algorithms.advantages.grpo import grpo
from instep.algorithms.advantages.tokens import penalised_rewards
from instep.algorithms.advantages.whitening import whiten
from instep.algorithms.kl import approx_kl
from instep.errors import RolloutError
from instep.hooks import load_function
from instep.types import Sample, TokenBatch


def add_advantages(batch: TokenBatch, samples: list[Sample], args: Any, hook_args: Any) -> None:
    """Set the token column `advantages`, and `returns` where the estimator has a critic (column `values`).

    Reads the sample column `rewards`, the token column `loss_mask`, with `--kl-coef` `log_probs` and `ref_log_probs`.

    Args:
        samples: of the batch, in order; hooks see them.
        hook_args: what hooks see of `args`.

    Raises:
        RolloutError: rewards or a hook's answer that no advantages can be made from.
    """
    where = f"--advantage-estimator {args.advantage_estimator}"
    try:
        estimate = _estimate(batch, samples, args, hook_args)
        for name, values in (("advantages", estimate.advantages), ("returns", estimate.returns)):
            if values is not None:
                batch.token_columns[name] = values.float()
    except ValueError as error:
        raise RolloutError(str(error), where=where, remedy="mend the rewards, or choose another estimator") from error


def _estimate(batch: TokenBatch, samples: list[Sample], args: Any, hook_args: Any) -> Estimate:
    estimator = ESTIMATORS[args.advantage_estimator]
    columns, lengths = batch.token_columns, batch.response_lengths.tolist()
    kl = None
    if args.kl_coef:
        kl = approx_kl(columns["log_probs"], columns["ref_log_probs"], args.kl_loss_type)
    inputs = Inputs(
        rewards=_rewards(batch, samples, kl, estimator, args, hook_args),
        loss_mask=columns["loss_mask"],
        response_lengths=lengths,
        kl=kl,
        values=columns.get("values"),
        kl_coef=args.kl_coef,
        gamma=args.gamma,
        lambd=args.lambd,
    )
    estimate = estimator.spread(inputs)
    if args.normalize_advantages or estimator.whitens:
        return estimate._replace(advantages=whiten(estimate.advantages, inputs.loss_mask))
    return estimate


def _rewards(
    batch: TokenBatch, samples: list[Sample], kl: torch.Tensor | None, estimator: Estimator, args: Any, hook_args: Any
) -> torch.Tensor:
    """Float64 `[num_samples]`: the rewards as the hook or the estimator compares them within groups."""
    if args.custom_reward_post_process_path:
        _, processed = load_function(args.custom_reward_post_process_path)(hook_args, samples)
        if len(processed) != batch.num_samples:
            raise RolloutError(
                f"{len(processed)} rewards came back for {batch.num_samples} samples",
                where=f"--custom-reward-post-process-path {args.custom_reward_post_process_path}",
                remedy="return (raw_rewards, rewards), one of each per sample",
            )
        return torch.as_tensor(processed, dtype=torch.float64)
    rewards = batch.sample_columns["rewards"].double()
    if kl is not None and estimator.kl == "sample":
        mask, lengths = batch.token_columns["loss_mask"], batch.response_lengths
        rewards = penalised_rewards(rewards, kl, mask, lengths.tolist(), args.kl_coef)
    if estimator.compare is None or not args.rewards_normalization:
        return rewards
    compare = dr_grpo if estimator.compare is grpo and not args.grpo_std_normalization else estimator.compare
    return compare(rewards, batch.sample_columns["group_index"], batch.sample_columns["execution_id"])
