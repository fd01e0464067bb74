"""Divergence PPO: the change of a token's probability masks it; its ratio is not clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from instep.algorithms.losses.ratio import PolicyLoss, exp_ratio

DIVERGENCES = ("tv", "kl")
_LEAST = 1e-8  # of the probability of all other tokens: in float32 the probability of a certain token is 1


def dppo_loss(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    *,
    divergence: str,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """Compute -sg[M min(r, eps_clip_c)] A log_probs, r = exp(log_probs - rollout_log_probs).

    M is 0 if the update would move further away from the sampling policy (A > 0 and r > 1, or A < 0 and r < 1) and
    `binary_divergence` is above its threshold: `eps_clip_high` for A > 0, `eps_clip` for A < 0. Without `eps_clip_c`, r
    has no bound, and the gradient is that of -M r A. Source: Qi et al., arXiv:2602.04879, eqs. 12 and 23; the paper has
    one threshold for both signs.

    Args: all `[num_tokens]`; the gradient flows through the factor `log_probs` only.
        rollout_log_probs: the engine's, not recomputed ones (section 5.2).

    Raises:
        ValueError: an unknown divergence.
    """
    log_ratio = (log_probs - rollout_log_probs).detach()
    moved = binary_divergence(log_probs.detach(), rollout_log_probs, divergence)
    high = eps_clip if eps_clip_high is None else eps_clip_high
    away = advantages * log_ratio > 0
    masked = away & torch.where(advantages > 0, moved > high, moved > eps_clip)
    ratio = exp_ratio(log_ratio)
    weight = (ratio if eps_clip_c is None else ratio.clamp(max=eps_clip_c)).masked_fill(masked, 0.0)
    return PolicyLoss(-weight * advantages * log_probs, ratio, masked.to(ratio.dtype), -log_ratio)


def binary_divergence(log_probs: Tensor, rollout_log_probs: Tensor, kind: str) -> Tensor:
    """Compute the divergence between a token's probability p now and q at sampling, with all other tokens as one.

    tv: |p - q|. kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p)), in nats. Source: arXiv:2602.04879, eqs. 13 and 14.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in DIVERGENCES:
        raise ValueError(f"unknown divergence {kind!r}; known are {', '.join(DIVERGENCES)}")
    sampled = rollout_log_probs.exp()
    if kind == "tv":
        return (log_probs.exp() - sampled).abs()
    others, others_sampled = ((-x.expm1()).clamp(min=_LEAST) for x in (log_probs, rollout_log_probs))
    return sampled * (rollout_log_probs - log_probs) + others_sampled * (others_sampled / others).log()
