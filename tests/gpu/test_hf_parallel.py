"""The `hf` backend on GPUs: optimizer states on the host and in 8 bits, recomputation, TP and FSDP2 on two GPUs."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, Qwen3Config

from instep.training.hf import optimizer as module
from instep.training.hf.backend import HfBackend
from instep.training.hf.model import Policy
from instep.training.hf.optimizer import PiecewiseAdamW
from instep.training.packing import within
from tests.distributed.helpers import RankPool
from tests.distributed.hf_runs import ARGS, make_batch, make_checkpoint, train, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
OPTIONS = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)


def steps(device: str, **kind: Any) -> tuple[list[torch.Tensor], PiecewiseAdamW]:
    """Parameters after three steps, and the optimizer."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((700, 1000), (64,), (70, 1000), (64,), (300, 1000))  # small ones have no 8 bits
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
    optimizer = PiecewiseAdamW([{"params": params, "weight_decay": 0.1}], OPTIONS, **kind)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(device)
        optimizer.step()
    return [p.detach().cpu() for p in params], optimizer


@pytest.mark.parametrize("eight_bits", [False, True])
def test_optimizer_states_in_host_memory_and_in_8_bits_equal_the_cpu(monkeypatch, eight_bits):
    monkeypatch.setattr(module, "_PIECE", 2**15)  # 37 pieces go round in three slots
    expected, twin = steps("cpu", eight_bits=eight_bits, offload=False)
    resident, _ = steps("cuda", eight_bits=eight_bits, offload=False)
    offloaded, optimizer = steps("cuda", eight_bits=eight_bits, offload=True)
    for a, b in zip(resident, offloaded, strict=True):
        assert torch.equal(a, b), "where the states are changes no bit"
    for name in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        assert state[name].is_pinned() and state[name].dtype is (torch.uint8 if eight_bits else torch.float32)
        theirs = twin.state[twin.param_groups[0]["params"][0]][name]
        if eight_bits:
            assert (state[name] == theirs).float().mean() > 0.999  # rounding may send a number to the next code
        else:
            torch.testing.assert_close(state[name], theirs, rtol=1e-5, atol=1e-7)
    for a, b in zip(expected, offloaded, strict=True):
        assert (a - b).abs().max() < (2e-3 if eight_bits else 1e-6) and (a - b).abs().mean() < 1e-6


