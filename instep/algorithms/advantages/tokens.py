"""From samples to tokens and back: spreading a number, summing a KL, discounting along a response."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_tokens(per_sample: Tensor, response_lengths: Sequence[int] | Tensor) -> Tensor:
    """`[num_samples]` -> `[num_response_tokens]`: each sample's value at each of its response tokens."""
    return per_sample.repeat_interleave(torch.as_tensor(response_lengths, device=per_sample.device))


def penalised_rewards(
    rewards: Tensor, kl: Tensor, loss_mask: Tensor, response_lengths: Sequence[int] | Tensor, kl_coef: float
) -> Tensor:
    """KL in the reward of an estimator with one advantage per response: r_i - kl_coef * sum_t m_t kl_t.

    It comes before the comparison within the group, as in verl, whose `apply_kl_penalty` takes it off the token
    rewards and whose outcome advantages begin with their sum over a response. Tool tokens (mask 0) are free.

    Args:
        rewards: `[num_samples]`.
        kl: `[num_response_tokens]`, any estimator of `algorithms.kl`, old policy against reference.
        loss_mask: `[num_response_tokens]`, 0 or 1.
        response_lengths: of each sample.

    Returns:
        `[num_samples]`, in the dtype of `rewards`.
    """
    masked = torch.where(loss_mask > 0, kl, torch.zeros_like(kl)).double()
    penalty = torch.stack([part.sum() for part in masked.split([int(n) for n in response_lengths])])
    return (rewards.double() - kl_coef * penalty).to(rewards.dtype)


def discounted_sums(values: Tensor, lengths: Sequence[int], factor: float) -> Tensor:
    """G_t = v_t + factor * G_{t+1} within each sequence, G = 0 after its end.

    From the end of all sequences at once, so that there are as many passes as the longest has values, and no padding.

    Args:
        values: `[sum(lengths)]`, sequences one after another; a length may be 0.
    """
    out = values.clone()
    sizes, order = torch.as_tensor(lengths, dtype=torch.int64).sort(descending=True)
    ends = torch.as_tensor(lengths, dtype=torch.int64).cumsum(0)[order].to(values.device)
    at_least = sizes.tolist()
    for from_end in range(2, max(lengths, default=0) + 1):
        while at_least[-1] < from_end:
            at_least.pop()
        rows = ends[: len(at_least)] - from_end
        out[rows] += factor * out[rows + 1]
    return out
