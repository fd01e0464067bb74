"""The level of an importance weight between trainer and engine: a token, a sequence, or the mean over a sequence."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from instep.algorithms.losses.ratio import exp_ratio
from instep.algorithms.segments import expand, segment_mean, segment_sum

LEVELS = ("token", "sequence", "geometric")


def importance_ratio(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    response_lengths: Sequence[int] | Tensor,
    level: str,
) -> Tensor:
    """Compute exp(d), without gradient; d = train_log_probs - rollout_log_probs of each token, cut to [-20, 20].

    token: d_t. sequence: sum_t m_t d_t of the sample (unbiased, of high variance). geometric: the mean
    sum_t m_t d_t / sum_t m_t.
    Source: Liu et al., "When Speed Kills Stability" (2025).

    Args: columns and `mask` are `[num_tokens]`; a sample's tokens are all here.

    Raises:
        ValueError: the level is unknown, or lengths do not fit.
    """
    log_ratio = (train_log_probs - rollout_log_probs).detach()
    if level == "sequence":
        log_ratio = expand(segment_sum(log_ratio, mask, response_lengths), response_lengths)
    elif level == "geometric":
        log_ratio = expand(segment_mean(log_ratio, mask, response_lengths), response_lengths)
    elif level != "token":
        raise ValueError(f"unknown level {level!r}; known are {', '.join(LEVELS)}")
    return exp_ratio(log_ratio)
