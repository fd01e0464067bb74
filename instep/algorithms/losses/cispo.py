"""CISPO: REINFORCE with clipped importance weights; a clipped token keeps its gradient."""

from __future__ import annotations

from torch import Tensor

from instep.algorithms.losses.ratio import PolicyLoss, exp_ratio


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 1.0,
    eps_clip_high: float | None = 4.0,
) -> PolicyLoss:
    """Compute -sg[clip(r, 1 - eps_clip, 1 + eps_clip_high)] A log_probs, r = exp(log_probs - old_log_probs).

    Source: MiniMax-M1, arXiv:2506.13585, eqs. 4-5, which sets no lower bound (`eps_clip` 1) and does not publish the
    upper one. The maximum weight of 5 is from arXiv:2510.13786.

    Args: all `[num_tokens]`; the gradient flows through the factor `log_probs` only.
    """
    log_ratio = (log_probs - old_log_probs).detach()
    ratio = exp_ratio(log_ratio)
    weight = ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high))
    return PolicyLoss(-weight * advantages * log_probs, ratio, (weight != ratio).to(ratio.dtype), -log_ratio)
