"""The importance ratio of a token or a sequence, and the result of a form of the policy loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # the ratio is constant (4.9e8) beyond it, so no float32 overflow makes a gradient NaN


class PolicyLoss(NamedTuple):
    """All `[num_tokens]`: the loss to reduce, and detached numbers to report."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor  # 1.0 if clipping changed the loss (CISPO: the weight)
    ppo_kl: Tensor  # k1 of old against current: old_log_probs - log_probs


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """Compute exp(log_ratio), finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, eps_clip: float, eps_clip_high: float | None, eps_clip_c: float | None
) -> PolicyLoss:
    """Compute max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A), r = exp(log_ratio); see `ppo_clip_loss`."""
    high = eps_clip if eps_clip_high is None else eps_clip_high
    ratio = exp_ratio(log_ratio)
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - eps_clip, 1 + high) * advantages
    loss = torch.maximum(plain, bounded)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return PolicyLoss(loss, ratio.detach(), (bounded > plain).to(loss.dtype), -log_ratio.detach())
