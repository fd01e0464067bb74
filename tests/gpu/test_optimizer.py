"""The compiled step of `adamw_8bit` against the eager one, on a GPU."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from instep.training.hf import eight_bits
from instep.training.hf.optimizer import BLOCK, MOMENTS, PiecewiseAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
OPTIONS = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
# More than a piece and no multiple of it, or of a block; whole blocks alone; some and a part of one; no 8 bits.
SHAPES = ((2**23 // 1000 * 5 + 3, 1001), (2048, 512), (41, 100), (17, 241), (64,))


def steps(compiles: bool, offload: bool = False) -> tuple[list[torch.Tensor], PiecewiseAdamW, list[int]]:
    """Parameters after five steps with five learning rates, the optimizer, and the graphs compiled after each step."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator, device="cuda")) for shape in SHAPES]
    parts = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "weight_decay": 0.0}]
    optimizer = PiecewiseAdamW(parts, OPTIONS, eight_bits=True, offload=offload, compiles=compiles)
    graphs = []
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 / (step + 1)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, device="cuda")
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            optimizer.step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return [p.detach() for p in params], optimizer, graphs


def test_the_compiled_step_is_the_eager_one_and_compiles_once() -> None:
    """Products and sums may be rounded together: a weight moves by some 1e-3 in five steps, of which the two differ by
    some 1e-7, but where a moment came to lie on the other side of a bound, its next steps differ by some per cent."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, twin, none = steps(False)
    compiled, optimizer, graphs = steps(True)
    print(f"graphs after each step: {graphs}")
    assert none[-1] == 0 and graphs == graphs[:1] * 5 and graphs[0] == 1
    for want, got in zip(eager, compiled, strict=True):
        assert (got - want).abs().mean() < 1e-6 and (got - want).abs().max() < 2e-3
    for p, q in zip(
        *([p for group in o.param_groups for p in group["params"]] for o in (twin, optimizer)), strict=True
    ):
        for name in MOMENTS:
            codes, others = twin.state[p][name], optimizer.state[q][name]
            if codes.dtype is not torch.uint8:
                assert torch.equal(codes, others), "small ones take the eager step"
                continue
            assert (codes == others).float().mean() > 0.999
            assert (codes.int() - others.int()).abs().float().mean() < 1e-3
            scales, theirs = twin.state[p][f"{name}_scale"], optimizer.state[q][f"{name}_scale"]
            assert ((scales - theirs).abs() <= 1e-5 * scales.abs()).float().mean() > 0.99
    host, offloaded, _ = steps(True, offload=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled, host, strict=True)), "where moments are changes no bit"
    assert offloaded.state[offloaded.param_groups[0]["params"][0]]["exp_avg"].is_pinned()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_that_are_looked_up_are_those_of_a_search(signed: bool) -> None:
    """In compiled code, for numbers on both sides of each bound, and for a million of all sizes."""
    codes = eight_bits.code_tables(signed, torch.device("cuda"))
    bounds = codes.bounds[:-1]
    near = torch.cat([(bounds.view(torch.int32) + ulps).view(torch.float32) for ulps in range(-2, 3)])
    floats = torch.arange(-(2**31), 2**31, 1999, device="cuda").int().view(torch.float32)
    numbers = torch.cat([near, floats[floats.abs() <= 1]])
    got = torch.compile(eight_bits.looked_up, fullgraph=True)(numbers, codes)
    assert torch.equal(got, torch.bucketize(numbers, bounds, out_int32=True))


def test_the_compiled_step_is_faster_and_needs_no_more_memory() -> None:
    """500 M parameters in ten tensors: codes, gradients and weights are 16 bytes each to read and write."""
    shapes = [(20000, 2560)] * 9 + [(15360, 2560)]
    count = sum(rows * width for rows, width in shapes)
    seconds, peaks = {}, {}
    for name in ("eager", "compiled"):
        params = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        parts = [{"params": params, "weight_decay": 0.1}]
        optimizer = PiecewiseAdamW(parts, OPTIONS, eight_bits=True, offload=False, compiles=name == "compiled")
        times = []
        for step in range(8):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
            began = time.monotonic()
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.monotonic() - began)
        seconds[name], peaks[name] = min(times[2:]), (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"adamw_8bit {name}: first step {times[0]:.2f} s, then {seconds[name]:.4f} s for {count / 1e6:.0f} M, "
              f"{count * 16 / seconds[name] / 1e12:.2f} TB/s of what must move, +{peaks[name]:.0f} MiB")  # fmt: skip
        del optimizer, params, parts, p
    assert count % BLOCK == 0 and seconds["compiled"] < seconds["eager"] / 2
    assert peaks["compiled"] <= peaks["eager"]
