"""What the tests of LoRA share: a backend whose adapter is not at its neutral value, and its tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from instep.checkpoints.adapter import Lora
from instep.training.hf.backend import HfBackend
from instep.training.hf.lora import adapter_weights
from instep.training.hf.shards import whole, write
from instep.training.lora import PEFT
from tests.distributed.hf_runs import ARGS, LRS, loss_fn, make_batch, micro_batches
from tests.distributed.megatron_runs import make_args

LORA = Lora(4, 12, None)
Kind = tuple[str, dict[str, Any]]  # a train backend with its arguments
HF: Kind = ("hf", {})
TP2: Kind = ("megatron", {"tensor_model_parallel_size": 2})
TP2_SP: Kind = ("megatron", {**TP2[1], "sequence_parallel": True})
PP2: Kind = ("megatron", {"pipeline_model_parallel_size": 2})
DIST_OPT: Kind = ("megatron", {"use_distributed_optimizer": True})


def make_lora_backend(
    path: Path, lora: Lora | None = LORA, load: bool = True, dtype=torch.float32, *, kind: Kind = HF, **kw
) -> Any:
    given = {"seed": 5, "moe_router_bias_update_rate": 0.0, **vars(ARGS), **kind[1], **kw}
    options = dict(hf_config=AutoConfig.from_pretrained(path), device=torch.device("cpu"), dtype=dtype, lora=lora)
    if kind[0] == "hf":
        backend: Any = HfBackend(SimpleNamespace(**given), **options)
    else:
        from instep.training.megatron import cpu_platform

        cpu_platform.install()
        from megatron.core import parallel_state

        from instep.training.megatron.backend import MegatronBackend

        parallel_state.destroy_model_parallel()
        backend = MegatronBackend(make_args(**given), **options)
    if load:
        backend.load_hf(path)
    return backend


@torch.no_grad()
def move(backend: Any) -> None:
    """Fill B, which begins as 0, with the same values in each backend and on any number of ranks."""
    fulls = {}
    for i, spec in enumerate(backend.weight_source(adapter=True).specs):
        if ".lora_B." in spec.name:
            fulls[spec.name] = torch.randn(spec.shape, generator=torch.Generator().manual_seed(i)) / 5
    if isinstance(backend, HfBackend):
        weights = adapter_weights(backend.policy.model)
        for name, full in fulls.items():
            write(weights[name.removeprefix(PEFT)], full)
        return
    for entry, factor in backend.adapter.held():
        if entry.names[0] in fulls:
            factor.copy_(backend.adapter.part(entry, fulls[entry.names[0]]))


def adapter_of(backend: Any) -> dict[str, torch.Tensor]:
    """The whole adapter by peft's names, on rank 0."""
    return {spec.name: t if t is None else t.clone() for spec, t in backend.weight_source(adapter=True)}


def gradients(backend: Any) -> dict[str, torch.Tensor]:
    """The gradients of the whole adapter after one `forward_backward` of all samples, by name; on rank 0."""
    batch = make_batch(0)
    backend.forward_backward(micro_batches(batch, backend.parallel.dp_rank, backend.parallel.dp_size), loss_fn)
    if not isinstance(backend, HfBackend):
        return backend.adapter.whole({name: p.main_grad.clone() for name, p in backend.adapter.factors.items()})
    if backend.policy.parallel is not None:
        backend.policy.parallel.sum_gradients()
    return {name: whole(weight.grad) for name, weight in adapter_weights(backend.policy.model).items()}


def num_states(backend: Any) -> int:
    """The number of parameters with moments, on this rank."""
    if isinstance(backend, HfBackend):
        return len(backend.optimizer.state)
    from instep.training.megatron.checkpoint import masters

    return len(masters(backend.optimizer))


def train(backend: Any, steps: range) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    out = []
    for step in steps:
        parts = micro_batches(make_batch(step), backend.parallel.dp_rank, backend.parallel.dp_size)
        results, loss = backend.forward_backward(parts, loss_fn), torch.zeros(())
        if backend.parallel.is_output_rank:
            loss = sum(r.sums["loss"] for r in results)
        dist.all_reduce(loss)
        out.append((float(loss), backend.optimizer_step(LRS[step]).grad_norm))
    return out


def scores(backend: Any, batch: Any) -> torch.Tensor | None:
    """The log-probs of `batch`; None except on the last pipeline stage."""
    outputs = backend.forward_only([batch])
    return None if outputs is None else outputs[0].log_probs
