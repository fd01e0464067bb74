"""Supervised fine-tuning."""

from __future__ import annotations

import torch
from torch import Tensor


def sft_loss(log_probs: Tensor, loss_weights: Tensor) -> Tensor:
    """Compute -sum_t w_t log_probs_t: the cross-entropy of the tokens with mask 1, a scalar.

    w is the mask over its denominator (`reductions.loss_weights`); a turn with `step_loss_mask` 0 has weight 0. Values
    of weight 0 (NaN too) are ignored.

    Args: both `[num_response_tokens]`.
    """
    return -(loss_weights * torch.where(loss_weights > 0, log_probs, torch.zeros_like(log_probs))).sum()
