"""LoRA (arXiv:2106.09685): a linear layer computes `W x + alpha / rank * B A x`, and only A and B are trained.

The adapted layer keeps the name of its weight. So loading, sharding and syncing of the base do not depend on adapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instep.checkpoints.adapter import Lora, read_adapter
from instep.errors import CheckpointError, ConfigError
from instep.models.shape import KV_B
from instep.training.hf.shards import local, shard, whole
from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from instep.training.backend import TokenOutputs

PEFT = "base_model.model."  # before the names of peft's tensors


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
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5), generator=generator)  # as peft does
        nn.init.zeros_(self.lora_B.weight)
        self.scaling, self.enabled = lora.scaling, True

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out + self.lora_B(self.lora_A(x)) * self.scaling if self.enabled else out


def attach(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Freeze `model`, and give its linear layers adapters: all but the output layer and KV_B, or those of `lora`.

    The random A depend on `seed` alone, not on the ranks. B is 0, so the policy starts as the base.

    Raises:
        ConfigError: a name belongs to no linear layer.
    """
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    wanted = lora.targets or tuple(n for n in linear if n.rpartition(".")[2] != KV_B)
    found = {name: [n for n in linear if n == name or n.endswith(f".{name}")] for name in wanted}
    if not linear:
        raise ConfigError(
            f"{type(model).__name__} has no linear layers for an adapter",
            where="--lora-rank",
            remedy="remove it, or use another model (docs/lora.md)",
        )
    if missing := [name for name, modules in found.items() if not modules]:
        known = ", ".join(sorted({n.rpartition(".")[2] for n in linear}))
        raise ConfigError(
            f"{type(model).__name__} has no linear layer {missing[0]!r}",
            where="--lora-target-modules",
            remedy=f"name some of {known}; or remove it, for all of them",
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = {n for modules in found.values() for n in modules}
    for name in (n for n in linear if n in chosen):
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


class Earlier:
    """The policy with its adapter off, or with an earlier one: a reference that needs no second copy of the base.

    Args:
        forward_only: the method of the backend.
    """

    is_adapter = True

    def __init__(self, model: nn.Module, forward_only: Callable[..., list[TokenOutputs]]):
        self._model, self._forward_only = model, forward_only
        self._former: dict[str, Tensor] | None = None

    def forward_only(self, micro_batches: Any, *, entropy: bool = False) -> list[TokenOutputs]:
        with self._swapped():
            return self._forward_only(micro_batches, entropy=entropy)

    def offload(self, *, weights: bool = True) -> None:
        """Do nothing: the weights belong to the policy."""

    def onload(self, *, optimizer: bool = True) -> None:
        """Do nothing."""

    def load_hf(self, folder: Path) -> None:
        """Use the adapter in `folder` from now on. Raises CheckpointError if it belongs to another model."""
        theirs = read_adapter(folder)
        model = self._model
        former: dict[str, Tensor] = {}
        for name, weight in adapter_weights(model).items():
            full = theirs.get(PEFT + name)
            if full is None or full.shape != weight.shape:
                what = f"{name!r} is missing" if full is None else f"{name!r} is {list(full.shape)} there"
                remedy = "give the flags of the adapter (--lora-rank, --lora-target-modules)"
                raise CheckpointError(f"this adapter has another form: {what}", where=str(folder), remedy=remedy)
            former[name] = shard(weight, full).to(weight.device, weight.dtype)
        self._former = former

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        model = self._model
        layers = adapted(model).values()
        weights = adapter_weights(model) if self._former is not None else {}
        ours = {name: local(weight.detach()).clone() for name, weight in weights.items()}
        try:
            _copy(weights, self._former or {})
            for layer in layers:
                layer.enabled = self._former is not None
            yield
        finally:
            _copy(weights, ours)
            for layer in layers:
                layer.enabled = True


@torch.no_grad()
def _copy(weights: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        local(weight).copy_(values[name])
