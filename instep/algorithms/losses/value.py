"""The clipped value loss of PPO's critic, per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """Both `[num_tokens]`: the loss to reduce, and a number to report, without gradients."""

    loss: Tensor
    clipped: Tensor  # 1.0 if the value has moved further than the clip range


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float) -> ValueLoss:
    """Compute max((V - R)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - R)^2), without a factor 1/2.

    The squared error is L^VF of PPO (arXiv:1707.06347, eq. 9); the clip is from the authors' code (see
    arXiv:2005.12729, section 3). It is pessimistic like the policy's: a value further than `value_clip` from its old
    value gets a gradient only towards it.

    Args: all `[num_tokens]`; the gradient flows through `values` only.
    """
    old, target = old_values.detach(), returns.detach()
    moved = values - old
    bounded = old + moved.clamp(-value_clip, value_clip)
    loss = torch.maximum((values - target).square(), (bounded - target).square())
    return ValueLoss(loss, (moved.detach().abs() > value_clip).to(loss.dtype))


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """Compute 1 - Var(returns - values) / Var(returns), over `[num_tokens]`; None if all returns are equal.

    It is 1 for exact values and 0 for constant ones.
    """
    if not returns.numel() or returns.min() == returns.max():
        return None
    target = returns.double()
    return float(1 - (target - values.double()).var(correction=0) / target.var(correction=0))
