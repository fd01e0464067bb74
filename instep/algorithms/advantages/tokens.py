"""The KL in the reward of a response, the rewards of its tokens, and discounted sums over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.algorithms.segments import segment_sum


def penalised_rewards(
    rewards: Tensor, kl: Tensor, loss_mask: Tensor, response_lengths: Sequence[int] | Tensor, kl_coef: float
) -> Tensor:
    """Compute rewards with a KL penalty, for estimators with one advantage per response: r_i - kl_coef * sum_t m_t
    kl_t.

    The penalty is applied before the comparison within the group, as in verl: its `apply_kl_penalty` subtracts it from
    token rewards, and its outcome advantages start with their sum over a response. Tool tokens (mask 0) cost nothing.

    Args:
        rewards: `[num_samples]`.
        kl: `[num_response_tokens]`, any estimator of `algorithms.kl`, old policy against reference.
        loss_mask: `[num_response_tokens]`, 0 or 1.
        response_lengths: of each sample.

    Returns:
        `[num_samples]`, in the dtype of `rewards`.
    """
    penalty = segment_sum(kl.double(), loss_mask, response_lengths)
    return (rewards.double() - kl_coef * penalty).to(rewards.dtype)


class TrainedRewards(NamedTuple):
    """The rewards of trained tokens (mask 1); samples one after another.

    Attributes:
        values: float64 `[num_trained_tokens]`.
        lengths: trained tokens of each sample.
        last: int64, the place of the last one of each sample that has trained tokens.
    """

    values: Tensor
    lengths: list[int]
    last: Tensor


def trained_rewards(
    rewards: Tensor, loss_mask: Tensor, response_lengths: Sequence[int], kl: Tensor | None, kl_coef: float
) -> TrainedRewards:
    """Compute the reward of each trained token: -kl_coef kl_t; the last one also gets the sample's reward.

    The reward of a response without a trained token is ignored.

    Raises:
        ValueError: `kl_coef` is set, but there is no KL.
    """
    keep = loss_mask > 0
    lengths = [int(part.sum()) for part in keep.split(list(response_lengths))]
    values = torch.zeros(sum(lengths), dtype=torch.float64, device=rewards.device)
    if kl_coef:
        if kl is None:
            raise ValueError("kl_coef needs the KL to the reference")
        values -= kl_coef * kl.detach()[keep].double()
    counts = torch.tensor(lengths, device=rewards.device)
    last = counts[counts > 0].cumsum(0) - 1
    values[last] += rewards.detach().double()[counts > 0]
    return TrainedRewards(values, lengths, last)


def discounted_sums(values: Tensor, lengths: Sequence[int], factor: float) -> Tensor:
    """Compute G_t = v_t + factor * G_{t+1} within each sequence, G = 0 after its end.

    All sequences are summed at once from their ends, without padding. The number of passes is the length of the
    longest.

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
