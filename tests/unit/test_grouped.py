"""Grouped matrix products against one product for each group, with a group that has no rows."""

from __future__ import annotations

import pytest
import torch

from instep.training import grouped as module
from instep.training.adjacent import joined, lay_out
from instep.training.grouped import grouped_linear


def compare(counts: list[int], width: int, device: str, dtype: torch.dtype) -> list[float]:
    """The largest differences of result and gradients, over the largest value of each."""
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    x, grad = random(sum(counts), width), random(sum(counts), 2 * width)
    weights = [random(2 * width, width) / width**0.5 for _ in counts]
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    results = []
    for grouped in (True, False):
        inputs = [t.detach().requires_grad_() for t in (x, *weights)]
        parts = zip(inputs[0].split(counts), inputs[1:], strict=True)
        out = grouped_linear(inputs[0], ends, inputs[1:]) if grouped else torch.cat([p @ w.T for p, w in parts])
        results.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in zip(*results, strict=True)]


def test_grouped_products_are_those_of_each_group():
    assert max(compare([4, 0, 5, 1, 0], 16, "cpu", torch.float32)) < 1e-6


def test_frozen_weights_get_no_gradient():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8)
    out = grouped_linear(x, torch.tensor([3], dtype=torch.int32), [weight])
    out.sum().backward()
    assert torch.allclose(x.grad, weight.sum(0).expand(3, -1)) and weight.grad is None
    frozen = torch.randn(3, 8)
    learns = weight.requires_grad_()
    grouped_linear(frozen, torch.tensor([3], dtype=torch.int32), [learns]).sum().backward()
    assert torch.allclose(learns.grad, frozen.sum(0).expand(4, -1), atol=1e-6)


@pytest.mark.parametrize("ends", [[2], [3, 3]])
def test_one_group_and_an_empty_last_one(ends):
    x = torch.randn(ends[-1], 8)
    weights = [torch.randn(4, 8) for _ in ends]
    out = grouped_linear(x, torch.tensor(ends, dtype=torch.int32), weights)
    assert torch.allclose(out, x @ weights[0].T, atol=1e-6)


@pytest.mark.parametrize("learns", [True, False])
def test_sums_of_gradients_get_what_each_weight_would_add(learns, monkeypatch):
    monkeypatch.setattr(module, "_AT_A_TIME", 2 * 8 * 16)
    g = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(8, 16, generator=g, dtype=torch.bfloat16)) for _ in range(3)]
    x, ends = torch.randn(9, 16, generator=g, dtype=torch.bfloat16), torch.tensor([4, 4, 9], dtype=torch.int32)
    outs, sums = [], []
    for together in (False, True):
        for weight in weights:
            weight.grad, weight.main_grad = None, torch.ones(8, 16)
        if together:
            memory = lay_out(weights)
        inputs = x.clone().requires_grad_(learns)
        outs.append(grouped_linear(inputs, ends, weights, adds_gradients=together))
        outs[-1].square().sum().backward()
        assert all((weight.grad is None) == together for weight in weights)
        sums.append([weight.main_grad + (0 if together else weight.grad.float()) for weight in weights])
        outs.append(inputs.grad if learns else inputs)
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3]) and all(map(torch.equal, *sums))
    assert joined(weights).data_ptr() == memory.data_ptr() and memory.numel() == 3 * 8 * 16


def test_only_neighbours_in_one_storage_are_joined():
    a, b, c = torch.arange(12.0).split([3, 4, 5])
    assert torch.equal(joined([a, b]), torch.arange(7.0)) and torch.equal(joined([b, c]), torch.arange(3.0, 12.0))
    assert joined([a, c]) is None and joined([b, a]) is None and joined([a, b.clone()]) is None
