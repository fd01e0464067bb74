"""Positions in the packed stream of a `TokenBatch`. All results are on the device of the batch.

They are computed on the host if the batch came from there, so that no process waits for a GPU to return a length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from instep.types import TokenBatch

_WORTH_SHARING = 0.9  # compute at most this fraction of a stream's tokens; otherwise compute all


@dataclass(frozen=True)
class SharedPrefixes:
    """A packed stream that computes a common prefix of several samples once; the results of a causal model are equal.

    Attributes:
        kept: int64 `[num_kept]`, ascending: computed positions of the stream, the last ones of each sample.
        copies: int64 `[num_tokens]`: the entry of `kept` for each token of the stream.
        cu_kept: int32 `[num_samples + 1]`, where the entries of each sample start in `kept` (and the last ones end).
        max_kept: the most entries of one sample.
    """

    kept: Tensor
    copies: Tensor
    cu_kept: Tensor
    max_kept: int


def shared_prefixes(batch: TokenBatch) -> SharedPrefixes | None:
    """Return the tokens to compute: a group's prompt, and other common prefixes, once; None if few are common.

    Prefixes are found by content: in lexicographic order, each sample shares its longest prefix with the one before it.
    """
    host = batch.on_host
    tokens, lengths = host.tokens.cpu().numpy(), host.total_lengths.tolist()
    starts = (np.cumsum(lengths) - lengths).tolist()
    keys = [tokens[start : start + length].tobytes() for start, length in zip(starts, lengths, strict=True)]
    copies = np.arange(len(tokens))
    num_kept = np.array(lengths)
    before = None
    for i in sorted(range(len(lengths)), key=keys.__getitem__):
        if before is not None:
            common = _common_prefix(tokens, starts[before], starts[i], min(lengths[before], lengths[i]))
            copies[starts[i] : starts[i] + common] = copies[starts[before] : starts[before] + common]
            num_kept[i] -= common
        before = i
    if num_kept.sum() > _WORTH_SHARING * len(tokens):
        return None
    computed = copies == np.arange(len(tokens))
    copies = (np.cumsum(computed) - 1)[copies]
    cu_kept = np.concatenate([[0], np.cumsum(num_kept)]).astype(np.int32)
    kept, copies, cu_kept = (_moved(torch.from_numpy(x), batch) for x in (computed.nonzero()[0], copies, cu_kept))
    return SharedPrefixes(kept, copies, cu_kept, int(num_kept.max()))


def nothing_shared(cu_seqlens: Tensor, max_seqlen: int, num_tokens: int) -> SharedPrefixes:
    """Return the plan that computes all `num_tokens` tokens."""
    every = torch.arange(num_tokens, device=cu_seqlens.device)
    return SharedPrefixes(every, every, cu_seqlens.clone(), max_seqlen)  # the compiler compares identities


def _common_prefix(tokens: np.ndarray, one: int, other: int, longest: int) -> int:
    """Return the number of equal tokens from `one` and from `other`, at most `longest`."""
    differs = tokens[one : one + longest] != tokens[other : other + longest]
    return int(differs.argmax()) if differs.any() else longest


def _moved(x: Tensor, batch: TokenBatch) -> Tensor:
    return x.to(batch.tokens.device, non_blocking=True)


def within(lengths: Tensor) -> Tensor:
    """Return 0 .. length-1 for each length, one after another: int64 `[lengths.sum()]`."""
    starts, total = lengths.cumsum(0) - lengths, int(lengths.sum())
    return torch.arange(total, device=lengths.device) - starts.repeat_interleave(lengths, output_size=total)


def response_positions(batch: TokenBatch) -> Tensor:
    """Return int64 `[num_response_tokens]`: the position whose logits predict each response token (one before it)."""
    return _moved(_response_positions(batch.on_host), batch)


def _response_positions(batch: TokenBatch) -> Tensor:
    first, inside = batch.total_lengths.cumsum(0) - batch.response_lengths - 1, within(batch.response_lengths)
    return first.repeat_interleave(batch.response_lengths, output_size=len(inside)) + inside


def response_targets(batch: TokenBatch) -> Tensor:
    """Return int64 `[num_response_tokens]`: the response tokens, samples in order."""
    host = batch.on_host
    return _moved(host.tokens[_response_positions(host) + 1], batch)


def cu_seqlens(batch: TokenBatch) -> tuple[Tensor, int]:
    """Return int32 `[num_samples + 1]`: the starts of the samples and the last end; and the longest one's length."""
    lengths = batch.on_host.total_lengths
    bounds = torch.nn.functional.pad(lengths.cumsum(0).to(torch.int32), (1, 0))
    return _moved(bounds, batch), int(lengths.max()) if batch.num_samples else 0


def position_ids(batch: TokenBatch) -> Tensor:
    """Return int64 `[num_tokens]`, which counts from 0 in each sample."""
    return _moved(within(batch.on_host.total_lengths), batch)


def response_temperatures(batch: TokenBatch) -> Tensor:
    """Return float32 `[num_response_tokens]`: the sampling temperature of each response token's sample."""
    per_sample = _moved(torch.as_tensor(batch.sample_columns["temperature"], dtype=torch.float32), batch)
    total = int(batch.on_host.response_lengths.sum())
    return per_sample.repeat_interleave(batch.response_lengths, output_size=total)
