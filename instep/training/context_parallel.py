"""Context parallelism: ranks share each sample's tokens, and exchange keys and values.

A sample is padded to 2 x CP chunks of equal length. Rank r has its chunks r and 2 x CP - 1 - r, so all ranks have the
same work in causal attention ("zigzag"). A chunk is a segment of packed attention; its queries are the last tokens of
what they see. Keys and values of all tokens are gathered for a few heads at a time, in the forward pass and again in
the backward pass. So a rank keeps only its own keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from instep.training.packed_attention import Bounds, attention_and_sums, attention_backward
from instep.training.packing import SharedPrefixes
from instep.types import TokenBatch

_PARTS = 8  # the heads of a long stream attend in so many parts: memory holds the keys of one part
_QUERIES = 2**14  # queries times heads of a part, at least: fewer would leave a GPU's cores idle


@dataclass(frozen=True)
class Share:
    """One rank's share of a packed stream. `num_local` is the same on every context-parallel rank.

    Attributes:
        rows: int64 `[num_local]`: the position in the stream of each of its tokens; padding repeats the first token.
        positions: int64 `[num_local]`: positions within samples.
        padding: bool `[num_local]`: whether they are beyond the end of their sample.
        cu_seqlens: int32 `[num_segments + 1]`: where the keys of each chunk start, in the order of chunks.
        max_seqlen: the most keys of a chunk.
        shared: the queries of each chunk; `copies` are indices into the keys of all ranks, in the order of ranks.
        order: int64 `[size x num_local]`: the stream of padded samples as indices into the tokens of all ranks, in the
            order of ranks. cu_samples: int32 `[num_samples + 1]`: where samples start in it.
        predicting: int64: its tokens whose logits predict a response token.
        own: int64: the response tokens of the batch that `predicting` predicts.
    """

    rows: Tensor
    positions: Tensor
    padding: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    shared: SharedPrefixes
    order: Tensor
    cu_samples: Tensor
    predicting: Tensor
    own: Tensor


def share_of(batch: TokenBatch, rank: int, size: int, multiple: int = 1) -> Share:
    """Return the share of context-parallel rank `rank` of `size`; `num_local` is rounded up to a multiple of
    `multiple`."""
    lengths, responses = (x.cpu().numpy() for x in (batch.total_lengths, batch.response_lengths))
    starts = np.cumsum(lengths) - lengths
    chunks = -(-lengths // (2 * size))  # tokens of a chunk, by sample
    if padding := next(n for n in range(multiple) if 2 * (chunks.sum() + n) % multiple == 0):
        lengths, chunks, starts = np.append(lengths, 0), np.append(chunks, padding), np.append(starts, 0)
    before = 2 * (np.cumsum(chunks) - chunks)  # local tokens before each sample
    num_local = int(2 * chunks.sum())

    def place(sample: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rank and the local row of tokens."""
        chunk = position // chunks[sample]
        row = before[sample] + np.where(chunk < size, 0, chunks[sample]) + position % chunks[sample]
        return np.minimum(chunk, 2 * size - 1 - chunk), row

    num_queries = chunks.repeat(2)
    first = np.stack([rank * chunks, (2 * size - 1 - rank) * chunks], axis=1).ravel()
    num_keys = first + num_queries
    segment_sample = np.arange(len(chunks)).repeat(2)
    sample = segment_sample.repeat(num_queries)
    positions = first.repeat(num_queries) + _within(num_queries)
    rows = np.where(positions < lengths[sample], starts[sample] + positions, 0)
    owner, row = place(segment_sample.repeat(num_keys), _within(num_keys))
    padded = 2 * size * chunks
    of_stream, at = place(np.arange(len(chunks)).repeat(padded), _within(padded))
    predicted = (lengths[: len(responses)] - responses - 1).repeat(responses) + _within(responses)
    whose, local = place(np.arange(len(responses)).repeat(responses), predicted)
    own = (whose == rank).nonzero()[0]
    device = batch.tokens.device

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(device)

    def bounds(counts: np.ndarray) -> Tensor:
        return tensor(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))

    shared = SharedPrefixes(tensor(rows), tensor(owner * num_local + row), bounds(num_queries), int(num_queries.max()))
    return Share(
        rows=shared.kept,
        positions=tensor(positions),
        padding=tensor(positions >= lengths[sample]),
        cu_seqlens=bounds(num_keys),
        max_seqlen=int(num_keys.max()),
        shared=shared,
        order=tensor(of_stream * num_local + at),
        cu_samples=bounds(padded),
        predicting=tensor(local[own]),
        own=tensor(own),
    )


def _within(counts: np.ndarray) -> np.ndarray:
    """Return 0 .. count-1 for each count, one after another."""
    return np.arange(counts.sum()) - (np.cumsum(counts) - counts).repeat(counts)


def shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    shared: SharedPrefixes,
    scale: float | None,
    group: Any,
) -> Tensor:
    """Compute causal attention of this rank's tokens to the tokens of all ranks of `group`; collective.

    Args:
        q, k, v: `[num_local, heads, head_dim]` of this rank's tokens; grouped heads when there are fewer of keys.
        cu_seqlens, max_seqlen, shared: from its `Share`.
        scale: the factor of q k^T; None: 1 / sqrt(head_dim).

    Returns:
        `[num_local, heads, head_dim]`.
    """
    bounds = Bounds(shared.cu_kept, shared.max_kept, cu_seqlens, max_seqlen)
    return _SharedAttention.apply(q, k, v, shared.copies, bounds, scale, group)


class _SharedAttention(torch.autograd.Function):
    """Keeps this rank's `q`, `k`, `v`, its result and each query's sum, as attention without other ranks does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, copies: Tensor, bounds: Bounds, scale: float | None,
                group: Any) -> Tensor:  # fmt: skip
        out, sums = torch.empty_like(q), []
        for heads, _, keys, values in _gathered(q, k, v, copies, group):
            out[:, heads], part = attention_and_sums(q[:, heads], keys, values, bounds, scale)
            sums.append(part)
            del keys, values  # free them before the next ones arrive
        ctx.save_for_backward(q, k, v, copies, out, *sums)
        ctx.bounds, ctx.scale, ctx.group = bounds, scale, group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, copies, out, *sums = ctx.saved_tensors
        several = _heads_at_a_time(q, k) * k.shape[1] < q.shape[1]  # parts add to a key head
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros_like(x, dtype=torch.float32 if several else None) for x in (k, v))
        for heads, own, keys, values in _gathered(q, k, v, copies, ctx.group):
            grad_q[:, heads], *of_keys = attention_backward(
                grad[:, heads], q[:, heads], keys, values, out[:, heads], sums.pop(0), ctx.bounds, ctx.scale
            )
            del keys, values
            for total, part in zip((grad_k, grad_v), _reduced(of_keys, copies, k.shape[0], ctx.group), strict=True):
                total[:, own] += part
            del of_keys, part
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None


def _heads_at_a_time(q: Tensor, k: Tensor) -> int:
    """Return how many query heads attend together: whole groups that share a key head, or an equal part of a group."""
    num_local, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    least = min(num_heads, max(num_heads // _PARTS, _QUERIES // num_local, 1))
    return next(n for n in range(least, num_heads + 1) if n % group == 0 or group % n == 0)


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, copies: Tensor, group: Any
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yield heads of queries, their heads of keys, and these keys and values of all segments, in the order of segments.

    The next heads are in transfer while these attend.
    """
    per_key, step = q.shape[1] // k.shape[1], _heads_at_a_time(q, k)
    parts = [slice(first, first + step) for first in range(0, q.shape[1], step)]
    own = [slice(heads.start // per_key, -(-heads.stop // per_key)) for heads in parts]

    def depart(n: int) -> tuple[Tensor, Any]:
        local = torch.cat([k[:, own[n]], v[:, own[n]]], dim=1)
        everyone = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
        return everyone, dist.all_gather_into_tensor(everyone, local, group=group, async_op=True)

    def arrive(everyone: Tensor, work: Any) -> list[Tensor]:
        work.wait()
        return [x.index_select(0, copies) for x in everyone.chunk(2, dim=1)]

    under_way = [depart(0)]
    for n, heads in enumerate(parts):
        here = arrive(*under_way.pop())
        if n + 1 < len(parts):
            under_way.append(depart(n + 1))
        yield heads, own[n], here.pop(0), here.pop()


def _reduced(grads: list[Tensor], copies: Tensor, num_local: int, group: Any) -> tuple[Tensor, ...]:
    """Return the gradients of this rank's keys and values, summed over all ranks, from those of all segments.

    A token is in at most two segments of a rank, so the order of additions on a GPU changes nothing.
    """
    _, num_heads, width = grads[0].shape
    everyone = grads[0].new_zeros(group.size() * num_local, 2 * num_heads, width)
    for x, total in zip(grads, everyone.chunk(2, dim=1), strict=True):
        total.index_add_(0, copies, x)
    local = everyone.new_empty(num_local, *everyone.shape[1:])
    dist.reduce_scatter_tensor(local, everyone, group=group)
    return local.chunk(2, dim=1)


def whole(column: Tensor, own: Tensor, num_tokens: int, group: Any) -> Tensor:
    """Return the column of all `num_tokens` response tokens from each rank's `own`. Every rank computes the same loss
    of it, so the gradient of its own tokens needs no exchange."""
    return _Whole.apply(column, own, num_tokens, group)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, column: Tensor, own: Tensor, num_tokens: int, group: Any) -> Tensor:
        ctx.save_for_backward(own)
        ctx.set_materialize_grads(False)
        out = column.new_zeros(num_tokens).index_copy_(0, own, column)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return None if grad is None else grad[own], None, None, None
