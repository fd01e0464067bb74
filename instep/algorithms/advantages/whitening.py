"""Whitening over the trained tokens of a rollout."""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Compute (v - mean) / sqrt(variance + 1e-8), mean and unbiased variance over the tokens with mask 1 of all
    samples.

    Every trained token counts once, so a long response weighs more than a short one. This is the global normalization
    of REINFORCE++ (arXiv:2501.03262), and `--normalize-advantages` for the other estimators. The variance of a single
    token is 0. Masked tokens are transformed too; their weight in the loss is 0.

    Args: both `[num_response_tokens]`.

    Raises:
        ValueError: no token with mask 1.
    """
    keep = mask > 0
    count = keep.sum().double()
    if count.item() < 1:
        raise ValueError("whitening needs at least one token with mask 1")
    kept = torch.where(keep, values, torch.zeros_like(values)).double()
    mean = kept.sum() / count
    variance = (kept.square().sum() / count - mean.square()).clamp(min=0) * count / (count - 1).clamp(min=1)
    return ((values.double() - mean) * (variance + WHITEN_EPS).rsqrt()).to(values.dtype)
