"""Log-probs and entropy of given tokens from logits, also with the vocabulary split over tensor-parallel ranks; and
the values of a critic, whose output layer is one row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _LogProbsAndEntropy(torch.autograd.Function):
    """Log-probs and entropy with one `[T, V_local]` buffer, the log-softmax, kept for the backward pass.

    With z = logits / temperature, p = softmax(z), y the target: log p_y = z_y - logsumexp(z) and H = -sum p log p, so
    d log p_y / dz = 1_y - p and dH / dz = -p (log p + H). Every tensor-parallel rank runs the same loss on the same
    (all-reduced) values, so that the gradient of its own columns needs no further reduction.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor, kept: int, first: int, group: Any,
                with_entropy: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
        scale = temperature.to(dtype).reciprocal()[:, None]
        z = logits[:, :kept].to(dtype) * scale
        if group is None:
            log_p = torch.log_softmax(z, dim=-1)
            target_log_p = log_p.gather(1, targets[:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else target_log_p.new_empty(0)
            local, here = targets, None
        else:
            local = targets - first
            here = (local >= 0) & (local < kept)
            local = local.where(here, 0)
            log_p, target_log_p, entropy = _vocab_parallel(z, local, here, group, with_entropy)
        ctx.save_for_backward(log_p, local, here, scale, entropy)
        ctx.set_materialize_grads(False)  # an entropy that no loss uses costs nothing in the backward pass
        ctx.shape, ctx.dtype, ctx.with_entropy = logits.shape, logits.dtype, with_entropy
        return target_log_p, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_p: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        log_p, local, here, scale, entropy = ctx.saved_tensors
        kept = log_p.shape[1]
        grad = log_p.exp()
        g = log_p.new_zeros(log_p.shape[0], 1) if grad_log_p is None else grad_log_p[:, None]
        if ctx.with_entropy and grad_entropy is not None:
            grad *= (log_p + entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(g)
        else:
            grad *= -g
        if kept:
            hit = g if here is None else g * here[:, None]
            grad.scatter_add_(1, local[:, None], hit.to(grad.dtype))
        grad *= scale
        if kept != ctx.shape[1]:
            grad = torch.nn.functional.pad(grad, (0, ctx.shape[1] - kept))
        return grad.to(ctx.dtype), None, None, None, None, None, None


def _vocab_parallel(
    z: Tensor, local: Tensor, here: Tensor, group: Any, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax (in the memory of `z`), log-probs of targets and entropy.

    It makes two all-reduces: of the maximum, then of (sum exp, target, sum exp * z) together.
    """
    num_tokens, kept = z.shape
    top = z.amax(-1) if kept else z.new_full((num_tokens,), -torch.inf)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    z -= top[:, None]
    exp = z.exp()
    sums = z.new_zeros(3 if with_entropy else 2, num_tokens)
    sums[0] = exp.sum(-1)
    if kept:
        sums[1] = z.gather(1, local[:, None])[:, 0] * here
    if with_entropy:
        sums[2] = exp.mul_(z).sum(-1)
    dist.all_reduce(sums, group=group)
    log_sum = sums[0].log()
    z -= log_sum[:, None]
    entropy = log_sum - sums[2] / sums[0] if with_entropy else z.new_empty(0)
    return z, sums[1] - log_sum, entropy


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    vocab_size: int,
    tp_group: Any = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of `targets` under softmax(logits / temperature), and that distribution's entropy; differentiable.

    Args:
        logits: `[num_tokens, V_local]`, this rank's columns: rank r of `tp_group` holds r * V_local and following.
        targets: int64 `[num_tokens]`, global ids below `vocab_size`.
        temperature: `[num_tokens]`, positive; it gets no gradient.
        vocab_size: later columns are padding, with neither probability nor gradient.
        tp_group: the tensor-parallel process group; None when this rank holds the whole vocabulary.

    Returns:
        log-probs `[num_tokens]` and entropy `[num_tokens]` or None; float32 (float64 for float64 logits).
    """
    size = 1 if tp_group is None else dist.get_world_size(tp_group)
    first = 0 if size == 1 else dist.get_rank(tp_group) * logits.shape[1]
    kept = max(0, min(logits.shape[1], vocab_size - first))
    log_probs, entropy = _LogProbsAndEntropy.apply(
        logits, targets, temperature, kept, first, None if size == 1 else tp_group, with_entropy
    )
    return log_probs, entropy if with_entropy else None


def values(hidden: Tensor, weight: Tensor) -> Tensor:
    """Values of states: `[num_tokens, width]` by a head `[1, width]` -> `[num_tokens]`, float32 (float64 for float64).

    A bfloat16 result would have steps of 0.4 %, more than advantages can do with.
    """
    dtype = torch.float64 if hidden.dtype is torch.float64 else torch.float32
    return torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype))[:, 0]
