import pytest
import torch
import torch.nn.functional as F

from instep.training import packing
from instep.training.packed_attention import packed_attention
from instep.types import TokenBatch


def make_batch() -> TokenBatch:
    samples = [([5, 6, 7], [8, 9]), ([1], [2, 3, 4]), ([11, 12], [])]
    return TokenBatch(
        tokens=torch.tensor([t for prompt, response in samples for t in prompt + response]),
        total_lengths=torch.tensor([len(p) + len(r) for p, r in samples]),
        response_lengths=torch.tensor([len(r) for _, r in samples]),
        sample_columns={"temperature": torch.tensor([0.5, 1.0, 2.0])},
    )


def test_positions_targets_and_expansion_of_a_hand_made_batch():
    batch = make_batch()
    assert packing.response_positions(batch).tolist() == [2, 3, 5, 6, 7]
    assert packing.response_targets(batch).tolist() == [8, 9, 2, 3, 4]
    assert packing.position_ids(batch).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1]
    assert packing.response_temperatures(batch).tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    starts, longest = packing.cu_seqlens(batch)
    assert starts.tolist() == [0, 5, 9, 11] and starts.dtype is torch.int32 and longest == 5


def test_no_length_is_asked_of_a_device():
    """On the device `meta`, which could answer nothing; the samples begin alike, so that much is shared."""
    here = make_batch().select([0, 0, 1])
    there = here.to("meta").to("meta")
    assert there.on_host is here and here.on_host is here and here.to("cpu").select([0]).host is None
    for name in ("response_positions", "response_targets", "position_ids", "response_temperatures"):
        found, wanted = (getattr(packing, name)(batch) for batch in (there, here))
        assert found.is_meta and (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
    bounds, longest = packing.cu_seqlens(there)
    assert bounds.is_meta and bounds.shape == (4,) and longest == 5
    shared = packing.shared_prefixes(there)
    assert shared is not None and shared.kept.is_meta and shared.copies.shape == (14,) and shared.max_kept == 5


@pytest.mark.parametrize("lengths", [[4, 4, 4], [7, 6, 7, 5], [1], [40, 1, 3, 2, 39, 1, 17, 5], [150, 140, 4]])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_attention_equals_attention_of_each_segment(lengths, num_kv_heads, scale, window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), h, 8, dtype=torch.float64) for h in (4, num_kv_heads, num_kv_heads))
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    weight = torch.randn_like(q)

    def run(attention):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*inputs)
        return out, torch.autograd.grad((out * weight).sum(), inputs)

    def one_by_one(q, k, v):
        outs = []
        k, v = (x.repeat_interleave(4 // num_kv_heads, 1) for x in (k, v))
        for qs, ks, vs in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            scores = torch.einsum("qhd,khd->hqk", qs, ks) * (8**-0.5 if scale is None else scale)
            mask = torch.ones(len(qs), len(qs), dtype=torch.bool).triu(1)
            mask |= torch.ones_like(mask).tril(-window) if window else False
            outs.append(torch.einsum("hqk,khd->qhd", F.softmax(scores.masked_fill(mask, -torch.inf), -1), vs))
        return torch.cat(outs)

    where = dict(cu_seqlens=ends, max_seqlen=max(lengths), scale=scale, window=window)
    out, grads = run(lambda *x: packed_attention(*x, **where))
    expected_out, expected_grads = run(one_by_one)
    torch.testing.assert_close(out, expected_out, rtol=1e-10, atol=1e-12)
    for grad, expected in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_kernel_for_gpus_computes_the_same_window(window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(30, heads, 32, dtype=torch.bfloat16) for heads in (4, 2, 2))
    ends = torch.tensor([0, 20, 30], dtype=torch.int32)
    exact = packed_attention(q.float(), k.float(), v.float(), cu_seqlens=ends, max_seqlen=20, window=window)
    on_gpu = packed_attention(q.cuda(), k.cuda(), v.cuda(), cu_seqlens=ends.cuda(), max_seqlen=20, window=window)
    torch.testing.assert_close(on_gpu.float().cpu(), exact, rtol=0, atol=0.03)
