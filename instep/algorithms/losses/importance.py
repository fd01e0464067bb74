"""Corrections of the gap between the sampling engine and the scoring trainer: weights, and tokens to leave out.

Columns and masks are `[num_tokens]`, with all tokens of a sample; the results have no gradient. An unknown level or
mode, and lengths that do not fit, raise ValueError.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from instep.algorithms.losses.forms import exp_ratio
from instep.algorithms.segments import Lengths, expand, segment_mean, segment_sum

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")


def importance_ratio(
    train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, response_lengths: Lengths, level: str
) -> Tensor:
    """Compute exp(d), d = train_log_probs - rollout_log_probs of each token, cut to [-20, 20].

    token: d_t. sequence: sum_t m_t d_t of the sample (unbiased, of high variance). geometric: the mean
    sum_t m_t d_t / sum_t m_t. Source: Liu et al., "When Speed Kills Stability" (2025).
    """
    log_ratio = (train_log_probs - rollout_log_probs).detach()
    if level == "sequence":
        log_ratio = expand(segment_sum(log_ratio, mask, response_lengths), response_lengths)
    elif level == "geometric":
        log_ratio = expand(segment_mean(log_ratio, mask, response_lengths), response_lengths)
    elif level != "token":
        raise ValueError(f"unknown level {level!r}; known are {', '.join(LEVELS)}")
    return exp_ratio(log_ratio)


class ImportanceWeights(NamedTuple):
    """The result of `bounded_weights`."""

    weights: Tensor  # bounded
    raw: Tensor
    clipped: Tensor  # 1.0 if the bounds changed the weight


def bounded_weights(ratio: Tensor, mode: str, *, low: float = 0.0, high: float = 2.0) -> ImportanceWeights:
    """Return the constant factor of each token's loss, from its ratio trainer / engine (`importance_ratio`).

    truncate (TIS): min(r, high). clip: clip(r, low, high). mask (MIS; of tokens: IcePop): r inside [low, high], 0
    outside; the denominators of the loss do not change. Sources: Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training" (2025); Liu et al., "When Speed Kills Stability" (2025); "Small Leak Can Sink a
    Great Ship: Boost RL Training on MoE with IcePop" (2025), used for Ring-1T (arXiv:2510.18855) with bounds of 0.5 and
    5.
    """
    if mode == "truncate":
        weights = ratio.clamp(max=high)
    elif mode == "clip":
        weights = ratio.clamp(low, high)
    elif mode == "mask":
        weights = torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
    else:
        raise ValueError(f"unknown mode {mode!r}; known are {', '.join(MODES)}")
    return ImportanceWeights(weights, ratio, (weights != ratio).to(ratio.dtype))


def rejection_mask(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    response_lengths: Lengths,
    *,
    level: str = "token",
    low: float = 0.5,
    high: float = 2.0,
    veto_threshold: float | None = None,
) -> Tensor:
    """Return 1.0 for tokens to keep, whose ratio trainer / engine at `level` is inside [low, high].

    `veto_threshold` rejects a whole sample if one of its tokens (with mask 1) has a ratio below it. The denominators of
    the loss do not change. Source: Liu et al., "When Speed Kills Stability" (2025).
    """
    ratio = importance_ratio(train_log_probs, rollout_log_probs, mask, response_lengths, level)
    keep = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    if veto_threshold is not None:
        far = ((train_log_probs - rollout_log_probs).detach() < math.log(veto_threshold)).to(ratio.dtype)
        vetoed = segment_sum(far, mask, response_lengths) > 0
        keep = keep * expand((~vetoed).to(ratio.dtype), response_lengths)
    return keep


def off_policy_sequence_mask(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    response_lengths: Lengths,
    *,
    delta: float = 1e-4,
) -> Tensor:
    """Return 0.0 for tokens with A < 0 of a sample with mean_t (old_log_probs - log_probs) > delta, otherwise 1.0.

    The policy has already moved away from such samples. Lower log-probs of them make off-policy training unstable. The
    mean is over tokens with mask 1. Source: DeepSeek-V3.2, arXiv:2512.02556.
    """
    drift = segment_mean((old_log_probs - log_probs).detach(), mask, response_lengths)
    moved = expand(drift, response_lengths) > delta
    return (~(moved & (advantages < 0))).to(log_probs.dtype)
