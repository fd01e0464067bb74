"""REINFORCE++, without baseline or with the mean of the group; whitened over the rollout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.algorithms.advantages.tokens import discounted_sums, trained_rewards
from instep.algorithms.segments import expand


def reinforce_plus_plus(
    rewards: Tensor,
    loss_mask: Tensor,
    response_lengths: Sequence[int],
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
) -> Tensor:
    """Compute G_t = sum_{s >= t} gamma^(s - t) (1[s = last] r - kl_coef kl_s), not whitened yet (arXiv:2501.03262).

    Sums and steps are over the trained tokens of a response: tool tokens (mask 0) are not actions: they cost no KL and
    do not discount. The last trained token gets the reward.

    Args:
        rewards: `[num_samples]`.
        loss_mask: `[num_response_tokens]`, 0 or 1; a sample may be fully masked.
        kl: `[num_response_tokens]`, old policy against reference; needed if `kl_coef` is not 0.

    Returns:
        float64 `[num_response_tokens]`, 0 where the mask is 0; the caller whitens them (`whitening.whiten`).
    """
    given = trained_rewards(rewards, loss_mask, response_lengths, kl, kl_coef)
    out = torch.zeros(loss_mask.numel(), dtype=torch.float64, device=rewards.device)
    out[loss_mask > 0] = discounted_sums(given.values, given.lengths, gamma)
    return out


def reinforce_plus_plus_baseline(
    centred: Tensor, response_lengths: Sequence[int], *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Compute A_t = (r - mean(group)) - kl_coef kl_t, not whitened yet (arXiv:2501.03262).

    The paper puts its KL in the loss (`--use-kl-loss --kl-loss-type k2`); `kl_coef` subtracts it token by token.

    Args:
        centred: `[num_samples]`, the rewards minus their group's mean (`dr_grpo`).
        kl: `[num_response_tokens]`, old policy against reference; needed if `kl_coef` is not 0.

    Returns:
        float64 `[num_response_tokens]`; the caller whitens them (`whitening.whiten`).
    """
    advantages = expand(centred.detach().double(), response_lengths)
    if not kl_coef:
        return advantages
    if kl is None:
        raise ValueError("kl_coef needs the KL to the reference")
    return advantages - kl_coef * kl.detach().double()
