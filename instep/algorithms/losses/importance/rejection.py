"""Rejection of tokens and samples with a large difference between trainer and engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from instep.algorithms.losses.importance.levels import importance_ratio
from instep.algorithms.segments import expand, segment_sum


def rejection_mask(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    response_lengths: Sequence[int] | Tensor,
    *,
    level: str = "token",
    low: float = 0.5,
    high: float = 2.0,
    veto_threshold: float | None = None,
) -> Tensor:
    """Return 1.0 for tokens to keep, whose ratio trainer / engine at `level` is inside [low, high]; `[num_tokens]`.

    `veto_threshold` rejects a whole sample if one of its tokens (with mask 1) has a ratio below it. The denominators of
    the loss do not change. Source: Liu et al., "When Speed Kills Stability" (2025).

    Args: columns and `mask` are `[num_tokens]`; a sample's tokens are all here.

    Raises:
        ValueError: the level is unknown, or lengths do not fit.
    """
    ratio = importance_ratio(train_log_probs, rollout_log_probs, mask, response_lengths, level)
    keep = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    if veto_threshold is not None:
        far = ((train_log_probs - rollout_log_probs).detach() < math.log(veto_threshold)).to(ratio.dtype)
        vetoed = segment_sum(far, mask, response_lengths) > 0
        keep = keep * expand((~vetoed).to(ratio.dtype), response_lengths)
    return keep
