"""The matrix products of a layer's experts as one kernel: each group of rows is multiplied by its own weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from instep.training.adjacent import joined

_AT_A_TIME = 2**26  # elements of gradients that are in the type of the sums at a time


def grouped_linear(x: Tensor, ends: Tensor, weights: Sequence[Tensor], *, adds_gradients: bool = False) -> Tensor:
    """Compute `x[ends[i - 1] : ends[i]] @ weights[i].T` of each group i: `[num_rows, in]` -> `[num_rows, out]`.

    The kernel needs the weights `[out, in]` in one tensor. Weights that do not follow each other in memory are copied
    in each pass; the copy is not kept: it would be a second copy of the model.

    Args:
        ends: int32 `[num_groups]`, on the device of x, ascending; a group may be empty.
        adds_gradients: the backward pass adds the gradients of the weights to their `main_grad` itself, all at once,
            as a hook of Megatron's data parallelism does for each.
    """
    out: Tensor
    if adds_gradients:
        out = _AddsGradients.apply(x, ends, weights[0], weights)
    else:
        out = _GroupedLinear.apply(x, ends, *weights)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return grouped_mm(x, _stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad, learns = grad.contiguous(), any(ctx.needs_input_grad[2:])
        of_x = grouped_mm(grad, _stacked(weights), offs=ends) if ctx.needs_input_grad[0] else None
        of_weights = grouped_mm(grad.t(), x, offs=ends).unbind() if learns else [None] * len(weights)
        return of_x, None, *of_weights


class _AddsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, first: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Autograd sees the first weight, for an x that needs no gradient."""
        ctx.save_for_backward(x, ends)
        ctx.weights = weights
        return grouped_mm(x, _stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = grouped_mm(grad, _stacked(ctx.weights), offs=ends) if ctx.needs_input_grad[0] else None
        sums = [weight.main_grad for weight in ctx.weights]
        gradients = grouped_mm(grad.t(), x, offs=ends).split(max(1, _AT_A_TIME // ctx.weights[0].numel()))
        for some in gradients:
            torch._foreach_add_(sums[: len(some)], list(some.to(sums[0].dtype).unbind()))
            sums = sums[len(some) :]
        return of_x, None, None, None


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    flat = joined(weights)
    return torch.stack(list(weights)) if flat is None else flat.view(len(weights), *weights[0].shape)
