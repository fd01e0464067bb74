"""Numbers in 8 bits, as in arXiv:2110.02861: blocks of 256 numbers with one scale each; a number is one of 256 values,
which are denser near 0.

Two details differ. First, the scale is the block's largest number with its sign, which is then exactly 1. So numbers
that are read and written again do not change: a checkpoint holds moments in float32 for any kind, and any kind can
resume from it. Second, a second moment above zero never becomes zero: that would make the step of its weight a thousand
times too large.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256


@functools.cache
def code_values(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values of the codes, ascending, the largest 1 (dynamic tree quantization)."""
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (exponent + (0 if signed else 1)) + 1, dtype=torch.float64)
        means = 10.0 ** (exponent - 6) * (bounds[:-1] + bounds[1:]) / 2
        values += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32).to(device)


class Codes(NamedTuple):
    """Turns numbers in [-1, 1] into codes and back, on one device."""

    values: Tensor  # float32 [256], ascending
    bounds: Tensor  # float32 [256]: above bounds[i] a number's code is above i; the last is infinite
    first: Tensor  # uint8 [2**16]: the least code of the numbers whose float32 begins with these 16 bits


@functools.cache
def code_tables(signed: bool, device: torch.device) -> Codes:
    """Build the tables. Bounds are so far apart that numbers with the same first 16 bits (8 of 24 digits) have two
    codes."""
    values = code_values(signed, torch.device("cpu"))
    bounds = (values[1:] + values[:-1]) / 2
    begins = torch.arange(2**16, dtype=torch.int32)
    begins = torch.where(begins < 2**15, begins << 16, ((begins - 2**16) << 16) + 0xFFFF)  # the lowest of each
    first = torch.bucketize(begins.view(torch.float32), bounds).to(torch.uint8)
    return Codes(values.to(device), F.pad(bounds, (0, 1), value=torch.inf).to(device), first.to(device))


def looked_up(relative: Tensor, codes: Codes) -> Tensor:
    """Find the result of `torch.bucketize` with eight comparisons, for compiled code."""
    least = codes.first[(relative.view(torch.int32) >> 16) & 0xFFFF].int()
    return least + (relative > codes.bounds[least]).int()


def decoded(stored: Tensor, scale: Tensor, codes: Codes) -> Tensor:
    """Return the numbers `[blocks, BLOCK]` of codes of this shape and scales `[blocks]`."""
    return codes.values[stored.int()] * scale[:, None]


def encoded(blocks: Tensor, codes: Codes, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales for `decoded`."""
    high, low = blocks.amax(1), blocks.amin(1)
    scale = torch.where(high >= -low, high, low)
    relative = blocks / scale.where(scale != 0, torch.ones_like(scale))[:, None]
    if torch.compiler.is_compiling():
        found = looked_up(relative, codes)
    else:
        found = torch.bucketize(relative, codes.bounds[:-1], out_int32=True)
    if not signed:
        found = torch.where(relative > 0, found.clamp(min=1), found)
    return found.to(torch.uint8), scale
