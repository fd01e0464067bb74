"""Advantages from rewards: group-relative (GRPO), the KL penalty in the reward, and masked whitening."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

STD_EPS = 1e-6
WHITEN_EPS = 1e-8


def group_advantages(
    rewards: Tensor,
    group_index: Sequence[int] | Tensor,
    *,
    execution_ids: Sequence[Hashable | None] | None = None,
    normalize: bool = True,
    std_normalization: bool = True,
) -> Tensor:
    """GRPO's advantage (arXiv:2402.03300, section 4.1.2): (r - mean(group)) / (std(group) + 1e-6), std unbiased.

    Groups are found by `group_index`, never by position, so that order and group sizes are free. Fan-out siblings
    (equal `execution_ids`; None stands for an execution of its own) count once in the statistics, by their mean reward.

    Args:
        rewards: `[num_samples]`.
        group_index: the group of each sample.
        normalize: False returns the rewards as they are (`--disable-rewards-normalization`).
        std_normalization: False only subtracts the mean (Dr. GRPO, arXiv:2503.20783).

    Returns:
        `[num_samples]`, in the dtype of `rewards`; the statistics are taken in float64, so that equal rewards give 0.

    Raises:
        ValueError: lengths that differ, or a group with a single execution, whose advantage would always be 0.
    """
    if rewards.dim() != 1 or len(group_index) != rewards.numel():
        raise ValueError(f"rewards of shape {tuple(rewards.shape)} for {len(group_index)} group indices")
    if not normalize:
        return rewards.clone()
    ids = executions(execution_ids, len(group_index))
    groups: dict[int, dict[Hashable, list[int]]] = {}
    group_of = [int(g) for g in group_index]
    for i, (group, execution) in enumerate(zip(group_of, ids, strict=True)):
        groups.setdefault(group, {}).setdefault(execution, []).append(i)
    values = rewards.double()
    out = torch.empty_like(values)
    for group, members in groups.items():
        if len(members) < 2:
            raise ValueError(f"group {group} has a single execution; a group-relative advantage needs at least 2")
        rows = [i for siblings in members.values() for i in siblings]
        per_execution = torch.stack([values[siblings].mean() for siblings in members.values()])
        centred = values[rows] - per_execution.mean()
        out[rows] = centred / (per_execution.std() + STD_EPS) if std_normalization else centred
    return out.to(rewards.dtype)


def executions(execution_ids: Sequence[Hashable | None] | None, num_samples: int) -> list[Hashable]:
    """One key per sample; a sample without an id is an execution of its own."""
    if execution_ids is None:
        return list(range(num_samples))
    if len(execution_ids) != num_samples:
        raise ValueError(f"{len(execution_ids)} execution ids for {num_samples} samples")
    return [("sample", i) if e is None else ("id", e) for i, e in enumerate(execution_ids)]


def penalised_rewards(
    rewards: Tensor, kl: Tensor, loss_mask: Tensor, response_lengths: Sequence[int] | Tensor, kl_coef: float
) -> Tensor:
    """KL in the reward of an outcome-supervised estimator: r_i - kl_coef * sum_t m_t kl_t, before group normalisation.

    The choice follows verl's `apply_kl_penalty` (the penalty is taken off the token rewards) followed by its outcome
    advantage (which sums the token rewards of a response before it compares the group). Tool tokens (mask 0) are free.

    Args:
        rewards: `[num_samples]`.
        kl: `[num_response_tokens]`, any estimator of `algorithms.kl`, old policy against reference.
        loss_mask: `[num_response_tokens]`, 0 or 1.
        response_lengths: of each sample.

    Returns:
        `[num_samples]`, in the dtype of `rewards`.
    """
    keep = loss_mask > 0
    masked = torch.where(keep, kl, torch.zeros_like(kl)).double()
    lengths = [int(n) for n in response_lengths]
    penalty = torch.stack([part.sum() for part in masked.split(lengths)])
    return (rewards.double() - kl_coef * penalty).to(rewards.dtype)


def to_tokens(per_sample: Tensor, response_lengths: Sequence[int] | Tensor) -> Tensor:
    """`[num_samples]` -> `[num_response_tokens]`: each sample's value at each of its response tokens."""
    return per_sample.repeat_interleave(torch.as_tensor(response_lengths, device=per_sample.device))


def masked_moments(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sum, sum of squares, count) over the tokens with mask 1: float64 scalars, to be added up over ranks."""
    keep = mask > 0
    kept = torch.where(keep, values, torch.zeros_like(values)).double()
    return kept.sum(), kept.square().sum(), keep.sum().double()


def mean_and_variance(total: Tensor, total_squares: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance (count - 1; biased for a single value) from summed moments.

    Raises:
        ValueError: no token to take a mean of.
    """
    if count.item() < 1:
        raise ValueError("whitening needs at least one token with mask 1")
    mean = total / count
    variance = (total_squares / count - mean.square()).clamp(min=0)
    return mean, variance * count / (count - 1).clamp(min=1)


def whiten_with(values: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8); masked tokens are transformed too, their weight in the loss is 0."""
    return ((values.double() - mean) * (variance + WHITEN_EPS).rsqrt()).to(values.dtype)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Masked whitening on one process (`--normalize-advantages`), `[num_tokens]` -> `[num_tokens]`."""
    return whiten_with(values, *mean_and_variance(*masked_moments(values, mask)))
