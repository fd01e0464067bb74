"""Causal attention over packed sequences: one stream of tokens, divided into segments that do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, library

from instep.training.packing import SharedPrefixes, within

_MAX_PADDING = 1.25  # padded tokens per real token, within a chunk of the padded path
_SHORT = 128  # the longest segments for plain products: on a CPU they are faster than the fused kernel, and small


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
    """Compute causal attention within each segment of a packed stream.

    Args:
        q: `[num_tokens, num_heads, head_dim]`.
        k, v: `[num_tokens, num_kv_heads, head_dim]`; grouped heads if there are fewer of them.
        cu_seqlens: int32 `[num_segments + 1]` from 0 to num_tokens, on the device of `q`.
        max_seqlen: the longest segment.
        scale: the factor of q k^T; None: 1 / sqrt(head_dim).
        shared: if given, `q`, `k`, `v` and the result hold only the `num_kept` computed tokens.
        window: the number of tokens that a token sees, itself included; None: all before it.

    Returns:
        `[num_tokens, num_heads, head_dim]`.
    """
    copies, cu_queries, max_queries = None, cu_seqlens, max_seqlen
    if shared is not None:  # as in the kernel, the queries are the last tokens of their segments
        copies, cu_queries, max_queries = shared.copies, shared.cu_kept, shared.max_kept
    if torch.compiler.is_compiling() or _is_fused(q):
        out: Tensor = _attention(q, k, v, copies, cu_queries, cu_seqlens, max_queries, max_seqlen, scale, window)[0]
        return out
    copies = copies if _is_shared(copies, k) else None
    return _padded_attention(q, k, v, cu_seqlens, scale, cu_queries, copies, max_seqlen if window is None else window)


@dataclass(frozen=True)
class Bounds:
    """Where the queries and the keys of each segment start; the queries are the last tokens of what they see.

    Attributes:
        cu_queries, cu_keys: int32 `[num_segments + 1]` from 0 to the number of queries, and of keys.
        max_queries, max_keys: the largest numbers in one segment.
    """

    cu_queries: Tensor
    max_queries: int
    cu_keys: Tensor
    max_keys: int

    @property
    def of_kernel(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_queries, self.cu_keys, self.max_queries, self.max_keys


def attention_and_sums(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float | None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute causal attention within each segment, without a gradient, and the sums that `attention_backward` needs.

    On a GPU these are the logsumexp of each query's scores, float32 `[num_heads, num_queries]`; otherwise undefined.
    """
    if _is_fused(q):
        causal, sides = _sides(window, bounds.max_keys)
        return torch.ops.aten._flash_attention_forward(
            q, k, v, *bounds.of_kernel, 0.0, causal, False, scale=scale, **sides
        )[:2]
    sums = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return _padded(q, k, v, bounds, scale, window), sums


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Bounds,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k`, `v` from the gradient of `out`; `out, sums` are results of
    `attention_and_sums`."""
    if _is_fused(q):
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        causal, sides = _sides(window, bounds.max_keys)
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, sums, *bounds.of_kernel, 0.0, causal, *no_dropout, scale=scale, **sides
        )
    # functorch's: autograd does not reach into an operator's kernel
    _, of_inputs = torch.func.vjp(lambda q, k, v: _padded(q, k, v, bounds, scale, window), q, k, v)
    by_query, by_key, by_value = of_inputs(grad)
    return by_query, by_key, by_value


def _sides(window: int | None, max_keys: int) -> tuple[bool, dict[str, int]]:
    """Return whether the kernel sees all keys before a query, and how many others it sees (-1: all)."""
    causal = window is None or window >= max_keys
    return causal, dict(window_size_left=-1 if causal or window is None else window - 1, window_size_right=0)


def _is_fused(q: Tensor) -> bool:
    return q.device.type != "cpu" and q.dtype in (torch.bfloat16, torch.float16)


def rows(x: Tensor, indices: Tensor) -> Tensor:
    """Return `x[indices]`; the gradient is deterministic and fast even if a row is taken many times."""
    taken: Tensor = _Rows.apply(x, indices)
    return taken


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, indices: Tensor) -> Tensor:
        return x.index_select(0, indices)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x, indices = inputs
        ctx.save_for_backward(indices)
        ctx.num_rows = len(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return _sum_copies([grad], indices, ctx.num_rows)[0], None


def _sum_copies(grads: Sequence[Tensor], indices: Tensor, num_rows: int) -> list[Tensor]:
    """Return the gradient of each `x` from that of `rows(x, indices)`."""
    if indices.is_cuda:
        from instep.training.copied_rows import sum_copies  # it imports Triton, which torch for CPUs lacks

        return sum_copies(grads, indices, num_rows)
    backward = torch.ops.aten.embedding_dense_backward
    return [backward(x.flatten(1), indices, num_rows, -1, False).unflatten(1, x.shape[1:]) for x in grads]


# The compiler knows attention only by the types and dimensions of its results. So the compiled code is the same for all
# lengths, with and without shared prefixes.
@library.custom_op("instep::packed_attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    copies: torch.Tensor | None,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    max_queries: int,
    max_keys: int,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `attention_and_sums` with the keys and values `copies` of the computed tokens, both contiguous."""
    bounds = Bounds(cu_queries, max_queries, cu_keys, max_keys)
    if _is_shared(copies, k):
        k, v = rows(k, copies), rows(v, copies)
    out, sums = attention_and_sums(q, k, v, bounds, scale, window)
    return out.contiguous(), sums


@_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@library.custom_op("instep::packed_attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    copies: torch.Tensor | None,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    max_queries: int,
    max_keys: int,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bounds = Bounds(cu_queries, max_queries, cu_keys, max_keys)
    keys, values = (rows(k, copies), rows(v, copies)) if _is_shared(copies, k) else (k, v)
    by_query, by_key, by_value = attention_backward(grad, q, keys, values, out, sums, bounds, scale, window)
    if _is_shared(copies, k):
        by_key, by_value = _sum_copies((by_key, by_value), copies, len(k))
    return by_query.contiguous(), by_key.contiguous(), by_value.contiguous()


@_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, copies, cu_queries, cu_keys, *ctx.other = inputs
    ctx.save_for_backward(q, k, v, *output, copies, cu_queries, cu_keys)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_attention_backward(grad, *ctx.saved_tensors, *ctx.other), *[None] * 7


_attention.register_autograd(_differentiate, setup_context=_keep)


def _is_shared(copies: Tensor | None, k: Tensor) -> TypeGuard[Tensor]:
    return copies is not None and len(copies) > len(k)


def _padded(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float | None, window: int | None) -> Tensor:
    window = bounds.max_keys if window is None else window
    return _padded_attention(q, k, v, bounds.cu_keys, scale, bounds.cu_queries, None, window)


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
    """Compute attention over padded chunks of segments of similar length; causality hides the padding at their ends."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    query_starts, num_queries = cu_queries[:-1].long(), cu_queries.diff().long()
    outs, places = [], []
    chunks = chunks_of(lengths.tolist())
    for chunk in chunks:
        which = torch.tensor(chunk, device=q.device)
        start, length, num = starts[which], lengths[which], num_queries[which]
        if not num.any():  # other segments compute all of the chunk
            continue
        longest = int(length.max())
        short = q.device.type == "cpu" and longest <= _SHORT
        # The fused kernel supports only square scores, so queries of shared prefixes stay zero.
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
    """Compute attention by plain matrix products -> `[segments, heads, num_queries, head_dim]`."""
    segments, heads, num_queries, head_dim = q.shape
    grouped = q.reshape(segments, k.shape[1], -1, head_dim)
    scores = (grouped @ k.transpose(-1, -2)).view(segments, heads, num_queries, -1) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights.view(*grouped.shape[:3], -1) @ v).view(q.shape)


def chunks_of(lengths: list[int]) -> list[list[int]]:
    """Return indices of segments in as few chunks as bounded padding allows."""
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
