"""The gated delta rule and its convolution over packed samples, against a slow oracle and against transformers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from instep.training.delta_net import causal_conv, gated_delta_rule

LENGTHS = [1, 3, 64, 2, 65, 130, 4, 128]  # shorter than the window, whole chunks, and one more
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).int()
KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 8, 6


def inputs() -> list[Tensor]:
    torch.manual_seed(3)
    num, heads = sum(LENGTHS), (VALUE_HEADS,)
    shapes = [(KEY_HEADS, KEY), (KEY_HEADS, KEY), (VALUE_HEADS, VALUE), heads, heads]
    query, key, value, g, beta = (torch.randn(1, num, *shape) for shape in shapes)
    return [x.requires_grad_() for x in (query, key, value, -g.exp() / 2, beta.sigmoid())]


def oracle(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One sample, token by token: equation 10 of the paper (arXiv:2412.06464), S of it transposed."""
    out = []
    for head in range(VALUE_HEADS):
        state = value.new_zeros(KEY, VALUE)
        for t in range(value.shape[1]):
            q, k = (x[0, t, head * KEY_HEADS // VALUE_HEADS] for x in (query, key))
            q, k = (x / (x.dot(x) + 1e-6).sqrt() for x in (q, k))
            b = beta[0, t, head]
            state = g[0, t, head].exp() * (torch.eye(KEY) - b * torch.outer(k, k)).to(k) @ state
            state = state + b * torch.outer(k, value[0, t, head])
            out.append(q @ state / math.sqrt(KEY))
    return torch.stack(out).view(VALUE_HEADS, -1, VALUE).transpose(0, 1)[None]


def of_transformers(rule: Callable[..., tuple[Tensor, None]]) -> Callable[..., Tensor]:
    def run(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        query, key = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=2) for x in (query, key))
        return rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return run


def gradients(result: Tensor, given: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(4)
    weights = torch.randn(result.shape)
    return list(torch.autograd.grad((result * weights).sum(), given))


def by_sample(one: Callable[..., Tensor], *given: Tensor) -> Tensor:
    return torch.cat([one(*sample) for sample in zip(*(x.split(LENGTHS, dim=1) for x in given), strict=True)], 1)


ORACLES = {
    "oracle": lambda *given: oracle(*(x.double() for x in given)),
    "chunks of transformers": of_transformers(theirs.torch_chunk_gated_delta_rule),
    "tokens of transformers": of_transformers(theirs.torch_recurrent_gated_delta_rule),
}


@pytest.mark.parametrize("one", ORACLES.values(), ids=ORACLES)
@pytest.mark.parametrize("chunk_size", [64, 16])
def test_the_delta_rule_of_each_sample(one: Callable[..., Tensor], chunk_size: int):
    given = inputs()
    got, want = gated_delta_rule(*given, BOUNDS, chunk_size=chunk_size), by_sample(one, *given)
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=1e-5)
    for a, b in zip(gradients(got, given), gradients(want, given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_convolution_of_each_sample(activation: str | None, has_bias: bool):
    torch.manual_seed(5)
    x, weight, bias = torch.randn(1, sum(LENGTHS), 10), torch.randn(10, 4), torch.randn(10) if has_bias else None
    given = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    got = causal_conv(x, weight, bias, BOUNDS, activation)

    def one(sample: Tensor) -> Tensor:
        return theirs.causal_conv1d_fn(sample.transpose(1, 2), weight, bias, activation).transpose(1, 2)

    want = by_sample(one, x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    for a, b in zip(gradients(got, given), gradients(want, given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_of_flash_linear_attention():
    """bfloat16, against the plain form in float32 of the same numbers."""
    pytest.importorskip("fla")
    given = [x.detach().cuda().bfloat16() for x in inputs()]
    given[3] = given[3].float()
    x, weight = torch.randn(1, sum(LENGTHS), 16, device="cuda").bfloat16(), torch.randn(16, 4, device="cuda").bfloat16()
    rule, conv = (
        (lambda *x: gated_delta_rule(*x, BOUNDS.cuda())),
        (lambda *x: causal_conv(*x, None, BOUNDS.cuda(), "silu")),
    )
    for function, args in ((rule, given), (conv, [x, weight])):
        results = []
        for dtype in (torch.bfloat16, torch.float32):
            leaves = [a.to(dtype if a.dtype is torch.bfloat16 else a.dtype).requires_grad_() for a in args]
            out = function(*leaves)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
        for got, want in zip(*results, strict=True):
            assert (got.float() - want).norm() <= 0.02 * want.norm()
