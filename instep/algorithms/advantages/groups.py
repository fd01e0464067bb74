"""Advantages relative to the rewards of a group; fan-out siblings of one execution count once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

STD_EPS = 1e-6  # of GRPO
ExecutionIds = Sequence[Hashable | None] | None
Compare = Callable[[Tensor, Sequence[int] | Tensor, ExecutionIds], Tensor]
# (rewards of a group's samples `[n]`, the mean reward of each one's execution `[n]`, that of all executions `[k]`)
Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


def relative_to_group(
    rewards: Tensor, group_index: Sequence[int] | Tensor, execution_ids: ExecutionIds, formula: Formula
) -> Tensor:
    """Apply `formula` to each group separately.

    Groups are found by `group_index`, never by position, so any order and any group sizes are possible. Fan-out
    siblings (equal `execution_ids`; a sample with None is one execution) count once in the statistics, with their mean
    reward.

    Args:
        rewards: `[num_samples]`.
        group_index: the group of each sample.

    Returns:
        `[num_samples]`, in the dtype of `rewards`, without gradient; computed in float64, so equal rewards give 0.

    Raises:
        ValueError: lengths differ, or a group has a single execution: its advantage would always be 0.
    """
    if rewards.dim() != 1 or len(group_index) != rewards.numel():
        raise ValueError(f"rewards of shape {tuple(rewards.shape)} for {len(group_index)} group indices")
    found: dict[tuple[int, Hashable], int] = {}  # the executions, by group and name
    rows: dict[int, list[int]] = {}
    members: dict[int, list[int]] = {}
    of_sample: list[int] = []
    for i, (index, name) in enumerate(zip(group_index, executions(execution_ids, len(group_index)), strict=True)):
        group = int(index)
        if (group, name) not in found:
            found[group, name] = len(found)
            members.setdefault(group, []).append(found[group, name])
        rows.setdefault(group, []).append(i)
        of_sample.append(found[group, name])
    values, execution = rewards.detach().double(), torch.tensor(of_sample, device=rewards.device)
    totals = values.new_zeros(len(found)).index_add_(0, execution, values)
    means = totals / execution.bincount(minlength=len(found))
    if alone := [group for group, names in members.items() if len(names) < 2]:
        raise ValueError(f"group {alone[0]} has a single execution; a group-relative advantage needs at least 2")
    if not rows:
        return rewards.detach().clone()
    order = torch.tensor([i for siblings in rows.values() for i in siblings], device=rewards.device)
    all_of = torch.tensor([e for own in members.values() for e in own], device=rewards.device)
    sizes, counts = [len(siblings) for siblings in rows.values()], [len(own) for own in members.values()]
    parts = values[order].split(sizes), means[execution[order]].split(sizes), means[all_of].split(counts)
    out = torch.empty_like(values)
    out[order] = torch.cat([formula(*part) for part in zip(*parts, strict=True)])
    return out.to(rewards.dtype)


def executions(execution_ids: ExecutionIds, num_samples: int) -> list[Hashable]:
    """Return one key per sample; a sample without an id is a separate execution."""
    if execution_ids is None:
        return list(range(num_samples))
    if len(execution_ids) != num_samples:
        raise ValueError(f"{len(execution_ids)} execution ids for {num_samples} samples")
    return [("sample", i) if e is None else ("id", e) for i, e in enumerate(execution_ids)]


def grpo(rewards: Tensor, group_index: Sequence[int] | Tensor, execution_ids: ExecutionIds = None) -> Tensor:
    """Compute A_i = (r_i - mean(group)) / (std(group) + 1e-6), std unbiased (arXiv:2402.03300, section 4.1.2).

    GSPO, CISPO, SAPO and DAPO have this advantage, too: they differ in the loss or in the data. Arguments, result and
    errors of all these functions are those of `relative_to_group`.
    """
    return relative_to_group(
        rewards, group_index, execution_ids, lambda r, own, all_: (r - all_.mean()) / (all_.std() + STD_EPS)
    )


def dr_grpo(rewards: Tensor, group_index: Sequence[int] | Tensor, execution_ids: ExecutionIds = None) -> Tensor:
    """Compute A_i = r_i - mean(group) (arXiv:2503.20783).

    A division by the std would give more weight to questions that are almost always or almost never solved.
    """
    return relative_to_group(rewards, group_index, execution_ids, lambda r, own, all_: r - all_.mean())


def rloo(rewards: Tensor, group_index: Sequence[int] | Tensor, execution_ids: ExecutionIds = None) -> Tensor:
    """Compute A_i = r_i - mean(r_j, j != i, of the group), unbiased (arXiv:2402.14740).

    A fan-out sample is compared with the other executions.
    """
    return relative_to_group(
        rewards, group_index, execution_ids, lambda r, own, all_: r - (all_.sum() - own) / (all_.numel() - 1)
    )


def max_rl(rewards: Tensor, group_index: Sequence[int] | Tensor, execution_ids: ExecutionIds = None) -> Tensor:
    """Compute A_i = (r_i - mean(group)) / mean(group), 0 if the mean is 0 (arXiv:2602.02710).

    For rewards of 0 and 1 with K successes of N this is N/K - 1 for a success and -1 for a failure: the mean of the
    score function over the successes minus its mean over all samples, a control variate. With more samples, the policy
    gradient converges to maximum likelihood of success.

    Raises:
        ValueError: also for a negative reward: then the mean is not a success rate.
    """
    if bool((rewards < 0).any()):
        row = int((rewards < 0).nonzero()[0])
        raise ValueError(f"the reward {rewards[row].item():g} (group {int(group_index[row])}) is below 0; max_rl needs "
                         "rewards of success, from 0 to 1")  # fmt: skip

    def formula(r: Tensor, own: Tensor, all_: Tensor) -> Tensor:
        mean = all_.mean()
        return (r - mean) / mean if mean > 0 else torch.zeros_like(r)

    return relative_to_group(rewards, group_index, execution_ids, formula)
