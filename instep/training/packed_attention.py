"""Causal attention over packed sequences: one stream of tokens, divided into segments that do not see each other."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from instep.training.packing import SharedPrefixes, within

# torch 2.11 takes grouped heads as they are; later versions want to be told.
_VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
_MAX_PADDING = 1.25  # padded tokens over real ones, within a chunk of the padded path
_SHORT = 128  # the longest segments for plain products, which on a CPU are faster than the fused kernel, and small


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None = None,
    shared: SharedPrefixes | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention within each segment of a packed stream.

    Args:
        q: `[num_tokens, num_heads, head_dim]`.
        k, v: `[num_tokens, num_kv_heads, head_dim]`; grouped heads when there are fewer of them.
        cu_seqlens: int32 `[num_segments + 1]` from 0 to num_tokens, on the device of `q`.
        max_seqlen: the longest segment.
        scale: of q k^T; 1 / sqrt(head_dim) when None.
        shared: where given, `q`, `k`, `v` and the result hold only the `num_kept` tokens that are computed.
        window: how many tokens a token sees, itself included; None: all before it.

    Returns:
        `[num_tokens, num_heads, head_dim]`.
    """
    if not _is_fused(q):
        seen = max_seqlen if window is None else window
        cu_queries, copies = (cu_seqlens, None) if shared is None else (shared.cu_kept, shared.copies)
        return _padded_attention(q, k, v, cu_seqlens, scale, cu_queries, copies, seen)
    gqa = {"enable_gqa": q.shape[1] != k.shape[1]} if _VARLEN_HAS_GQA else {}
    cu_queries, max_queries = cu_seqlens, max_seqlen
    if shared is not None:  # the queries are the last tokens of their segments, as the kernel has it
        cu_queries, max_queries = shared.cu_kept, shared.max_kept
        k, v = rows(k, shared.copies), rows(v, shared.copies)
    sides = (-1 if window is None else window - 1, 0)
    return varlen_attn(q, k, v, cu_queries, cu_seqlens, max_queries, max_seqlen, window_size=sides, scale=scale, **gqa)


@dataclass(frozen=True)
class Bounds:
    """Where the queries and the keys of each segment begin; the queries are the last tokens of what they see.

    Attributes:
        cu_queries, cu_keys: int32 `[num_segments + 1]` from 0 to the number of queries, and of keys.
        max_queries, max_keys: the most of one segment.
    """

    cu_queries: Tensor
    max_queries: int
    cu_keys: Tensor
    max_keys: int

    @property
    def of_kernel(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_queries, self.cu_keys, self.max_queries, self.max_keys


def attention_and_sums(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float | None) -> tuple[Tensor, Tensor]:
    """Causal attention within each segment, without a gradient, and what `attention_backward` wants of it.

    On a GPU that is the logsumexp of each query's scores, of the kernel that is also behind `varlen_attn`.
    """
    if _is_fused(q):
        where = dict(scale=scale, window_size_left=-1, window_size_right=0)
        return torch.ops.aten._flash_attention_forward(q, k, v, *bounds.of_kernel, 0.0, True, False, **where)[:2]
    return _padded(q, k, v, bounds, scale), q.new_empty(0)


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, bounds: Bounds, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `q`, `k`, `v` from that of `out`; `out, sums` are `attention_and_sums` of the others."""
    if _is_fused(q):
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        where = dict(scale=scale, window_size_left=-1, window_size_right=0)
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, sums, *bounds.of_kernel, 0.0, True, *no_dropout, **where
        )
    with torch.enable_grad():
        inputs = q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()
        again = _padded(*inputs, bounds, scale)
    by_query, by_key, by_value = torch.autograd.grad(again, inputs, grad)
    return by_query, by_key, by_value


def _is_fused(q: Tensor) -> bool:
    return q.device.type != "cpu" and q.dtype in (torch.bfloat16, torch.float16)


def rows(x: Tensor, indices: Tensor) -> Tensor:
    """`x[indices]` with a gradient that is deterministic and fast also where a row is taken several times."""
    return F.embedding(indices, x.flatten(1)).unflatten(-1, x.shape[1:])


def _padded(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float | None) -> Tensor:
    return _padded_attention(q, k, v, bounds.cu_keys, scale, bounds.cu_queries, None, bounds.max_keys)


def _padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float | None,
    cu_queries: Tensor,
    copies: Tensor | None,
    window: int,
) -> Tensor:
    """Attention over padded chunks of segments of similar length; causality hides the padding at their ends."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    query_starts, num_queries = cu_queries[:-1].long(), cu_queries.diff().long()
    outs, places = [], []
    chunks = chunks_of(lengths.tolist())
    for chunk in chunks:
        which = torch.tensor(chunk, device=q.device)
        start, length, num = starts[which], lengths[which], num_queries[which]
        if not num.any():  # all of the chunk is computed in other segments
            continue
        longest = int(length.max())
        short = q.device.type == "cpu" and longest <= _SHORT
        # The fused kernel knows only squares, in which queries of shared prefixes are left zero.
        skipped = length - num if short else torch.zeros_like(num)
        width = int(num.max()) if short else longest
        at = torch.arange(longest, device=q.device)
        keys = start[:, None] + at.minimum(length[:, None] - 1)
        keys = keys.flatten() if copies is None else copies[keys.flatten()]
        place = query_starts[which].repeat_interleave(num) + within(num)  # of the chunk's queries in `q`
        slot = (torch.arange(len(chunk), device=q.device) * width + length - num - skipped).repeat_interleave(num)
        slot += within(num)  # and in [segments, width]
        padded = q.new_zeros(len(chunk) * width, *q.shape[1:]).index_copy(0, slot, q.index_select(0, place))
        queries, k_, v_ = (
            x.unflatten(0, (len(chunk), -1)).transpose(1, 2) for x in (padded, rows(k, keys), rows(v, keys))
        )
        if short:
            position = skipped[:, None, None] + at[:width, None]  # padded queries stay where they see a key
            visible = _visible(position.clamp(max=longest - 1), at, window)
            out = _attend(queries, k_, v_, visible[:, None], scale)
        else:
            gqa = q.shape[1] != k.shape[1]
            mask = _visible(at[:, None], at, window) if window < longest else None
            out = F.scaled_dot_product_attention(
                queries, k_, v_, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
            )
        outs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, slot))
        places.append(place)
    return outs[0] if len(chunks) == 1 else torch.cat(outs).index_select(0, torch.cat(places).argsort())


def _visible(query: Tensor, key: Tensor, window: int) -> Tensor:
    return (key <= query) & (key > query - window)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention by plain matrix products -> `[segments, heads, num_queries, head_dim]`."""
    segments, heads, num_queries, head_dim = q.shape
    grouped = q.reshape(segments, k.shape[1], -1, head_dim)
    scores = (grouped @ k.transpose(-1, -2)).view(segments, heads, num_queries, -1) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights.view(*grouped.shape[:3], -1) @ v).view(q.shape)


def chunks_of(lengths: list[int]) -> list[list[int]]:
    """Indices of segments in as few chunks as bounded padding allows."""
    if len(lengths) * max(lengths) <= _MAX_PADDING * sum(lengths):
        return [list(range(len(lengths)))]
    chunks: list[list[int]] = []
    total = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if chunks and (len(chunks[-1]) + 1) * lengths[chunks[-1][0]] <= _MAX_PADDING * (total + lengths[i]):
            chunks[-1].append(i)
            total += lengths[i]
        else:
            chunks.append([i])
            total = lengths[i]
    return chunks
