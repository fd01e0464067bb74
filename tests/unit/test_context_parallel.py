"""The share of a context-parallel rank: every token once, and attention as over the whole stream."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from instep.training import context_parallel
from instep.training.context_parallel import Share, share_of, shared_attention
from instep.training.packed_attention import packed_attention
from instep.training.packing import cu_seqlens, response_positions, response_targets
from instep.types import TokenBatch
from tests.live_bytes import LiveBytes
from tests.ranks_in_threads import in_threads, one_of


def ragged(lengths: list[int], seed: int = 0) -> TokenBatch:
    """Samples of these lengths; all but a few first tokens are responses."""
    g = torch.Generator().manual_seed(seed)
    totals = torch.tensor(lengths)
    responses = torch.tensor([int(torch.randint(1, n, (1,), generator=g)) if n > 1 else 0 for n in lengths])
    tokens = torch.randint(0, 99, (int(totals.sum()),), generator=g)
    return TokenBatch(tokens, totals, responses, {}, {"temperature": torch.ones(len(lengths))})


def shares(batch: TokenBatch, size: int, multiple: int) -> list[Share]:
    return [share_of(batch, rank, size, multiple) for rank in range(size)]


CASES = [
    ([7, 1, 3, 12], 2, 1),
    ([7, 1, 3, 12], 2, 4),
    ([2], 2, 8),
    ([5, 9, 2, 2, 31], 3, 3),
    ([300, 4, 150], 2, 2),
    ([16, 33], 4, 6),
]


@pytest.mark.parametrize(("lengths", "size", "multiple"), CASES)
def test_each_response_token_is_predicted_once_on_ranks_of_equal_size(lengths, size, multiple):
    batch = ragged(lengths)
    parts = shares(batch, size, multiple)
    assert torch.cat([p.own for p in parts]).sort().values.tolist() == list(range(int(batch.response_lengths.sum())))
    assert len({p.rows.numel() for p in parts}) == 1 and parts[0].rows.numel() % multiple == 0
    before, targets = response_positions(batch), response_targets(batch)
    for part in parts:
        assert torch.equal(part.rows[part.predicting], before[part.own])
        starts = (batch.total_lengths.cumsum(0) - batch.total_lengths).repeat_interleave(batch.response_lengths)
        assert torch.equal(part.positions[part.predicting], (before - starts)[part.own])
        assert torch.equal(batch.tokens[part.rows[part.predicting] + 1], targets[part.own])
    keys = [int(p.cu_seqlens[-1]) for p in parts]
    assert max(keys) - min(keys) <= max(keys) // 2, "a zigzag gives all ranks about the same keys"


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (6, 3), (4, 4)])
@pytest.mark.parametrize(("lengths", "size", "multiple"), CASES)
def test_attention_and_its_gradients_are_those_of_the_whole_stream(lengths, size, multiple, heads, monkeypatch):
    """A key head at a time, or a part of its queries, or all heads."""
    monkeypatch.setattr(context_parallel, "_QUERIES", 0 if multiple > 1 else 2**14)
    batch, g = ragged(lengths), torch.Generator().manual_seed(1)
    num, (of_queries, of_keys) = sum(lengths), heads
    q, k, v = (torch.randn(num, n, 16, generator=g, requires_grad=True) for n in (of_queries, of_keys, of_keys))
    bounds, longest = cu_seqlens(batch)
    wanted = packed_attention(q, k, v, cu_seqlens=bounds, max_seqlen=longest)[response_positions(batch)]
    weights = torch.randn(wanted.shape, generator=g)
    parts = shares(batch, size, multiple)

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        p = parts[rank]
        own = [x.detach()[p.rows].requires_grad_() for x in (q, k, v)]
        out = attend(p, *own, group)[p.predicting]
        grads = torch.autograd.grad((out * weights[p.own]).sum(), own)
        return [wanted.new_zeros(wanted.shape).index_copy(0, p.own, out)] + [
            torch.zeros_like(x).index_add(0, p.rows, grad) for x, grad in zip((q, k, v), grads, strict=True)
        ]

    got, *grads = (sum(x) for x in zip(*in_threads(run, size), strict=True))
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-5)
    theirs = torch.autograd.grad((wanted * weights).sum(), (q, k, v))
    for have, want in zip(grads, theirs, strict=True):
        torch.testing.assert_close(have, want, atol=5e-6, rtol=1e-5)


def attend(p: Share, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
    where = dict(cu_seqlens=p.cu_seqlens, max_seqlen=p.max_seqlen, shared=p.shared, scale=None)
    return shared_attention(q, k, v, **where, group=group)


def bytes_of_attention(size: int, lengths: list[int], heads: tuple[int, int], width: int, device: str) -> list[int]:
    """What autograd keeps of a rank's attention, and the most that lives at a time, its inputs included: in bfloat16
    and by the GPU's kernel on `meta`, where nothing is computed, in float32 on `cpu`."""
    batch = ragged(lengths)
    p = share_of(batch, 0, size)
    bounds, longest = cu_seqlens(batch)
    shared = replace(p.shared, copies=p.shared.copies.to(device), cu_kept=p.shared.cu_kept.to(device))
    p = replace(p, shared=shared, cu_seqlens=p.cu_seqlens.to(device))
    bounds, dtype = bounds.to(device), torch.bfloat16 if device == "meta" else torch.float32
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with one_of(size) as group, LiveBytes() as live:
        q, k, v = (
            torch.ones(p.rows.numel(), n, width, device=device, dtype=dtype).requires_grad_()
            for n in (heads[0], heads[1], heads[1])
        )
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            if size > 1:
                out = attend(p, q, k, v, group)
            else:
                out = packed_attention(q, k, v, cu_seqlens=bounds, max_seqlen=longest)
        out.backward(torch.ones_like(out))
    return [sum(kept.values()), live.peak]


@pytest.mark.parametrize(
    ("lengths", "heads", "width", "device"),
    [
        ([32768], (32, 8), 128, "meta"),
        ([8192, 20000, 576, 4000], (28, 4), 128, "meta"),
        ([4096], (8, 2), 32, "cpu"),
    ],
)
def test_two_ranks_keep_half_each_and_need_little_more_at_a_time(lengths, heads, width, device, monkeypatch):
    if device == "cpu":  # its stream is short
        monkeypatch.setattr(context_parallel, "_QUERIES", 0)
    one, two = (bytes_of_attention(size, lengths, heads, width, device) for size in (1, 2))
    kept, peak = (b / a for a, b in zip(one, two, strict=True))
    print(f"{heads} heads: {kept:.2f} of what one rank keeps, {peak:.2f} of its peak")
    assert kept <= 0.51 and peak <= 0.6
