"""Compute the column `advantages` of a rollout from its rewards, with the estimator and hooks that the flags name.

The controller computes it: statistics cover groups and the rollout, and a group may be spread over data-parallel ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from instep.algorithms.advantages import ESTIMATORS, Estimate, Inputs
from instep.algorithms.advantages.groups import dr_grpo
from instep.algorithms.advantages.tokens import distilled_advantages, overlong_penalty, penalised_rewards, whiten
from instep.algorithms.catalog import Estimator, algorithm_of
from instep.algorithms.kl import approx_kl
from instep.arguments.settings import AlgorithmSettings, HookSettings, Settings
from instep.errors import RolloutError
from instep.system.hooks import Hook
from instep.types import Sample, TokenBatch, as_number, name_of

_HOOK_COLUMNS = ("log_probs", "ref_log_probs", "teacher_log_probs", "rollout_log_probs", "values")


def add_advantages(
    batch: TokenBatch, samples: list[Sample], args: Settings, hook_args: HookSettings
) -> dict[str, float]:
    """Set the token column `advantages`, and `returns` where the estimator has a critic (column `values`).

    Read the sample column `rewards` and the token column `loss_mask`; with `--kl-coef` also `log_probs` and
    `ref_log_probs`; with `--use-opd` also `log_probs` and `teacher_log_probs`. The order is: penalty on overlong
    responses, KL, comparison within groups, advantages of tokens, distance to the teacher, whitening.

    Args:
        samples: the samples of the batch, in its order; hooks get them.
        hook_args: the view of `args` that hooks get.

    Returns:
        The metrics of the rollout that are computed here, by full name.

    Raises:
        RolloutError: the rewards, or what a hook returned, give no advantages.
    """
    metrics: dict[str, float] = {}
    columns, lengths, mask = batch.token_columns, batch.response_lengths, batch.token_columns["loss_mask"]
    rewards, kl = batch.sample_columns["rewards"].double(), None
    estimator = algorithm_of(args).estimator
    assert estimator is not None, "the round asks for advantages only where the algorithm has rewards"
    if args.overlong_buffer_len is not None and args.rollout_max_response_len is not None:
        penalty = overlong_penalty(
            lengths,
            max_response_len=args.rollout_max_response_len,
            buffer_len=args.overlong_buffer_len,
            factor=args.overlong_penalty_factor,
        )
        rewards = rewards + penalty
        metrics["train/overlong_penalty"] = penalty.mean().item()
    if args.kl_coef:
        kl = approx_kl(columns["log_probs"], columns["ref_log_probs"], args.kl_loss_type)
        metrics["train/reward_kl"] = kl[mask > 0].sum().item() / max(1, int((mask > 0).sum()))
    try:
        inputs = Inputs(
            rewards=_compared(estimator, batch, rewards, kl, samples, args, hook_args),
            loss_mask=mask,
            response_lengths=lengths.tolist(),
            kl=kl,
            values=columns.get("values"),
            kl_coef=args.kl_coef,
            gamma=args.gamma,
            lambd=args.lambd,
        )
        if args.custom_advantage_function_path is not None:
            estimate = _custom(batch, inputs, samples, args, hook_args)
        else:
            estimate = ESTIMATORS[estimator.name].spread(inputs)
        if args.use_opd:
            pair = columns["log_probs"], columns["teacher_log_probs"]
            distilled = distilled_advantages(estimate.advantages, *pair, args.opd_kl_coef)
            estimate = estimate._replace(advantages=distilled)
            gap = (pair[0] - pair[1])[mask > 0].double()
            metrics["train/opd_reverse_kl"] = gap.mean().item() if gap.numel() else 0.0
        if args.normalize_advantages or estimator.whitens:
            estimate = estimate._replace(advantages=whiten(estimate.advantages, mask))
    except ValueError as error:
        remedy = "correct the rewards or the rollout function, or choose another estimator"
        raise RolloutError(str(error), where=_where(args), remedy=remedy) from error
    for name, values in (("advantages", estimate.advantages), ("returns", estimate.returns)):
        if values is not None:
            _check_finite(name, values, batch, args)
            columns[name] = values.float()
    return metrics


def _compared(
    estimator: Estimator,
    batch: TokenBatch,
    rewards: Tensor,
    kl: Tensor | None,
    samples: list[Sample],
    args: Settings,
    hook_args: HookSettings,
) -> Tensor:
    """Return the rewards, compared within groups by a hook or the estimator: float64 `[num_samples]`."""
    if args.custom_convert_samples_to_train_data_path:
        return rewards
    if args.custom_reward_post_process_path:
        hook = Hook("--custom-reward-post-process-path", args.custom_reward_post_process_path)
        return torch.tensor(processed_rewards(hook, hook.call(hook_args, samples), samples), dtype=torch.float64)
    if kl is not None and not estimator.kl_on_tokens:
        lengths = batch.response_lengths.tolist()
        rewards = penalised_rewards(rewards, kl, batch.token_columns["loss_mask"], lengths, args.kl_coef)
    compare = ESTIMATORS[estimator.name].compare
    if compare is None or not args.rewards_normalization:
        return rewards
    compare = dr_grpo if estimator.divides_by_std and not args.grpo_std_normalization else compare
    return compare(rewards, batch.sample_columns["group_index"], batch.sample_columns["execution_id"])


def processed_rewards(hook: Hook, answer: Any, samples: list[Sample]) -> list[float]:
    """Return the rewards from the answer of `--custom-reward-post-process-path`: (raw_rewards, rewards)."""
    expected = f"(raw_rewards, rewards), one of each for {len(samples)} samples"
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise hook.wrong(answer, expected)
    with hook.reading(answer, expected):
        values = list(answer[1])
    if len(values) != len(samples):
        raise hook.wrong(answer[1], expected, f"{len(values)} rewards for {len(samples)} samples")
    rewards = []
    for sample, value in zip(samples, values, strict=True):
        if (number := as_number(value)) is None:
            raise hook.wrong(value, "rewards that are finite numbers", name_of(sample))
        rewards.append(number)
    return rewards


def _custom(
    batch: TokenBatch, inputs: Inputs, samples: list[Sample], args: AlgorithmSettings, hook_args: HookSettings
) -> Estimate:
    """Call `--custom-advantage-function-path`: fn(args, rollout_data) sets "advantages" (and "returns") in the data.

    `rollout_data` has lists with one entry per sample, under slime's names: token columns as tensors
    `[response_length]`; `tokens` as a tensor `[total_length]`; `samples`; sample columns, with those of the user.
    """
    path, lengths = str(args.custom_advantage_function_path), inputs.response_lengths
    kl = torch.zeros_like(inputs.loss_mask) if inputs.kl is None else inputs.kl
    columns = {"loss_masks": inputs.loss_mask, "kl": kl}
    columns |= {name: batch.token_columns[name] for name in _HOOK_COLUMNS if name in batch.token_columns}
    rollout_data: dict[str, Any] = dict(batch.sample_columns)
    rollout_data |= {name: list(flat.split(lengths)) for name, flat in columns.items()}
    rollout_data |= {
        "samples": samples,
        "tokens": list(batch.tokens.split(batch.total_lengths.tolist())),
        "total_lengths": batch.total_lengths.tolist(),
        "response_lengths": lengths,
        "raw_reward": batch.sample_columns.get("raw_reward", batch.sample_columns["rewards"]).tolist(),
        "rewards": inputs.rewards.tolist(),
    }
    hook = Hook("--custom-advantage-function-path", path)
    hook.call(hook_args, rollout_data, where=f"rollout_data has {', '.join(sorted(rollout_data))}")
    found = [_flat(rollout_data.get(name), name, lengths, hook) for name in ("advantages", "returns")]
    if found[0] is None:
        remedy = 'set rollout_data["advantages"] to one tensor per sample'
        raise RolloutError("it set no advantages", where=hook.place(), remedy=remedy)
    if found[1] is None and inputs.values is not None:
        remedy = 'also set rollout_data["returns"], for example advantages + values'
        raise RolloutError("it set no returns, and the critic needs them", where=hook.place(), remedy=remedy)
    return Estimate(found[0], found[1])


def _flat(rows: Any, name: str, lengths: list[int], hook: Hook) -> Tensor | None:
    if rows is None:
        return None
    remedy = "one tensor per sample, one number per response token"
    with hook.reading(rows, remedy, name):
        tensors = [torch.as_tensor(row).detach().double() for row in rows]
    shapes = [tuple(row.shape) for row in tensors]
    if shapes != [(n,) for n in lengths]:
        wrong = next((i for i, (s, n) in enumerate(zip(shapes, lengths, strict=False)) if s != (n,)), None)
        what = f"{name} of {len(shapes)} samples, not {len(lengths)}"
        if wrong is not None:
            what = f"{name}[{wrong}] has the shape {shapes[wrong]} for {lengths[wrong]} response tokens"
        raise RolloutError(what, where=hook.place(), remedy=remedy)
    return torch.cat(tensors)


def _check_finite(name: str, values: Tensor, batch: TokenBatch, args: Settings) -> None:
    if math.isfinite(values.sum()):  # then all values are finite; a sum of finite values may overflow
        return
    bad = ~values.isfinite() & (batch.token_columns["loss_mask"] > 0)
    if not bool(bad.any()):
        return
    row = int((batch.response_lengths.cumsum(0) <= int(bad.nonzero()[0])).sum())
    group, index = (int(batch.sample_columns[column][row]) for column in ("group_index", "index"))
    raise RolloutError(
        f"the {name} of {int(bad.sum())} trained tokens are not finite",
        where=f"group {group}, sample {index}; {_where(args)}",
        remedy="look at the rewards and log-probs of this sample: the values are computed from them",
    )


def _where(args: AlgorithmSettings) -> str:
    if args.custom_advantage_function_path:
        return f"--custom-advantage-function-path {args.custom_advantage_function_path}"
    return f"--advantage-estimator {args.advantage_estimator}"
