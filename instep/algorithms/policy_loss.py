"""The clipped policy-gradient loss of PPO, per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # beyond it the ratio is constant (4.9e8), so that no float32 overflow turns a gradient into NaN


class PolicyLoss(NamedTuple):
    """All `[num_tokens]`: the loss to reduce, and detached numbers to report."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor  # 1.0 where the clipped branch is the greater one
    ppo_kl: Tensor  # k1 of old against current: old_log_probs - log_probs


def ppo_clip_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A), r = exp(log_probs - old_log_probs).

    PPO (arXiv:1707.06347, eq. 7); a higher upper bound is DAPO's clip-higher (arXiv:2503.14476); `eps_clip_c` > 1 is
    the dual clip (arXiv:1912.09729): where A < 0 the loss is at most -eps_clip_c A.

    Args: all `[num_tokens]`; the gradient flows through `log_probs` only.
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    log_ratio = log_probs - old_log_probs.detach()
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - eps_clip, 1 + high) * advantages
    loss = torch.maximum(plain, bounded)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    clipped = (bounded > plain).to(loss.dtype)
    return PolicyLoss(loss, ratio.detach(), clipped, -log_ratio.detach())
