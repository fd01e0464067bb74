"""Losses of data: supervised fine-tuning, and Direct Preference Optimization."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def sft_loss(log_probs: Tensor, loss_weights: Tensor) -> Tensor:
    """Compute -sum_t w_t log_probs_t: the cross-entropy of the tokens with mask 1, a scalar.

    w is the mask over its denominator (`reductions.loss_weights`); a turn with `step_loss_mask` 0 has weight 0. Values
    of weight 0 (NaN too) are ignored.

    Args: both `[num_response_tokens]`.
    """
    return -(loss_weights * torch.where(loss_weights > 0, log_probs, torch.zeros_like(log_probs))).sum()


class DpoLoss(NamedTuple):
    """All `[num_pairs]`: the loss to average; the implicit rewards beta log(pi / ref), detached."""

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> DpoLoss:
    """Compute -(1 - e) log sigmoid(z) - e log sigmoid(-z), z = beta ((chosen - ref_chosen) - (rejected -
    ref_rejected)).

    Source: Rafailov et al., arXiv:2305.18290, eq. 7; e = `label_smoothing` is the probability that a pair has the wrong
    order (conservative DPO, Mitchell 2023).

    Args:
        chosen, rejected, ref_chosen, ref_rejected: `[num_pairs]`, the log-probs of whole responses (sums over the
            tokens with mask 1, `segments.segment_sum`) under policy and reference. The reference gets no gradient.

    Raises:
        ValueError: the label smoothing is outside [0, 0.5), or beta is not positive.
    """
    if not 0 <= label_smoothing < 0.5 or beta <= 0:
        raise ValueError(f"label_smoothing {label_smoothing} must be in [0, 0.5) and beta {beta} above 0")
    for_chosen, for_rejected = beta * (chosen - ref_chosen.detach()), beta * (rejected - ref_rejected.detach())
    z = for_chosen - for_rejected
    loss = -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z)
    return DpoLoss(loss, for_chosen.detach(), for_rejected.detach())
