"""Soft Adaptive Policy Optimization: a smooth gate instead of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from instep.algorithms.losses.ratio import PolicyLoss, exp_ratio


def sapo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> PolicyLoss:
    """Compute -f(r) A with f(r) = 4 / tau * sigmoid(tau (r - 1)), tau = `tau_pos` for A > 0, otherwise `tau_neg`.

    r = exp(log_probs - old_log_probs). df/dr = 4 p (1 - p), p = sigmoid(tau (r - 1)): it is 1 at r = 1, as in the
    unclipped objective, and falls on both sides, faster for greater tau. Source: Gao et al., arXiv:2511.20347.

    Args: all `[num_tokens]`; the gradient flows through `log_probs` only.
    """
    log_ratio = log_probs - old_log_probs.detach()
    ratio = exp_ratio(log_ratio)
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    loss = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    return PolicyLoss(loss, ratio.detach(), torch.zeros_like(ratio).detach(), -log_ratio.detach())
