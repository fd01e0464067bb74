"""Sums over the response tokens of each sample in a flat column, independent of the rest of the micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Lengths: TypeAlias = Sequence[int] | Tensor  # of the responses of samples, in tokens


def owners(response_lengths: Lengths, like: Tensor) -> Tensor:
    """Return int64 `[num_tokens]`: the sample of each entry of `like`.

    Raises:
        ValueError: the sum of the lengths differs from the entries of `like`.
    """
    lengths = torch.as_tensor(response_lengths, device=like.device)
    found = torch.arange(lengths.numel(), device=like.device).repeat_interleave(lengths)
    if found.numel() != like.numel():
        raise ValueError(f"{like.numel()} tokens for response lengths with the sum {found.numel()}")
    return found


def segment_sum(values: Tensor, mask: Tensor, response_lengths: Lengths) -> Tensor:
    """Compute sum_t m_t x_t of each sample, summed in float64: `[num_tokens]` -> `[num_samples]` in the dtype of
    `values`.

    Values where the mask is 0 (NaN too) are ignored; a sample without tokens, or fully masked, gives 0.

    Raises:
        ValueError: mask or lengths do not fit.
    """
    if mask.shape != values.shape:
        raise ValueError(f"a mask of {mask.numel()} entries for {values.numel()} tokens")
    owner = owners(response_lengths, values)
    kept = torch.where(mask > 0, values, torch.zeros_like(values)).double()
    return kept.new_zeros(len(response_lengths)).index_add(0, owner, kept).to(values.dtype)


def segment_mean(values: Tensor, mask: Tensor, response_lengths: Lengths) -> Tensor:
    """Compute sum_t m_t x_t / max(sum_t m_t, 1) of each sample; see `segment_sum`."""
    count = segment_sum((mask > 0).to(values.dtype), mask, response_lengths)
    return segment_sum(values, mask, response_lengths) / count.clamp(min=1)


def expand(per_sample: Tensor, response_lengths: Lengths) -> Tensor:
    """Expand `[num_samples]` -> `[num_tokens]`: each sample's value at each of its response tokens."""
    return per_sample.repeat_interleave(torch.as_tensor(response_lengths, device=per_sample.device))
