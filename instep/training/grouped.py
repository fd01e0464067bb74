"""The matrix products of a layer's experts as one kernel: each group of rows is multiplied by its own weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm


def grouped_linear(x: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Compute `x[ends[i - 1] : ends[i]] @ weights[i].T` of each group i: `[num_rows, in]` -> `[num_rows, out]`.

    Each pass concatenates the weights `[out, in]` for the kernel and does not keep the result: it would be a second
    copy of the model.

    Args:
        ends: int32 `[num_groups]`, on the device of x, ascending; a group may be empty.
    """
    out: Tensor = _GroupedLinear.apply(x, ends, *weights)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad, learns = grad.contiguous(), any(ctx.needs_input_grad[2:])
        of_x = grouped_mm(grad, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        of_weights = grouped_mm(grad.t(), x, offs=ends).unbind() if learns else [None] * len(weights)
        return of_x, None, *of_weights
