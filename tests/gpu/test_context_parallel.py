"""Attention of context-parallel shares on a GPU, in bfloat16: its results, and its memory by the share of one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from instep.training import context_parallel
from instep.training.context_parallel import share_of, shared_attention
from instep.training.packed_attention import packed_attention
from instep.training.packing import cu_seqlens
from instep.types import TokenBatch
from tests.distributed.helpers import RankPool
from tests.ranks_in_threads import in_threads, one_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIB = 1 << 20


def batch_of(lengths: list[int]) -> TokenBatch:
    totals = torch.tensor(lengths, device=DEVICE)
    tokens = torch.zeros(sum(lengths), dtype=torch.int64, device=DEVICE)
    return TokenBatch(tokens, totals, totals - 1, {}, {"temperature": [1.0] * len(lengths)})


def random(num: int, heads: tuple[int, int], width: int) -> list[Tensor]:
    """q, k, v and a gradient of the result, the same on all ranks."""
    g = torch.Generator().manual_seed(0)
    parts = (torch.randn(num, n, width, generator=g).to(DEVICE, torch.bfloat16) for n in (*heads, heads[1], heads[0]))
    return list(parts)


def of_a_share(lengths: list[int], heads: tuple[int, int], rank: int, size: int, group: Any) -> list[Tensor]:
    """Its results and gradients, at their places in those of the whole stream; zeros elsewhere."""
    p = share_of(batch_of(lengths), rank, size)
    q, k, v, grad = random(sum(lengths), heads, 64)
    own = [x[p.rows].requires_grad_() for x in (q, k, v)]
    out = shared_attention(
        *own, cu_seqlens=p.cu_seqlens, max_seqlen=p.max_seqlen, shared=p.shared, scale=None, group=group
    )
    real = ~p.padding
    grads = torch.autograd.grad(out, own, grad[p.rows] * real[:, None, None])
    pairs = zip((q, k, v, q), (*grads, out), strict=True)
    return [torch.zeros_like(x).index_copy(0, p.rows[real], y[real]).detach().float().cpu() for x, y in pairs]


def gap(parts: list[list[Tensor]], lengths: list[int], heads: tuple[int, int]) -> float:
    """The largest relative gap of results and gradients to those of the whole stream."""
    batch = batch_of(lengths)
    q, k, v, grad = random(sum(lengths), heads, 64)
    bounds, longest = cu_seqlens(batch)
    own = [x.requires_grad_() for x in (q, k, v)]
    out = packed_attention(*own, cu_seqlens=bounds, max_seqlen=longest)
    wanted = [*torch.autograd.grad(out, own, grad), out.detach()]
    pairs = [(sum(got), want.float().cpu()) for got, want in zip(zip(*parts, strict=True), wanted, strict=True)]
    return max(float((got - want).norm() / want.norm()) for got, want in pairs)


LENGTHS = [300, 7, 10000, 65, 3000]  # heads in several parts


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (8, 1)])
def test_shares_attend_as_the_whole_stream(size: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads, whose keys and values travel through the host."""

    def gather(everyone: Tensor, local: Tensor, group: Any, async_op: bool) -> SimpleNamespace:
        host = torch.empty(everyone.shape)
        dist.all_gather_into_tensor(host, local.float().cpu(), group=group)
        everyone.copy_(host)
        return SimpleNamespace(wait=lambda: None)

    def reduce_scatter(local: Tensor, everyone: Tensor, group: Any) -> None:
        host = torch.empty(local.shape)
        dist.reduce_scatter_tensor(host, everyone.float().cpu(), group=group)
        local.copy_(host)

    over_host = SimpleNamespace(all_gather_into_tensor=gather, reduce_scatter_tensor=reduce_scatter)
    monkeypatch.setattr(context_parallel, "dist", over_host)
    parts = in_threads(lambda rank, group: of_a_share(LENGTHS, heads, rank, size, group), size)
    assert gap(parts, LENGTHS, heads) < 1e-2


def on_rank(heads: tuple[int, int]) -> list[Tensor]:
    return of_a_share(LENGTHS, heads, dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_shares_attend_as_the_whole_stream_over_nccl() -> None:
    with RankPool(2, cuda=True) as ranks:
        for heads in (8, 2), (4, 4):
            assert gap(ranks.run(on_rank, heads), LENGTHS, heads) < 1e-2


def peak(lengths: list[int], heads: tuple[int, int], size: int) -> int:
    """Bytes of the attention of rank 0, its inputs, results and their gradients included."""
    batch = batch_of(lengths)
    p, (bounds, longest) = share_of(batch, 0, size), cu_seqlens(batch)
    num = p.rows.numel()
    with one_of(size) as group:
        most = 0
        for _ in range(2):  # at first the kernels are loaded
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            q, k, v = (
                torch.randn(num, n, 128, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
                for n in (*heads, heads[1])
            )
            if size > 1:
                where = dict(cu_seqlens=p.cu_seqlens, max_seqlen=p.max_seqlen, shared=p.shared, scale=None)
                out = shared_attention(q, k, v, **where, group=group)
            else:
                out = packed_attention(q, k, v, cu_seqlens=bounds, max_seqlen=longest)
            out.backward(torch.ones_like(out))
            torch.cuda.synchronize()
            most = torch.cuda.max_memory_allocated() - before
            del q, k, v, out
    return most


@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (16, 16), (8, 2), (4, 1)])
@pytest.mark.parametrize("lengths", [[32768], [20000, 8192, 4000, 576]])
def test_the_peak_at_32k_tokens_is_at_most_0_6_of_one_rank(lengths: list[int], heads: tuple[int, int]) -> None:
    one, two = peak(lengths, heads, 1), peak(lengths, heads, 2)
    print(f"{heads} heads of 128, {lengths} tokens: {one / MIB:.0f} and {two / MIB:.0f} MiB, {two / one:.2f}")
    assert two <= 0.6 * one
