"""The kernels of packed attention on a GPU against plain products in float32, and how long they take.

`python -m pytest -s` prints the times.
"""

from __future__ import annotations

import time

import pytest
import torch

from instep.training import packed_attention
from instep.training.packed_attention import Bounds, attention_and_sums, attention_backward, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def bounds_of(queries: list[int], keys: list[int]) -> Bounds:
    cu_queries, cu_keys = (
        torch.nn.functional.pad(torch.tensor(n).cumsum(0), (1, 0)).int().cuda() for n in (queries, keys)
    )
    return Bounds(cu_queries, max(queries), cu_keys, max(keys))


def tensors(bounds: Bounds, heads: int, kv_heads: int, dim: int) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the result."""
    generator = torch.Generator("cuda").manual_seed(0)
    num, num_keys = int(bounds.cu_queries[-1]), int(bounds.cu_keys[-1])
    shapes = [(num, heads, dim), (num_keys, kv_heads, dim), (num_keys, kv_heads, dim), (num, heads, dim)]
    return [torch.randn(s, device="cuda", generator=generator).to(torch.bfloat16) for s in shapes]


def run(q, k, v, grad, bounds, scale=None, window=None):
    out, sums = attention_and_sums(q, k, v, bounds, scale, window)
    return out, *attention_backward(grad, q, k, v, out, sums, bounds, scale, window)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dim", [64, 128])
def test_results_and_gradients_are_those_of_plain_products(window, dim):
    """The queries are the last tokens of their segments; one segment has none, one a single one."""
    bounds = bounds_of([200, 0, 1, 77, 300], [200, 40, 130, 200, 500])
    q, k, v, grad = tensors(bounds, 8, 2, dim)
    got = run(q, k, v, grad, bounds, 0.2, window)
    want = run(q.float(), k.float(), v.float(), grad.float(), bounds, 0.2, window)
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b).norm() < 0.01 * b.norm()
        assert (a.float() - b).abs().max() < 0.02 * b.abs().max()


def test_how_long_a_layer_of_06b_takes():
    """16,384 tokens in samples of 128 shared and 512 own tokens."""
    bounds = bounds_of([512] * 32, [640] * 32)
    q, k, v, grad = tensors(bounds, 16, 8, 128)
    took = timed(lambda: run(q, k, v, grad, bounds))
    print(f"forward and backward {1e6 * took:.0f} us")
    assert took < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (8, 128), (1100,)])
def test_gradients_of_copied_rows_are_their_sums(dtype, shape):
    """Row 1 is taken 40 times, row 2 never; the same call gives the same bits."""
    indices = torch.tensor([0, *[1] * 20, 3, 4, 3, *[1] * 20], device="cuda")
    grad = torch.randn(len(indices), *shape, device="cuda").to(dtype)
    x = torch.randn(5, *shape, device="cuda").to(dtype).requires_grad_()
    taken = rows(x, indices)
    assert torch.equal(taken, x[indices])
    found, again = (torch.autograd.grad(taken, x, grad, retain_graph=True)[0] for _ in range(2))
    sums = torch.zeros(5, *shape, dtype=torch.float64, device="cuda").index_add(0, indices, grad.double())
    assert torch.equal(found, again) and found.dtype is dtype and not found[2].any()
    torch.testing.assert_close(found.double(), sums, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


def test_how_long_the_sums_of_copied_rows_take():
    """Keys of the samples above: torch's own sums (of an embedding) beside ours."""
    prompts = torch.arange(4 * 128).view(4, 1, 128).expand(-1, 8, -1)
    own = 4 * 128 + torch.arange(32 * 512).view(4, 8, 512)
    indices, num_rows = torch.cat([prompts, own], dim=2).flatten().cuda(), 4 * 128 + 32 * 512
    grads = [torch.randn(len(indices), 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    backward = torch.ops.aten.embedding_dense_backward
    ours = timed(lambda: packed_attention._sum_copies(grads, indices, num_rows))
    others = timed(lambda: [backward(x.flatten(1), indices, num_rows, -1, False) for x in grads])
    print(f"sums of keys and values: {1e6 * ours:.0f} us, torch's {1e6 * others:.0f} us")
    assert ours < others


def timed(function) -> float:
    """Seconds of a call; the first one compiles."""
    function()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 20
