"""Compiled layers and log-probs of the trainer against their eager twins, on a GPU."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config

from instep.training.hf.model import Policy
from instep.training.log_probs import log_probs_and_entropy
from instep.training.packing import SharedPrefixes, within

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def policy(compiles: bool) -> Policy:
    assert not dist.is_initialized()
    config = Qwen3Config(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=64, vocab_size=1024, tie_word_embeddings=True)  # fmt: skip
    made = Policy(config, torch.bfloat16, compiles=compiles).to("cuda")
    generator = torch.Generator(device="cuda").manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    return made


def run(model: Policy, lengths: list[int], check: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all tokens but the first of each sample, and the gradient of the embedding."""
    sizes = torch.tensor(lengths, device="cuda")
    bounds = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
    tokens = torch.arange(int(bounds[-1]), device="cuda") * 7919 % 1024
    places = within(sizes)
    positions = torch.nonzero(places < (sizes - 1).repeat_interleave(sizes))[:, 0]
    shared: SharedPrefixes | None = None
    log_probs, entropy = model(tokens, places, bounds, max(lengths), positions, tokens[positions + 1],
                               torch.ones(len(positions), device="cuda"), True, shared, check)  # fmt: skip
    model.zero_grad()
    (log_probs.mean() + 0.01 * entropy.mean()).backward()
    return log_probs.detach(), model.model.get_input_embeddings().weight.grad.float()


def test_compiled_layers_give_what_eager_ones_give_at_any_length() -> None:
    torch._dynamo.reset()
    eager, compiled = policy(False), policy(True)
    began = time.monotonic()
    for n, lengths in enumerate(([40, 70, 33], [128, 5], [300, 20, 20, 20], [64] * 9, [17])):
        with torch.compiler.set_stance("force_eager"):
            want, want_grad = run(eager, lengths, n == 0)
        got, grad = run(compiled, lengths, n == 0)
        assert (got - want).abs().max() < 0.05 and (got - want).abs().mean() < 0.01
        assert (grad - want_grad).norm() < 0.05 * want_grad.norm()
        if n == 1:
            num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    later = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"{num_graphs} graphs after two micro-batches, {later} after five; {time.monotonic() - began:.1f} s")
    assert later <= num_graphs + 2, "each new length would be compiled"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_log_probs_are_those_of_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    logits = (torch.randn(300, 32064, device="cuda", generator=generator) * 3).to(dtype).requires_grad_()
    targets = torch.randint(32000, (300,), device="cuda", generator=generator)
    temperature = torch.rand(300, device="cuda", generator=generator) + 0.5
    exact = logits.detach().double().requires_grad_()
    pairs = []
    for x, t in ((logits, temperature), (exact, temperature.double())):
        log_probs, entropy = log_probs_and_entropy(x, targets, t, vocab_size=32000, with_entropy=True)
        assert entropy is not None
        (log_probs.sum() + 0.1 * entropy.sum()).backward()
        pairs.append((log_probs.detach().double(), entropy.detach().double(), x.grad.double()))
    for got, want in zip(*pairs, strict=True):
        scale = 1e-2 if got.shape == logits.shape and dtype is torch.bfloat16 else 1e-5
        assert (got - want).abs().max() < scale * want.abs().max()


def test_compiled_log_probs_are_faster_than_their_slow_twin_and_both_are_small() -> None:
    """Beside logits of half a GiB, their gradient and little more: together well below 8 bytes for each logit."""
    logits = torch.randn(1767, 151936, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets, ones = torch.zeros(1767, device="cuda", dtype=torch.long), torch.ones(1767, device="cuda")
    seconds, peaks = {}, {}
    from instep.training import log_probs

    twin = lambda *args: log_probs._LogProbsAndEntropy.apply(*args[:4], 0, None, args[4])  # noqa: E731
    for name, scores in (("eager", twin), ("compiled", log_probs._CompiledLogProbs.apply)):
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, began = torch.cuda.memory_allocated(), time.monotonic()
            out, entropy = scores(logits, targets, ones, 151936, True)
            torch.autograd.grad(out.sum() + entropy.sum(), logits)
            torch.cuda.synchronize()
            seconds[name] = time.monotonic() - began
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"seconds {seconds}, peak GiB {peaks}")
    assert seconds["compiled"] < 0.5 * seconds["eager"] and max(peaks.values()) < 0.75
