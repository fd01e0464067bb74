"""What a forward pass keeps for the backward pass, with and without recomputation."""

from __future__ import annotations

import gc

import torch
from torch import nn
from transformers import Qwen3Config

from instep.training.hf.model import Policy
from instep.training.packing import within

CONFIG = Qwen3Config(hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16, vocab_size=64, tie_word_embeddings=True)  # fmt: skip


def storages() -> dict[int, int]:
    """Bytes of the storages of all tensors that Python knows, by address."""
    gc.collect()  # else what other tests have left ends in between, and its addresses come again
    kinds = (torch.Tensor, nn.Parameter)  # those of the compiler have no storage, nor have sparse ones
    tensors = [t for t in gc.get_objects() if type(t) in kinds and t.layout == torch.strided and not t.is_meta]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def step(recompute: str | None) -> tuple[torch.Tensor, list[torch.Tensor | None], int]:
    """Log-probs, gradients, and the bytes that are held between forward and backward pass."""
    policy = Policy(CONFIG, torch.float32, recompute)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        nn.init.normal_(parameter, std=0.05, generator=generator)
    lengths = torch.tensor([40, 70, 33, 200])
    bounds = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    tokens, places = torch.arange(int(bounds[-1])) * 7919 % 64, within(lengths)
    positions = torch.nonzero(places < (lengths - 1).repeat_interleave(lengths))[:, 0]
    temperature = torch.ones(len(positions))
    before, held = storages(), {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        log_probs, entropy = policy(tokens, places, bounds, 200, positions, tokens[positions + 1], temperature, True)
    held |= storages()  # what checkpoints keep no hook sees
    size = sum(n for address, n in held.items() if address not in before)
    (log_probs.mean() + 0.01 * entropy.mean()).backward()
    return log_probs.detach(), [p.grad for p in policy.parameters()], size


def test_selective_recomputation_keeps_less_than_none_and_changes_no_bit() -> None:
    gc.freeze()  # what other tests have left need not be looked through six times
    kinds = {kind: step(kind) for kind in (None, "selective", "full")}
    log_probs, gradients, everything = kinds[None]
    for kind in ("selective", "full"):
        assert torch.equal(kinds[kind][0], log_probs)
        assert all(torch.equal(a, b) for a, b in zip(kinds[kind][1], gradients, strict=True))
    selected, inputs = kinds["selective"][2], kinds["full"][2]
    print({kind: size for kind, (*_, size) in kinds.items()})
    assert inputs < 0.3 * everything and inputs < selected < 0.6 * everything
