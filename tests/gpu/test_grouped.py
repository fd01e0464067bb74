"""Grouped matrix products on a GPU, in the shape of an expert of Qwen3-30B-A3B: right, and faster than one by one."""

from __future__ import annotations

import time

import pytest
import torch

from instep.training.grouped import grouped_linear
from tests.unit.test_grouped import compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.mark.parametrize("counts", [[7, 0, 301, 64, 1, 0], [0, 5], [128] * 8])
def test_grouped_products_are_those_of_each_group(counts):
    assert max(compare(counts, 256, "cuda", torch.bfloat16)) < 0.02


def test_they_are_faster_than_one_by_one():
    num, rows, hidden, width = 128, 32768, 2048, 768
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(2 * width, hidden, device="cuda", dtype=torch.bfloat16) / 45 for _ in range(num)]
    counts = torch.randint(1, 2 * rows // num, (num - 1,)).tolist()
    counts = [min(c, (rows - 1) // num) for c in counts]
    counts.append(rows - sum(counts))
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    grad = torch.randn(rows, 2 * width, device="cuda", dtype=torch.bfloat16)
    inputs = [x, *[w.requires_grad_() for w in weights]]

    def seconds(grouped: bool) -> float:
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            parts = zip(x.split(counts), weights, strict=True)
            out = grouped_linear(x, ends, weights) if grouped else torch.cat([p @ w.T for p, w in parts])
            torch.autograd.grad(out, inputs, grad)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    together, alone = seconds(True), seconds(False)
    print(f"{num} experts, {rows} rows, forward and backward: {together * 1e3:.1f} ms, one by one {alone * 1e3:.1f} ms")
    assert together < alone