def test_optimizer_states_leave_the_gpu() -> None:
    count = 2**26  # 256 MiB of float32
    figures = {}
    for name, kind in {
        "fp32": dict(eight_bits=False, offload=False),
        "fp32, host": dict(eight_bits=False, offload=True),
        "8 bits": dict(eight_bits=True, offload=False),
        "8 bits, host": dict(eight_bits=True, offload=True),
    }.items():
        p = nn.Parameter(torch.zeros(count // 1024, 1024, device="cuda"))
        p.grad = torch.ones_like(p)
        before = torch.cuda.memory_allocated()
        optimizer = PiecewiseAdamW([{"params": [p], "weight_decay": 0.0}], OPTIONS, **kind)
        held = torch.cuda.memory_allocated() - before
        optimizer.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        optimizer.step()
        torch.cuda.synchronize()
        seconds, peak = time.monotonic() - began, torch.cuda.max_memory_allocated() - before - held
        figures[name] = held / count, peak / 2**20, seconds
        del optimizer, p
    for name, (held, peak, seconds) in figures.items():
        print(f"optimizer {name}: {held:.3f} bytes a parameter, +{peak:.0f} MiB in a step, {seconds:.3f} s for 67 M")
    assert figures["fp32"][0] == pytest.approx(8, abs=0.01) and figures["8 bits"][0] < 2.04
    assert figures["fp32, host"][0] < 0.01 and figures["8 bits, host"][0] < 0.01
    assert all(peak < 600 for _, peak, _ in figures.values())


def measured(recompute: str | None, compiles: bool) -> tuple[float, float, torch.Tensor]:
    """Peak MiB above the model and seconds of a forward and backward pass of 8,192 tokens, and a gradient."""
    config = Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=16,
                         num_key_value_heads=8, head_dim=128, vocab_size=2048, tie_word_embeddings=True)  # fmt: skip
    policy = Policy(config, torch.bfloat16, recompute, compiles=compiles).to("cuda")
    generator = torch.Generator(device="cuda").manual_seed(0)
    for parameter in policy.parameters():
        nn.init.normal_(parameter, std=0.02, generator=generator)
    lengths = torch.full((16,), 512, device="cuda")
    bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    tokens, places = torch.arange(16 * 512, device="cuda") * 7919 % 2048, within(lengths)
    positions = torch.nonzero(places < 511)[:, 0]
    inputs = tokens, places, bounds, 512, positions, tokens[positions + 1], torch.ones(len(positions), device="cuda")
    seconds = []
    for _ in range(12):  # other tests may compute on the card: the fastest counts
        policy.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        log_probs, entropy = policy(*inputs, True)
        (log_probs.mean() + 0.01 * entropy.mean()).backward()
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return peak, min(seconds[2:]), policy.model.get_input_embeddings().weight.grad.float().cpu()


@pytest.mark.parametrize("compiles", [False, True])
def test_selective_recomputation_is_between_none_and_full(compiles) -> None:
    torch._dynamo.reset()
    kinds = {kind: measured(kind, compiles) for kind in (None, "full", "selective")}  # "full" has the layers of None
    for kind, (peak, seconds, _) in kinds.items():
        print(f"recomputation {kind}, compiled {compiles}: peak {peak:.0f} MiB, {seconds * 1000:.1f} ms")
    none, selective, full = kinds[None], kinds["selective"], kinds["full"]
    assert full[0] < selective[0] < none[0]
    assert not compiles or selective[1] < full[1], "not compiled, each operation asks in Python what is kept"
    assert (selective[2] - none[2]).norm() < 0.02 * none[2].norm()


# ---- two GPUs --------------------------------------------------------------------------------------------------------


def _rank(path: str, tp: int, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Any, ...]:
    torch.compiler.set_stance("force_eager")
    args = SimpleNamespace(**{**vars(ARGS), "tensor_model_parallel_size": tp, **options})
    device = torch.device("cuda", torch.cuda.current_device())
    backend = HfBackend(args, hf_config=AutoConfig.from_pretrained(path), device=device, dtype=dtype)
    backend.load_hf(path)
    log_probs = backend.forward_only([make_batch(0)])[0].log_probs
    done = train(backend, range(3))
    weights = weights_of(backend)
    return log_probs, done, weights and {name: w.cpu() for name, w in weights.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The results of `_rank` on as many GPUs as are asked for."""
    path = make_checkpoint(tmp_path_factory.mktemp("hf"), tied=True, vocab_size=64)
    pools: dict[int, RankPool] = {}

    def run(world_size: int, tp: int, dtype: torch.dtype, **options: Any) -> tuple[Any, ...]:
        if torch.cuda.device_count() < world_size:
            pytest.skip(f"needs {world_size} GPUs")
        if world_size not in pools:
            pools[world_size] = RankPool(world_size, cuda=True)
        results = pools[world_size].run(_rank, path, tp, dtype, options)
        assert all(torch.equal(r[0], results[0][0]) and r[1] == results[0][1] for r in results[1:] if tp > 1)
        return results[0]

    yield run
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("tp, options", [(1, {}), (2, {}), (2, {"optimizer_cpu_offload": True})])
def test_two_gpus_equal_one(runs, tp, options) -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    log_probs, done, weights = runs(1, 1, torch.float32)
    others, steps_of_two, weights_of_two = runs(2, tp, torch.float32, **options)
    torch.testing.assert_close(others, log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.tensor(steps_of_two), torch.tensor(done), rtol=1e-5, atol=1e-6)
    for name, weight in weights.items():
        assert (weights_of_two[name] - weight).norm() <= 1e-5 * weight.norm(), name
    halves, bf16_steps, _ = runs(2, tp, torch.bfloat16, **options)
    print(f"TP {tp}, {options}: bf16 log-probs are off by {(halves - log_probs).abs().mean():.4f} in the mean")
    assert (halves - log_probs).abs().mean() < 0.05
    torch.testing.assert_close(torch.tensor(bf16_steps), torch.tensor(done), rtol=0.1, atol=0.02)


@pytest.mark.parametrize("options", [{"optimizer_cpu_offload": True}, {"optimizer": "adamw_8bit"}])
def test_one_gpu_with_other_optimizer_states(runs, options) -> None:
    log_probs, done, weights = runs(1, 1, torch.float32)
    same, steps_of_other, other = runs(1, 1, torch.float32, **options)
    assert torch.allclose(same, log_probs, atol=1e-6)
    torch.testing.assert_close(torch.tensor(steps_of_other), torch.tensor(done), rtol=1e-5, atol=1e-6)
    for name, weight in weights.items():  # too small for 8 bits
        assert (other[name] - weight).norm() <= 1e-5 * weight.norm(), name
