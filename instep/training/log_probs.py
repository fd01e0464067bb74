"""Log-probs and entropy of given tokens from logits, also with the vocabulary split over tensor-parallel ranks.

Also the values of a critic, whose output layer is one row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_BLOCKS = 32  # of a chunk's rows; float32 copies exist of one block at a time
_FEW_LOGITS = 2**18  # form one block
_ORDINARY_MEMORY = 2**35  # bytes of a GPU; a larger one keeps more logits


def _scores(logits: Tensor, targets: Tensor, scale: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return logsumexp, log-probs of targets and entropy; one or two passes over the logits when compiled."""
    z = logits.float() * scale
    log_sum = torch.logsumexp(z, -1, keepdim=True)
    target = logits.gather(1, targets[:, None]).float() * scale - log_sum
    log_p = z - log_sum
    entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else log_sum.new_empty(0)
    return log_sum, target[:, 0].clone(), entropy  # a loss must not change a view in place: FSDP2 would lose its hooks


def _grad_of_logits(
    logits: Tensor,
    log_sum: Tensor,
    targets: Tensor,
    scale: Tensor,
    g: Tensor,
    of_entropy: Tensor | None,
    entropy: Tensor,
) -> Tensor:
    """Return the gradient of logits, in their dtype, from those of log-probs (`g`) and entropies, `[num_tokens, 1]`."""
    log_p = logits.float() * scale - log_sum
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    per_nat = g if of_entropy is None else g + of_entropy * (log_p + entropy[:, None])
    return ((g * hit - log_p.exp() * per_nat) * scale).to(logits.dtype)


class _CompiledLogProbs(torch.autograd.Function):
    """`_LogProbsAndEntropy` of a whole vocabulary as compiled code; it reads bfloat16 logits and keeps nothing else.

    Its formulas are those of the eager version.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor, kept: int, with_entropy: bool
                ) -> tuple[Tensor, Tensor]:  # fmt: skip
        scale, targets = temperature.float().reciprocal()[:, None], targets.clone()
        log_sum, target, entropy = _run(_scores, logits.detach()[:, :kept], targets, scale, with_entropy)
        ctx.save_for_backward(logits, log_sum, targets, scale, entropy)
        ctx.set_materialize_grads(False)
        ctx.kept, ctx.with_entropy = kept, with_entropy
        return target, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_p: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, log_sum, targets, scale, entropy = ctx.saved_tensors
        g = torch.zeros_like(log_sum) if grad_log_p is None else grad_log_p.clone()[:, None]
        of_entropy = None if grad_entropy is None or not ctx.with_entropy else grad_entropy.clone()[:, None]
        kept = logits.detach()[:, : ctx.kept]
        grad = _run(_grad_of_logits, kept, log_sum, targets, scale, g, of_entropy, entropy)
        if ctx.kept != logits.shape[1]:
            grad = torch.nn.functional.pad(grad, (0, logits.shape[1] - ctx.kept))
        return grad, None, None, None, None


def _run(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)`, compiled once for any number of rows of its tensors; the tensors must not be views.

    The compiler specializes on sizes of 1, and on the place of a tensor in its storage.
    """
    tensors = [x for x in args if isinstance(x, Tensor)]
    if len(tensors[0]) < 2:
        return function(*args)
    for x in tensors:
        if len(x):  # skip an entropy that is not requested
            torch._dynamo.mark_dynamic(x, 0)
    return _compiled(function)(*args)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


