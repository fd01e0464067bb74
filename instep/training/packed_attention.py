"""Causal attention over packed sequences: one stream of tokens, cut into segments that do not see each other."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# torch 2.11 takes grouped heads as they are; later versions want to be told.
_VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
_MAX_PADDING = 1.25  # padded tokens over real ones, within a chunk of the padded path


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, max_seqlen: int, scale: float | None = None
) -> Tensor:
    """Causal attention within each segment of a packed stream.

    Args:
        q: `[num_tokens, num_heads, head_dim]`.
        k, v: `[num_tokens, num_kv_heads, head_dim]`; grouped heads when there are fewer of them.
        cu_seqlens: int32 `[num_segments + 1]` from 0 to num_tokens, on the device of `q`.
        max_seqlen: the longest segment.
        scale: of q k^T; 1 / sqrt(head_dim) when None.

    Returns:
        `[num_tokens, num_heads, head_dim]`.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        gqa = {"enable_gqa": q.shape[1] != k.shape[1]} if _VARLEN_HAS_GQA else {}
        return varlen_attn(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=(-1, 0), scale=scale, **gqa
        )
    return _padded_attention(q, k, v, cu_seqlens, scale)


def _padded_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float | None) -> Tensor:
    """Segments padded at their end, where causality keeps the padding out of real tokens, in chunks of like length."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    chunks = _chunks(lengths.tolist())
    if len(chunks) == 1:
        return _attend_chunk(q, k, v, starts, lengths, scale)
    outs, places = [], []
    for chunk in chunks:
        which = torch.tensor(chunk, device=q.device)
        start, length = starts[which], lengths[which]
        place = torch.arange(int(length.sum()), device=q.device)
        place += (start - (length.cumsum(0) - length)).repeat_interleave(length)
        local_start = length.cumsum(0) - length
        outs.append(_attend_chunk(q[place], k[place], v[place], local_start, length, scale))
        places.append(place)
    out = torch.cat(outs)
    return out[torch.cat(places).argsort()]


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, scale: float | None) -> Tensor:
    num_segments, longest = lengths.numel(), int(lengths.max())
    even = num_segments * longest == q.shape[0]
    if not even:  # place of each token in [num_segments, longest]
        place = torch.arange(q.shape[0], device=q.device)
        shift = torch.arange(num_segments, device=q.device) * longest - starts
        place += shift.repeat_interleave(lengths)

    def batched(x: Tensor) -> Tensor:
        if not even:
            x = x.new_zeros(num_segments * longest, *x.shape[1:]).index_copy(0, place, x)
        return x.view(num_segments, longest, *x.shape[1:]).transpose(1, 2)

    gqa = q.shape[1] != k.shape[1]
    q, k, v = batched(q), batched(k), batched(v)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    out = out.transpose(1, 2).flatten(0, 1)
    return out if even else out[place]


def _chunks(lengths: list[int]) -> list[list[int]]:
    """Indices of segments, as few chunks as keep each chunk's padding bounded."""
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
