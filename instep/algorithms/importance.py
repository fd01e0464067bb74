"""Correction for the gap between the engine that sampled and the trainer that scores."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from instep.algorithms.policy_loss import MAX_LOG_RATIO


class ImportanceWeights(NamedTuple):
    """All `[num_tokens]`, without gradients."""

    weights: Tensor  # truncated
    raw: Tensor
    clipped: Tensor  # 1.0 where truncation changed the weight


def truncated_importance_weights(
    train_log_probs: Tensor, rollout_log_probs: Tensor, *, low: float = 0.0, high: float = 2.0
) -> ImportanceWeights:
    """TIS: clip(exp(train_log_probs - rollout_log_probs), low, high), a constant factor of each token's loss.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    log_ratio = (train_log_probs - rollout_log_probs).detach()
    raw = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = raw.clamp(low, high)
    return ImportanceWeights(weights, raw, (weights != raw).to(raw.dtype))
