"""What the tests of LoRA share: a backend whose adapter is not at its neutral value, and its tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoConfig

from instep.checkpoints.adapter import Lora
from instep.training.hf.backend import HfBackend
from instep.training.hf.lora import adapter_weights
from instep.training.hf.shards import whole, write
from tests.distributed.hf_runs import ARGS, loss_fn, make_batch, micro_batches

LORA = Lora(4, 12, None)


def make_lora_backend(path: Path, lora: Lora = LORA, load: bool = True, dtype=torch.float32, **kw) -> HfBackend:
    args = SimpleNamespace(**{**vars(ARGS), "seed": 5, **kw})
    config = AutoConfig.from_pretrained(path)
    backend = HfBackend(args, hf_config=config, device=torch.device("cpu"), dtype=dtype, lora=lora)
    if load:
        backend.load_hf(path)
    return backend


@torch.no_grad()
def move(backend: HfBackend) -> None:
    """Give B values, which begins with zeros, the same ones on any number of ranks."""
    for i, (name, weight) in enumerate(adapter_weights(backend.policy.model).items()):
        if ".lora_B." in name:
            full = torch.randn(weight.shape, generator=torch.Generator().manual_seed(i)) / 5
            write(weight, full)


def adapter_of(backend: HfBackend) -> dict[str, torch.Tensor]:
    """The whole adapter by peft's names, on every rank."""
    return {spec.name: t if t is None else t.clone() for spec, t in backend.weight_source(adapter=True)}


def gradients(backend: HfBackend) -> dict[str, torch.Tensor]:
    """The gradients of the whole adapter after one `forward_backward` of all samples, by the weights' names."""
    batch = make_batch(0)
    backend.forward_backward(micro_batches(batch, backend.parallel.dp_rank, backend.parallel.dp_size), loss_fn)
    if backend.policy.parallel is not None:
        backend.policy.parallel.sum_gradients()
    return {name: whole(weight.grad) for name, weight in adapter_weights(backend.policy.model).items()}
