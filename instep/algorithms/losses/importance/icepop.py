"""IcePop: tokens on which trainer and engine disagree too much are left out."""

from __future__ import annotations

from torch import Tensor

from instep.algorithms.losses.importance.tis import ImportanceWeights, bounded_weights
from instep.algorithms.losses.ratio import exp_ratio


def icepop_weights(
    train_log_probs: Tensor, rollout_log_probs: Tensor, *, low: float = 0.5, high: float = 5.0
) -> ImportanceWeights:
    """k_t inside [low, high], 0 outside, k_t = exp(train_log_probs_t - rollout_log_probs_t), without gradient.

    Source: "Small Leak Can Sink a Great Ship: Boost RL Training on MoE with IcePop" (2025); used for
    Ring-1T, arXiv:2510.18855. The same as `--use-tis --tis-level token --tis-mode mask`.

    Args: both `[num_tokens]`.
    """
    ratio = exp_ratio((train_log_probs - rollout_log_probs).detach())
    return bounded_weights(ratio, "mask", low=low, high=high)
