"""The kernels of steps that decode: attention against plain products, and the distribution of sampled tokens.

`python -m pytest -s` prints how long they take, and vLLM's.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PAGE = 16


def cache_of(num_rows: int, kv_heads: int, dim: int, most: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Keys, values and the table of pages, which lie anywhere in the cache."""
    generator = torch.Generator("cuda").manual_seed(0)
    each = -(-most // PAGE)
    shape = (num_rows * each, PAGE, kv_heads, 2 * dim)  # as vLLM stores them: a key beside its value
    both = torch.randn(shape, device="cuda", generator=generator).to(dtype)
    table = torch.randperm(num_rows * each, device="cuda", generator=generator).view(num_rows, each).int()
    return both[..., :dim], both[..., dim:], table


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (4, 4, 64), (40, 2, 128)])
def test_attention_is_that_of_plain_products(heads: int, kv_heads: int, dim: int) -> None:
    from instep_engine.vllm.fast.kernels import attend

    lengths = torch.tensor([1, 16, 50, 0, 77, 300], dtype=torch.int32, device="cuda")  # 0: a row that pads the step
    keys, values, table = cache_of(len(lengths), kv_heads, dim, 300, torch.bfloat16)
    q = torch.randn(len(lengths), heads, dim, device="cuda").to(torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    attend(out, q, keys, values, table, lengths, dim**-0.5)
    for row, length in enumerate(lengths.tolist()):
        of_row = [x[table[row].long()].flatten(0, 1)[:length].float() for x in (keys, values)]
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in of_row)
        weights = torch.einsum("hd,nhd->hn", q[row].float(), k).mul(dim**-0.5).softmax(-1)
        assert (out[row].float() - torch.einsum("hn,nhd->hd", weights, v)).abs().max() < 0.02


CHANGES = {
    "a prompt": {"max_seqlen_q": 2},
    "a window": {"window_size": [127, 0]},
    "also the sums": {"return_softmax_lse": True},
    "sinks": {"s_aux": torch.zeros(16)},
    "a quantized cache": {
        "q": torch.zeros(256, 16, 128, dtype=torch.float8_e4m3fn),
        "k": torch.zeros(4, PAGE, 8, 128, dtype=torch.float8_e4m3fn),
    },
    "a cap": {"softcap": 30.0},
    "no table": {"block_table": None},
    "a long context": {"block_table": torch.zeros(256, 2048 // PAGE + 1, dtype=torch.int32)},
    "few requests": {"q": torch.zeros(8, 16, 128), "block_table": torch.zeros(8, 40, dtype=torch.int32)},
}


@pytest.mark.parametrize("change", ["none", *CHANGES])
def test_other_attention_stays_with_vllm(change: str) -> None:
    from instep_engine.vllm.fast.attention import _fits

    shapes = {"q": torch.zeros(256, 16, 128), "k": torch.zeros(4, PAGE, 8, 128), "out": torch.zeros(256, 16, 128)}
    call = {
        **shapes,
        "block_table": torch.zeros(256, 40, dtype=torch.int32),
        "max_seqlen_q": 1,
        "window_size": [-1, -1],
    }
    call |= {"softcap": 0.0, "alibi_slopes": None, "s_aux": None, "mask_mod": None} | CHANGES.get(change, {})
    on_gpu = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    assert _fits(**on_gpu) == (change == "none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_are_sampled_from_their_distribution(dtype: torch.dtype) -> None:
    from instep_engine.vllm.fast.kernels import sample

    num_rows, vocab_size = 256, 5000
    generator = torch.Generator("cuda").manual_seed(1)
    likely = torch.randperm(vocab_size, device="cuda", generator=generator)[:40]
    logits = torch.full((num_rows, vocab_size), -30.0, device="cuda", dtype=dtype)
    logits[:, likely] = torch.randn(40, device="cuda", generator=generator).to(dtype)
    logits[:, likely[0]] = -torch.inf  # as top-k and top-p leave it
    logits[7, 3] = 9.0
    requests = torch.arange(num_rows, device="cuda", dtype=torch.int32).flip(0)
    temperatures, seeds = torch.ones(num_rows, device="cuda"), 7919 * torch.arange(num_rows, device="cuda")
    temperatures[requests[7]] = 0.0
    counts = torch.zeros(vocab_size, device="cuda")
    for n in range(400):
        places = torch.full((num_rows,), n, device="cuda")
        tokens = sample(logits, requests, temperatures, seeds, places)
        assert tokens[7] == 3
        counts += torch.bincount(torch.cat([tokens[:7], tokens[8:]]), minlength=vocab_size)
    assert torch.equal(tokens, sample(logits, requests, temperatures, seeds, places))
    alone = sample(logits[5:6], requests[5:6], temperatures, seeds, places[:1])
    assert alone[0] == tokens[5]  # what else is in the step does not matter
    expected = 400 * (num_rows - 1) * logits[0].float().softmax(-1)[likely[1:]]
    assert counts[likely[1:]].sum() == counts.sum() and counts[likely[0]] == 0
    assert ((counts[likely[1:]] - expected) ** 2 / expected).sum() / 38 < 2


def test_how_long_a_step_of_256_rows_takes() -> None:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    from instep_engine.vllm.fast.kernels import attend, sample

    keys, values, table = cache_of(256, 8, 128, 640, torch.bfloat16)
    q = torch.randn(256, 16, 128, device="cuda").to(torch.bfloat16)
    for length in (128, 256, 428, 640):
        lengths = torch.full((256,), length, dtype=torch.int32, device="cuda")
        took = microseconds(lambda n=lengths: attend(torch.empty_like(q), q, keys, values, table, n, 0.1))
        print(f"attention to {length} keys: {took:.0f} us")
        assert took < 1000
    logits = torch.randn(256, 151_936, device="cuda").to(torch.bfloat16)
    rows = torch.arange(256, device="cuda")
    given = logits, rows.int(), torch.ones(256, device="cuda"), rows, rows
    ours, stock = microseconds(lambda: sample(*given)), microseconds(lambda: gumbel_sample(*given, False))
    print(f"choice of tokens: {ours:.0f} us, vLLM's: {stock:.0f} us")
    assert ours < stock


def microseconds(work, times: int = 20) -> float:
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / times
