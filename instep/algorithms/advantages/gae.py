"""Generalised advantage estimation, for PPO with a critic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.algorithms.advantages.tokens import discounted_sums, trained_rewards


def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    response_lengths: Sequence[int],
    *,
    gamma: float = 1.0,
    lambd: float = 1.0,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute GAE (arXiv:1506.02438, eq. 16) over the trained tokens of each response; tokens with mask 0 are ignored.

    For the n trained tokens of a response in order, rho_k = -kl_coef kl_k; the last one also gets the sample's reward.
    V_{n+1} = 0 after the end:

        delta_k = rho_k + gamma V_{k+1} - V_k,   A_k = delta_k + gamma lambd A_{k+1},   returns_k = A_k + V_k

    Args:
        rewards: `[num_samples]`, of whole responses; the reward of a response without a trained token is ignored.
        values: `[num_response_tokens]`, V of the state in which each token was chosen.
        loss_mask: `[num_response_tokens]`, 0 or 1.
        kl: `[num_response_tokens]`, old policy against reference; needed if `kl_coef` is not 0.

    Returns:
        Advantages and returns, float64 `[num_response_tokens]` without gradient; 0 where the mask is 0.
    """
    given = trained_rewards(rewards, loss_mask, response_lengths, kl, kl_coef)
    keep = loss_mask > 0
    v = values.detach()[keep].double()
    following = torch.cat([v[1:], v.new_zeros(min(1, v.numel()))])
    following[given.last] = 0.0
    delta = given.values + gamma * following - v
    advantages, returns = torch.zeros(2, loss_mask.numel(), dtype=torch.float64, device=values.device)
    advantages[keep] = discounted_sums(delta, given.lengths, gamma * lambd)
    returns[keep] = advantages[keep] + v
    return advantages, returns
