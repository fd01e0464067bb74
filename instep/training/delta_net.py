"""The gated delta net over packed sequences: each sample starts with an empty state and an empty window.

Both functions take a whole packed row. A caller whose ranks share a row gathers it first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from instep.training.kernels import has_flash_linear_attention
from instep.training.packing import within

_EPS = 1e-6  # of the norms of queries and keys, as in transformers and in the kernels


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, *, chunk_size: int = 64
) -> Tensor:
    """Compute the gated delta rule for each sample of a packed row, in float32.

    With q and k of length 1, and q divided by sqrt(Dk), a head's state S is `[Dk, Dv]`, and
    S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; output = S^T q (Gated Delta Networks, arXiv:2412.06464, eq. 10).

    Samples are padded to whole chunks. Step i computes chunk i of all samples that have one, so the longest sample
    sets the number of steps. Results that need no state are computed for all chunks at once.

    Args:
        query, key: `[1, num_tokens, num_key_heads, Dk]`, where num_key_heads divides num_value_heads.
        value: `[1, num_tokens, num_value_heads, Dv]`.
        g: `[1, num_tokens, num_value_heads]`, the logarithm of the decay, at most 0.
        beta: `[1, num_tokens, num_value_heads]`, the share of a value that is written.
        cu_seqlens: int `[num_samples + 1]` from 0 to num_tokens.

    Returns:
        `[1, num_tokens, num_value_heads, Dv]`, in the type of `query`.
    """
    if _has_kernels(query):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        out: Tensor = chunk_gated_delta_rule(
            query, key, value, g, beta, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True, chunk_size=chunk_size
        )[0]
        return out
    slot, running = _chunks(cu_seqlens, chunk_size)
    num_chunks, per_key = sum(running), value.shape[2] // key.shape[2]

    def chunked(x: Tensor) -> Tensor:  # [1, num_tokens, heads, ...] -> [num_chunks, heads, chunk_size, ...]
        padded = x.new_zeros(num_chunks * chunk_size, *x.shape[2:], dtype=torch.float32)
        return padded.index_copy(0, slot, x[0].float()).unflatten(0, (num_chunks, chunk_size)).transpose(1, 2)

    q, k = (chunked(_unit(x.float())).repeat_interleave(per_key, dim=1) for x in (query, key))
    q = q * q.shape[-1] ** -0.5
    v, write, decay = chunked(value), chunked(beta)[..., None], chunked(g).cumsum(-1)[..., None]  # the decays so far
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)
    between = (decay - decay.transpose(-1, -2)).masked_fill(later, -torch.inf).exp()
    kept = decay.exp()
    # What a token writes depends on what those before it in the chunk write: (1 + strict_tril(...)) written = right.
    system, right = (write * k) @ k.transpose(-1, -2) * between, torch.cat([write * v, write * k * kept], -1)
    written, read = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    last = decay[:, :, -1:]
    parts = written, read, q * kept, k * (last - decay).exp(), last.exp()
    steps = zip(*(part.split(running) for part in parts), strict=True)
    state = v.new_zeros(running[0], v.shape[1], k.shape[-1], v.shape[-1])
    values, outs = [], []
    for new, known, asked, stored, faded in steps:
        state = state[: len(new)]
        values.append(new - known @ state)
        outs.append(asked @ state)
        state = state * faded + stored.transpose(-1, -2) @ values[-1]
    chunks = torch.cat(outs) + (q @ k.transpose(-1, -2) * between) @ torch.cat(values)
    return chunks.transpose(1, 2).flatten(0, 1)[None].index_select(1, slot).to(query.dtype)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, activation: str | None = None
) -> Tensor:
    """Compute the depthwise convolution of each token with those before it in its sample.

    Args:
        x: `[1, num_tokens, channels]`.
        weight: `[channels, width]`; the last column is the token's own.
        bias: `[channels]`.
        cu_seqlens: int `[num_samples + 1]` from 0 to num_tokens.
        activation: the name of a function of `torch.nn.functional`, such as silu.

    Returns:
        `[1, num_tokens, channels]`, in the type of `x`.
    """
    if activation in (None, "silu") and _has_kernels(x):
        from fla.modules.causal_conv1d import causal_conv1d

        out: Tensor = causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=cu_seqlens)[0]
        return out
    gap, at = weight.shape[1] - 1, torch.arange(x.shape[1], device=x.device)
    at = at + gap * (torch.searchsorted(cu_seqlens, at, right=True) - 1)  # zeros before each sample
    spread = weight.new_zeros(len(weight), x.shape[1] + gap * (len(cu_seqlens) - 1))
    spread = spread.index_copy(1, at + gap, x[0].T.to(weight.dtype))
    y = F.conv1d(spread[None], weight[:, None], bias, groups=len(weight)).index_select(2, at)
    return (y if activation is None else getattr(F, activation)(y)).mT.to(x.dtype).contiguous()


def _has_kernels(x: Tensor) -> bool:
    hopper = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and has_flash_linear_attention(hopper=hopper)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _chunks(cu_seqlens: Tensor, size: int) -> tuple[Tensor, list[int]]:
    """Return each token's place in the chunks `[num_tokens]`, and the number of samples that have an i-th chunk.

    The chunks are in the order of their number in the sample, then of samples, the longest first.
    """
    lengths = cu_seqlens.diff().long()
    counts = (lengths + size - 1) // size
    rank = counts.argsort(descending=True, stable=True).argsort()
    numbers = torch.arange(int(counts.max()), device=lengths.device)
    running = (counts[:, None] > numbers).sum(0)
    inside = within(lengths)
    number = inside // size
    chunk = (running.cumsum(0) - running)[number] + rank.repeat_interleave(lengths, output_size=len(inside))
    return chunk * size + inside % size, running.tolist()
