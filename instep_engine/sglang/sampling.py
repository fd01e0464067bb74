"""Seeds of requests act without SGLang's deterministic mode, which refuses most attention kernels.

A request without a seed gets one from its id. Every tensor-parallel rank samples for itself, so all must draw alike.
The tokens of a request do not depend on the others of its batch.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

_LOW = 0xFFFFFFFF


def add_seeds(info: Any, cls: Any, batch: Any, vocab_size: int) -> Any:
    """Give a batch's `SamplingBatchInfo` the seeds of its requests (after `from_schedule_batch`)."""
    if info.sampling_seed is None:
        asked = [request.sampling_params.sampling_seed for request in batch.reqs]
        seeds = [zlib.crc32(r.rid.encode()) if s is None else s for r, s in zip(batch.reqs, asked, strict=True)]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device, non_blocking=True)
    return info


def sample(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor,
    positions: torch.Tensor,
    *,
    return_filtered_probs: bool = False,
    max_top_k: int | None = None,
) -> Any:
    """Sample as SGLang's function with these arguments does, with the noise of a token tied to its id.

    SGLang ties it to the rank of the token, but only if some request of the batch has a top-p, top-k or min-p. Then the
    other requests would get other tokens than alone. It also refuses a min-p with seeds.

    Args:
        probs: float32 `[num_requests, vocab_size]`; the others `[num_requests]`.

    Returns:
        Token ids, int32 `[num_requests]`. With `return_filtered_probs` (from 0.5.19) also the kept probabilities in
        descending order, their ids, and the probabilities of the tokens.
    """
    from sglang.srt.layers.sampler import multinomial_with_seed

    ordered, order = probs.sort(dim=-1, descending=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)[None]
    keep = (ranks < top_ks[:, None]) & (ordered.cumsum(-1) - ordered <= top_ps[:, None])
    if need_min_p_sampling:
        keep &= ordered >= ordered[:, :1] * min_ps[:, None]
    kept = torch.zeros_like(keep).scatter(-1, order, keep)
    log_probs = probs.log().masked_fill(~kept, -torch.inf)
    tokens = multinomial_with_seed(log_probs, sampling_seed, positions).view(-1, 1)
    ids = tokens.view(-1).to(torch.int32)
    if not return_filtered_probs:
        return ids
    return ids, ordered * keep, order.to(torch.int32), probs.gather(-1, tokens).view(-1)


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Compute SGLang's Triton kernel of this name in torch: MurmurHash3 (x86, 32 bits) of seed, position and column.

    Args:
        seed, positions: `[num_rows]`; col_indices: `[num_columns]`.

    Returns:
        int64 `[num_rows, num_columns]`, below 2^32.
    """
    seed, positions = seed.to(torch.int64)[:, None], positions.to(torch.int64)[:, None]
    h = torch.zeros_like(seed)
    for block in (seed & _LOW, seed >> 32 & _LOW, positions, col_indices.to(torch.int64)[None]):
        k = _rotate(block * 0xCC9E2D51 & _LOW, 15) * 0x1B873593 & _LOW
        h = _rotate(h ^ k, 13) * 5 + 0xE6546B64 & _LOW
    h = h ^ 16  # the number of bytes
    h = (h ^ h >> 16) * 0x85EBCA6B & _LOW
    h = (h ^ h >> 13) * 0xC2B2AE35 & _LOW
    return h ^ h >> 16


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x << bits | x >> 32 - bits) & _LOW
