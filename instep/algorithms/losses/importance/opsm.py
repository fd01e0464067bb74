"""Off-policy sequence masking."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from instep.algorithms.segments import expand, segment_mean


def off_policy_sequence_mask(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    response_lengths: Sequence[int] | Tensor,
    *,
    delta: float = 1e-4,
) -> Tensor:
    """Return 0.0 for tokens with A < 0 of a sample with mean_t (old_log_probs - log_probs) > delta, otherwise 1.0.

    The policy has already moved away from such samples. Lower log-probs of them make off-policy training unstable. The
    mean is over tokens with mask 1. Source: DeepSeek-V3.2, arXiv:2512.02556.

    Args: columns and `mask` are `[num_tokens]`; a sample's tokens are all here. No gradient.

    Raises:
        ValueError: mask or lengths do not fit.
    """
    drift = segment_mean((old_log_probs - log_probs).detach(), mask, response_lengths)
    moved = expand(drift, response_lengths) > delta
    return (~(moved & (advantages < 0))).to(log_probs.dtype)