class _LogProbsAndEntropy(torch.autograd.Function):
    """Log-probs and entropy; keeps the logits unchanged, and needs float32 copies only of one block of rows.

    With z = logits / temperature, p = softmax(z), y the target: log p_y = z_y - logsumexp(z) and H = -sum p log p, so d
    log p_y / dz = 1_y - p and dH / dz = -p (log p + H). Every tensor-parallel rank runs the same loss on the same
    (all-reduced) values, so the gradient of its own columns needs no more reduction.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor, kept: int, first: int, group: Any,
                with_entropy: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype = torch.float64 if logits.dtype is torch.float64 else torch.float32
        scale = temperature.to(dtype).reciprocal()[:, None]
        real, local = logits[:, :kept], targets - first
        here = (local >= 0) & (local < kept)
        local = local.where(here, 0)[:, None]
        log_sum, log_p, entropy = _over_vocabulary(real, scale, local, here, group, with_entropy)
        ctx.save_for_backward(logits, log_sum, local, here, scale, entropy)
        ctx.set_materialize_grads(False)  # an unused entropy costs nothing in the backward pass
        ctx.kept, ctx.with_entropy = kept, with_entropy
        return log_p, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_p: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, log_sum, local, here, scale, entropy = ctx.saved_tensors
        g = torch.zeros_like(scale) if grad_log_p is None else grad_log_p[:, None]
        grad = torch.empty_like(logits)
        grad[:, ctx.kept :] = 0
        for rows in _blocks(*logits.shape) if ctx.kept else ():
            log_p = torch.mul(logits[rows, : ctx.kept], scale[rows]).sub_(log_sum[rows])
            part = log_p.exp()
            if ctx.with_entropy and grad_entropy is not None:
                part *= log_p.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None]).sub_(g[rows])
            else:
                part *= -g[rows]
            part.scatter_add_(1, local[rows], (g * here[:, None])[rows].to(part.dtype))
            grad[rows, : ctx.kept] = part.mul_(scale[rows])
        return grad, None, None, None, None, None, None


def _blocks(num_rows: int, width: int) -> list[slice]:
    """Return the rows that are computed together: at most one part of `_BLOCKS`, unless there are few."""
    size = max(-(-num_rows // _BLOCKS), _FEW_LOGITS // width, 1)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def _over_vocabulary(
    logits: Tensor, scale: Tensor, local: Tensor, here: Tensor, group: Any, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logsumexp `[num_tokens, 1]`, log-probs of targets and entropy over the columns of this and other ranks.

    This takes two all-reduces: of the maximum, then of (sum exp, target, sum exp * z) together.
    """
    num_tokens, kept = logits.shape
    top = logits.amax(-1, keepdim=True) * scale if kept else torch.full_like(scale, -torch.inf)
    if group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    sums = scale.new_zeros(3 if with_entropy else 2, num_tokens)
    for rows in _blocks(num_tokens, kept) if kept else ():
        z = torch.mul(logits[rows], scale[rows]).sub_(top[rows])
        exp = z.exp()
        sums[0, rows] = exp.sum(-1)
        sums[1, rows] = z.gather(1, local[rows])[:, 0] * here[rows]
        if with_entropy:
            sums[2, rows] = exp.mul_(z).sum(-1)
    if group is not None:
        dist.all_reduce(sums, group=group)
    log_sum = sums[0].log()
    entropy = log_sum - sums[2] / sums[0] if with_entropy else log_sum.new_empty(0)
    return top + log_sum[:, None], sums[1] - log_sum, entropy


def in_chunks(
    head: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]],
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    with_entropy: bool,
    *,
    num_logits: int,
    vocab_size: int,
    plain: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs and entropy by `head(hidden, targets, temperature, with_entropy)` for chunks of rows.

    A chunk has `num_logits` logits. The first chunks keep their logits for the backward pass, in the type of `hidden`,
    at most 8 bytes for each of `num_logits`, and on a GPU of more than 32 GiB as many times more. Later chunks are
    computed again. If the head is not `plain`, it may keep more than the logits; then only the first chunk keeps them.
    Ranks that share the vocabulary need GPUs of one size.

    The logits of a chunk, their gradients and float32 copies need as much; a sixteenth is for copies.
    """
    size = max(1, num_logits * 15 // (16 * vocab_size))
    memory = torch.cuda.get_device_properties(hidden.device).total_memory if hidden.is_cuda else 0
    most = int(8 * num_logits * max(1.0, memory / _ORDINARY_MEMORY))
    kept = max(size, most // (hidden.element_size() * vocab_size)) if plain else size
    chunks = list(zip(hidden.split(size), targets.split(size), temperature.split(size), strict=True))
    parts, end = [], 0
    for chunk in chunks:
        end += len(chunk[0])
        again = end > kept and torch.is_grad_enabled()
        compute = functools.partial(checkpoint, head, use_reentrant=False) if again else head
        parts.append(compute(*chunk, with_entropy))
    entropy = torch.cat([part[1] for part in parts]) if with_entropy else None
    return torch.cat([part[0] for part in parts]), entropy


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    vocab_size: int,
    tp_group: Any = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the log-probs of `targets` under softmax(logits / temperature), and the entropy; differentiable.

    Args:
        logits: `[num_tokens, V_local]`, this rank's columns: rank r of `tp_group` holds r * V_local and following.
        targets: int64 `[num_tokens]`, global ids below `vocab_size`.
        temperature: `[num_tokens]`, positive; it gets no gradient.
        vocab_size: later columns are padding, without probability or gradient.
        tp_group: the tensor-parallel process group; None if this rank holds the whole vocabulary.

    Returns:
        log-probs `[num_tokens]` and entropy `[num_tokens]` or None; float32 (float64 for float64 logits).
    """
    size = 1 if tp_group is None else dist.get_world_size(tp_group)
    first = 0 if size == 1 else dist.get_rank(tp_group) * logits.shape[1]
    kept = max(0, min(logits.shape[1], vocab_size - first))
    if size == 1 and logits.is_cuda and logits.dtype is not torch.float64:
        log_probs, entropy = _CompiledLogProbs.apply(logits, targets, temperature, kept, with_entropy)
    else:
        group = None if size == 1 else tp_group
        log_probs, entropy = _LogProbsAndEntropy.apply(logits, targets, temperature, kept, first, group, with_entropy)
    return log_probs, entropy if with_entropy else None


def values(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute values of states: `[num_tokens, width]` by a head `[1, width]` -> `[num_tokens]`.

    float32 (float64 for float64). A bfloat16 result would have steps of 0.4 %, too coarse for advantages.
    """
    dtype = torch.float64 if hidden.dtype is torch.float64 else torch.float32
    return hidden.to(dtype) @ weight[0].to(dtype)
