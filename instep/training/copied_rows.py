"""The gradient of rows that were taken several times, by a kernel for GPUs (Triton)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024  # of a program, at most


@triton.jit
def _sum(out, grad, order, starts, width, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for i in range(tl.load(starts + row), tl.load(starts + row + 1)):
        total += tl.load(grad + tl.load(order + i) * width + columns, mask=there).to(tl.float32)
    tl.store(out + row * width + columns, total, mask=there)


def sum_copies(grads: Sequence[Tensor], indices: Tensor, num_rows: int) -> list[Tensor]:
    """Return of each of `grads` `[num_rows, ...]`: the sums of its rows whose entry in `indices` is 0, 1, 2, ...

    The sums are in float32 and always in the same order.
    """
    which, order = indices.int().sort(stable=True)
    starts = torch.searchsorted(which, torch.arange(num_rows + 1, dtype=torch.int32, device=which.device))
    sums = []
    for grad in grads:
        out, width = grad.new_empty(num_rows, *grad.shape[1:]), grad.shape[1:].numel()
        columns = min(_COLUMNS, triton.next_power_of_2(width))
        _sum[num_rows, triton.cdiv(width, columns)](out, grad.contiguous(), order, starts, width, COLUMNS=columns)
        sums.append(out)
    return sums
