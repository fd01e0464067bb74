"""Checksums of the tensors of a bucket, computed where the bucket is."""

from __future__ import annotations

import functools

import torch

ROW_BYTES = 4096
_WORDS = ROW_BYTES // 4
_ROW_FACTOR = 0x9E3779B97F4A7C15  # odd: its powers are odd, too


@functools.cache
def _word_factors(device: torch.device) -> torch.Tensor:
    """Return int64 `[_WORDS]`: the numbers of splitmix64 from 0."""
    numbers, mask = [], (1 << 64) - 1
    for i in range(1, _WORDS + 1):
        z = i * _ROW_FACTOR & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        numbers.append(z ^ z >> 31)
    return torch.tensor([_signed(n) for n in numbers], dtype=torch.int64, device=device)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def checksums(data: torch.Tensor, num_rows: list[int]) -> list[str]:
    """Return `sums` as texts."""
    return texts_of(sums(data, num_rows))


def texts_of(numbers: torch.Tensor) -> list[str]:
    return [f"{number & (1 << 64) - 1:016x}" for number in numbers.tolist()]


def sums(data: torch.Tensor, num_rows: list[int]) -> torch.Tensor:
    """Return the checksum of each tensor of a bucket, int64, computed on its device; the host of a GPU does not wait.

    Each 32-bit word is multiplied with a different 64-bit number. A checksum is the sum modulo 2^64 (multilinear
    hashing, Lemire and Kaser 2014). It detects swapped, transposed, torn and stale bytes, but gives no protection
    against forged ones.

    Args:
        data: uint8 `[sum(num_rows) * ROW_BYTES]`.
        num_rows: of each tensor; the rest of its last row is zero.
    """
    device, total = data.device, sum(num_rows)
    factors = _word_factors(device)
    rows = data.view(torch.int32).view(-1, _WORDS)
    of_rows = torch.cat([(part * factors).sum(1) for part in rows.split(1 << 13)])  # in parts: the product is larger
    powers = torch.full((max(num_rows),), _signed(_ROW_FACTOR), dtype=torch.int64, device=device).cumprod(0)
    counts = torch.tensor([0, *num_rows]).to(device, non_blocking=True)
    ends = counts.cumsum(0)
    starts = ends[:-1].repeat_interleave(counts[1:], output_size=total)  # with the size given, a GPU need not be asked
    places = torch.arange(total, device=device) - starts
    totals = torch.cat([of_rows.new_zeros(1), (of_rows * powers[places]).cumsum(0)])
    return totals[ends].diff()


def checksum(tensor: torch.Tensor) -> str:
    """Return the checksum of one tensor."""
    data = raw_bytes(tensor)
    rows = rows_of(data.numel())
    padded = data.new_zeros(rows * ROW_BYTES)
    padded[: data.numel()] = data
    return checksums(padded, [rows])[0]


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def rows_of(num_bytes: int) -> int:
    """Return the number of rows of a bucket for a tensor of this many bytes."""
    return max(1, -(-num_bytes // ROW_BYTES))
