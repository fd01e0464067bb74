"""The log-prob of one token per row of logits, in one pass over them.

log_softmax(x)[t] = x[t] - m - log(sum exp(x - m)), m = max x. One program per row would leave most of a GPU idle. So
each row is cut into parts: the first kernel writes the maximum and the sum of each part, the second joins them.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

PART = 4096  # logits per program


@triton.jit
def _reduce_parts(tops, sums, logits, row_stride, vocab_size, num_parts, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * row_stride + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    exps = tl.where(x == float("-inf"), 0.0, tl.exp(x - top))  # if all are minus infinity the difference is NaN
    tl.store(tops + row * num_parts + part, top)
    tl.store(sums + row * num_parts + part, tl.sum(exps, axis=0))


@triton.jit
def _join_parts(out, tops, sums, logits, row_stride, tokens, num_parts, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, SIZE)
    there = parts < num_parts
    part_tops = tl.load(tops + row * num_parts + parts, mask=there, other=float("-inf"))
    part_sums = tl.load(sums + row * num_parts + parts, mask=there, other=0.0)
    top = tl.max(part_tops, axis=0)
    total = tl.sum(tl.where(part_sums == 0.0, 0.0, part_sums * tl.exp(part_tops - top)), axis=0)
    token = tl.load(tokens + row).to(tl.int64)
    x = tl.load(logits + row * row_stride + token).to(tl.float32)
    tl.store(out + row, x - top - tl.log(total))


def token_log_probs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probs `[num_rows]`, float32, of `token_ids [num_rows]` under `logits [num_rows, vocab_size]`.

    Sums are in float32 for any dtype of the logits. Only their last dimension must be contiguous.
    """
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if not num_rows:
        return out
    assert logits.stride(1) == 1 and token_ids.shape == (num_rows,)
    num_parts = triton.cdiv(vocab_size, PART)
    tops, sums = torch.empty(2, num_rows, num_parts, dtype=torch.float32, device=logits.device)
    row_stride = logits.stride(0)
    _reduce_parts[(num_rows, num_parts)](tops, sums, logits, row_stride, vocab_size, num_parts, SIZE=PART)
    size = triton.next_power_of_2(num_parts)
    _join_parts[(num_rows,)](out, tops, sums, logits, row_stride, token_ids.contiguous(), num_parts, SIZE=size)
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_known"])
def add_low_rank(
    out,
    y,
    b,
    bias,
    tokens,
    num_tokens,
    num_known,
    num_outputs,
    y_stride,
    second,
    third,
    RANK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute `adapter.add_adapter`: a program computes ROWS tokens and COLUMNS outputs of one slice."""
    begin = tl.program_id(0) * COLUMNS
    part = (begin >= second).to(tl.int32) + (begin >= third).to(tl.int32)
    columns = begin + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = rows < num_tokens
    has = tl.load(tokens + rows, mask=there & (rows < num_known), other=-1) >= 0
    ranks = tl.arange(0, RANK)
    of_row = rows.to(tl.int64)[:, None]
    low = y + of_row * y_stride + num_outputs + part * RANK + ranks[None, :]
    x = tl.load(low, mask=(there & has)[:, None], other=0.0)
    w = tl.load(b + columns[None, :] * RANK + ranks[:, None])
    total = tl.load(y + of_row * y_stride + columns[None, :], mask=there[:, None], other=0.0).to(tl.float32)
    total += tl.dot(x, w)
    if HAS_BIAS:
        total += tl.load(bias + columns)[None, :].to(tl.float32)
    tl.store(out + of_row * num_outputs + columns[None, :], total.to(out.dtype.element_ty), mask=there[:, None])
