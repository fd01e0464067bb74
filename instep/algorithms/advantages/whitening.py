"""Whitening over the trained tokens of a rollout, and its parts that add up over pieces of it."""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(v - mean) / sqrt(variance + 1e-8), mean and unbiased variance over the tokens with mask 1 of all samples.

    Every trained token counts once, so that a long response weighs more than a short one; this is the global
    normalization of REINFORCE++ (arXiv:2501.03262), and `--normalize-advantages` for the other estimators.
    Masked tokens are transformed too; their weight in the loss is 0.

    Args: both `[num_response_tokens]`.

    Raises:
        ValueError: no token with mask 1.
    """
    return whiten_with(values, *mean_and_variance(*masked_moments(values, mask)))


def masked_moments(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sum, sum of squares, count) over the tokens with mask 1: float64 scalars, to be added up over ranks."""
    keep = mask > 0
    kept = torch.where(keep, values, torch.zeros_like(values)).double()
    return kept.sum(), kept.square().sum(), keep.sum().double()


def mean_and_variance(total: Tensor, total_squares: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance (count - 1; biased for a single value) from summed moments.

    Raises:
        ValueError: no token to take a mean of.
    """
    if count.item() < 1:
        raise ValueError("whitening needs at least one token with mask 1")
    mean = total / count
    variance = (total_squares / count - mean.square()).clamp(min=0)
    return mean, variance * count / (count - 1).clamp(min=1)


def whiten_with(values: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8)."""
    return ((values.double() - mean) * (variance + WHITEN_EPS).rsqrt()).to(values.dtype)
