"""REINFORCE++: returns of the terminal reward and a per-token KL, without baseline; whitened over the rollout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.algorithms.advantages.tokens import discounted_sums


def reinforce_plus_plus(
    rewards: Tensor,
    loss_mask: Tensor,
    response_lengths: Sequence[int],
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
) -> Tensor:
    """G_t = sum_{s >= t} gamma^(s - t) (1[s = last] r - kl_coef kl_s), not whitened yet (arXiv:2501.03262).

    Sums and steps go over the trained tokens of a response: those of a tool (mask 0) are no actions, they cost no KL
    and are not discounted over. The reward stands at the last trained token.

    Args:
        rewards: `[num_samples]`.
        loss_mask: `[num_response_tokens]`, 0 or 1; a sample may be masked out altogether.
        kl: `[num_response_tokens]`, old policy against reference; needed if `kl_coef` is not 0.

    Returns:
        float64 `[num_response_tokens]`, 0 where the mask is 0. The whitening (`whitening.whiten`) is the caller's.
    """
    keep = loss_mask > 0
    trained = [int(part.sum()) for part in keep.split(list(response_lengths))]
    token_rewards = torch.zeros(sum(trained), dtype=torch.float64, device=rewards.device)
    if kl_coef:
        if kl is None:
            raise ValueError("kl_coef needs the KL to the reference")
        token_rewards -= kl_coef * kl.detach()[keep].double()
    has_tokens = torch.tensor(trained, device=rewards.device) > 0
    last = torch.tensor(trained, device=rewards.device).cumsum(0)[has_tokens] - 1
    token_rewards[last] += rewards.detach().double()[has_tokens]
    out = torch.zeros(loss_mask.numel(), dtype=torch.float64, device=rewards.device)
    out[keep] = discounted_sums(token_rewards, trained, gamma)
    return out
