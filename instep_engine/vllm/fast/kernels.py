"""The log-prob of one token per row of logits in one pass, attention of decoding, and the choice of tokens.

log_softmax(x)[t] = x[t] - m - log(sum exp(x - m)), m = max x. One program per row would leave most of a GPU idle. So
each row is cut into parts: the first kernel writes the maximum and the sum of each part, the second joins them.
"""

from __future__ import annotations

import math

import torch
from vllm.triton_utils import tl, tldevice, triton

PART, SAMPLED_PART = 4096, 2048  # logits per program


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


@triton.jit
def _attend(
    out, q, keys, values, table, lengths, scale, out_stride, q_stride, table_stride, page_stride, token_stride,
    head_stride, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute the GROUP queries of a request that share a key-value head, over blocks of BLOCK keys."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    queries = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    at_queries = (head * GROUP + queries)[:, None] * DIM + dims[None, :]
    there = (queries < GROUP)[:, None]
    query = tl.load(q + row * q_stride + at_queries, mask=there, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(0, length, BLOCK):
        places = start + tl.arange(0, BLOCK)
        known = places < length
        page = tl.load(table + row * table_stride + places // PAGE, mask=known, other=0).to(tl.int64)
        at = page * page_stride + (places % PAGE) * token_stride + head * head_stride
        key = tl.load(keys + at[None, :] + dims[:, None], mask=known[None, :], other=0.0)
        scores = tl.where(known[None, :], tl.dot(query, key) * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        shrunk = tl.exp2(top - new_top)
        total = total * shrunk + tl.sum(weights, axis=1)
        value = tl.load(values + at[:, None] + dims[None, :], mask=known[:, None], other=0.0)
        result = result * shrunk[:, None] + tl.dot(weights.to(value.dtype), value)
        top = new_top
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]  # a row that pads the step has no keys
    tl.store(out + row * out_stride + at_queries, result.to(out.dtype.element_ty), mask=there)


def attend(
    out: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor,
    lengths: torch.Tensor, scale: float
) -> None:  # fmt: skip
    """Write softmax(scale q K^T) V of one query per request into `out`, like `q` `[num_rows, heads, dim]`.

    Args:
        keys, values: the cache, `[num_pages, page_size, kv_heads, dim]`; the same strides, the last one 1.
        table: the pages of each request, `[num_rows, most_pages]`; lengths: its keys `[num_rows]`, int32.
    """
    num_rows, heads, dim = q.shape
    _, page_size, kv_heads, _ = keys.shape
    assert keys.stride() == values.stride() and q.stride()[1:] == out.stride()[1:] == (dim, 1) and keys.stride(3) == 1
    strides = out.stride(0), q.stride(0), table.stride(0), *keys.stride()[:3]
    group = heads // kv_heads
    # The fastest of 60 combinations on an H200 that also fits the shared memory of smaller GPUs.
    sizes = {"GROUP": group, "DIM": dim, "PAGE": page_size, "ROWS": max(16, triton.next_power_of_2(group)), "BLOCK": 32}
    given = out, q, keys, values, table, lengths, scale * math.log2(math.e)  # for exp2
    _attend[(num_rows, kv_heads)](*given, *strides, **sizes, num_warps=1, num_stages=5)


@triton.jit
def _best_of_part(
    best, tokens, logits, row_stride, requests, temperatures, seeds, places, vocab_size, num_parts, SIZE: tl.constexpr
):  # fmt: skip
    """Write the token of the highest score in a part of a row's logits, and that score (logarithm; see `sample`)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * SIZE + tl.arange(0, SIZE)
    known = columns < vocab_size
    x = tl.load(logits + row * row_stride + columns, mask=known, other=float("-inf")).to(tl.float32)
    request = tl.load(requests + row)
    if tl.load(temperatures + request) == 0.0:
        score, at = tl.max(x, axis=0, return_indices=True)
    else:
        seed = tl.randint(tl.load(seeds + request), tl.load(places + row))
        a, b, c, d = tl.rand4x(seed, part * (SIZE // 4) + tl.arange(0, SIZE // 4))
        u = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [SIZE])
        top = tl.max(x, axis=0)
        weight = tl.where(x == float("-inf"), 0.0, tl.exp(x - top))
        score, at = tl.max(weight / -tldevice.log1p(-tl.maximum(u, 2.0**-31)), axis=0, return_indices=True)
        score = tl.log(score) + top
    tl.store(best + row * num_parts + part, score)
    tl.store(tokens + row * num_parts + part, part * SIZE + at)


def sample(
    logits: torch.Tensor, requests: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """Sample a token of each row: argmax_t exp(x_t) / E_t, where the E_t are exponential (the Gumbel-max trick).

    It needs one logarithm for a logit, not two, and uses all four numbers of a Philox round. Seed and place fix a
    row's numbers. A request of temperature 0 gets its largest logit.

    Args:
        logits: `[num_rows, vocab_size]`, at the temperatures; requests: the request of each row, `[num_rows]`.
        temperatures, seeds: of each request; places: the position of each row, `[num_rows]`.
    """
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, SAMPLED_PART)
    best = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits.device)
    given = requests.contiguous(), temperatures, seeds, places.contiguous(), vocab_size, num_parts
    _best_of_part[(num_rows, num_parts)](best, tokens, logits, logits.stride(0), *given, SIZE=SAMPLED_PART)
    return tokens.gather(1, best.argmax(1, keepdim=True))[:, 0]


@triton.jit(do_not_specialize=["num_tokens", "num_known"])
def add_low_rank(
    out, y, b, bias, tokens, num_tokens, num_known, num_outputs, y_stride, second, third, RANK: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
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
