"""Truncated importance sampling and its variants: a bounded weight on each token's loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MODES = ("truncate", "clip", "mask")


class ImportanceWeights(NamedTuple):
    """All `[num_tokens]`, without gradients."""

    weights: Tensor  # bounded
    raw: Tensor
    clipped: Tensor  # 1.0 if the bounds changed the weight


def bounded_weights(ratio: Tensor, mode: str, *, low: float = 0.0, high: float = 2.0) -> ImportanceWeights:
    """Return the constant factor of each token's loss, from its ratio trainer / engine (`levels.importance_ratio`).

    truncate (TIS): min(r, high). clip: clip(r, low, high). mask (MIS; of tokens: IcePop): r inside [low, high], 0
    outside; the denominators of the loss do not change. Sources: Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training" (2025); Liu et al., "When Speed Kills Stability" (2025); "Small Leak Can Sink a
    Great Ship: Boost RL Training on MoE with IcePop" (2025), used for Ring-1T (arXiv:2510.18855) with bounds of 0.5 and
    5.

    Args:
        ratio: `[num_tokens]`, without gradient.

    Raises:
        ValueError: an unknown mode.
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
