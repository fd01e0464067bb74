"""LoRA in the `hf` backend: a linear layer with A and B beside its weight.

The adapted layer keeps the name of its weight. So loading, sharding and syncing of the base do not depend on adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from instep.checkpoints.adapter import Lora
from instep.training.hf.shards import local, shard, whole
from instep.training.lora import PEFT, Earlier, begin, chosen
from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec


class _Factor(nn.Linear):
    """A float32 factor of an adapter; it computes in the type of its input. FSDP2 may have cast it already."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class LoraLinear(nn.Linear):
    """A linear layer with an adapter, which `enabled` switches. A is `[rank, in]`, B `[out, rank]`, both float32."""

    def __init__(self, base: nn.Linear, lora: Lora, generator: torch.Generator):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = _Factor(base.in_features, lora.rank, bias=False, dtype=torch.float32)
        self.lora_B = _Factor(lora.rank, base.out_features, bias=False, dtype=torch.float32)
        begin(self.lora_A.weight, self.lora_B.weight, generator)
        self.scaling, self.enabled = lora.scaling, True

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out + self.lora_B(self.lora_A(x)) * self.scaling if self.enabled else out


def attach(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Freeze `model`, and give its linear layers adapters: all but the output layer and KV_B, or those of `lora`.

    The random A depend on `seed` alone, not on the ranks.

    Raises:
        ConfigError: a name belongs to no linear layer.
    """
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    generator = torch.Generator().manual_seed(seed)
    for name in chosen(list(linear), lora, type(model).__name__):
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoraLinear(linear[name], lora, generator))


def adapted(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return A and B of each layer by name, in the order of the layers; with FSDP2, this rank's shard."""
    names = [f"{name}.lora_{x}.weight" for name in adapted(model) for x in "AB"]
    state = model.state_dict(keep_vars=True)
    return {name: state[name] for name in names}


class AdapterSource(WeightSource):
    """A `WeightSource` of only the adapter, under peft's names; `config` is peft's `adapter_config.json`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, emits: bool, config: dict[str, Any]):
        self._weights, self.emits, self.config = adapter_weights(model), emits, config
        self.specs = [TensorSpec(PEFT + name, tuple(w.shape), dtype) for name, w in self._weights.items()]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[TensorSpec, Tensor | None]]:
        for spec, weight in zip(self.specs, self._weights.values(), strict=True):
            full = whole(weight.detach())
            yield spec, full.to(spec.dtype) if self.emits else None


def merged(model: nn.Module) -> Callable[[str], Tensor | None]:
    """Return a function from a weight's name to its layer's `alpha / rank * B A`, in float32; collective.

    The function returns None for weights without an adapter.
    """
    layers = {f"{name}.weight": (name, layer.scaling) for name, layer in adapted(model).items()}
    weights = adapter_weights(model)

    @torch.no_grad()
    def addition(name: str) -> Tensor | None:
        if name not in layers:
            return None
        layer, scaling = layers[name]
        a, b = (whole(weights[f"{layer}.lora_{x}.weight"].detach()) for x in "AB")
        return scaling * (b @ a)

    return addition


def earlier(model: nn.Module, specs: list[TensorSpec], forward_only: Callable[..., Any]) -> Earlier:
    """Return `model` with its adapter off; see `Earlier`."""
    weights = adapter_weights(model)
    return Earlier(
        adapted(model).values(),
        specs,
        lambda: {name: local(weight) for name, weight in adapter_weights(model).items()},
        lambda name, full: shard(weights[name], full),
        forward_only,
    )
