"""Where things stand in the packed stream of a `TokenBatch`. All results are on the device of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from instep.types import TokenBatch


def _within(lengths: Tensor) -> Tensor:
    """0 .. length-1 for each length, one after another: int64 `[lengths.sum()]`."""
    starts = lengths.cumsum(0) - lengths
    count = torch.arange(int(lengths.sum()), device=lengths.device)
    return count - starts.repeat_interleave(lengths)


def response_positions(batch: TokenBatch) -> Tensor:
    """int64 `[num_response_tokens]`: the position whose logits predict each response token (one before it)."""
    first = batch.total_lengths.cumsum(0) - batch.response_lengths - 1
    return first.repeat_interleave(batch.response_lengths) + _within(batch.response_lengths)


def response_targets(batch: TokenBatch) -> Tensor:
    """int64 `[num_response_tokens]`: the response tokens themselves, samples in order."""
    return batch.tokens[response_positions(batch) + 1]


def cu_seqlens(batch: TokenBatch) -> tuple[Tensor, int]:
    """int32 `[num_samples + 1]`, where each sample begins (and the last ends), and the longest sample's length."""
    ends = batch.total_lengths.cumsum(0).to(torch.int32)
    return torch.nn.functional.pad(ends, (1, 0)), int(batch.total_lengths.max()) if batch.num_samples else 0


def position_ids(batch: TokenBatch) -> Tensor:
    """int64 `[num_tokens]`, counting from 0 in each sample."""
    return _within(batch.total_lengths)


def expand_to_tokens(batch: TokenBatch, per_sample: Tensor) -> Tensor:
    """`[num_samples]` -> `[num_response_tokens]`: each sample's value at each of its response tokens."""
    return per_sample.repeat_interleave(batch.response_lengths)
