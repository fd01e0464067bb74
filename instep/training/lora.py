"""LoRA in both train backends: the adapted layers, the first A and B, and the policy with another adapter.

LoRA (arXiv:2106.09685): a linear layer computes `W x + alpha / rank * B A x`, and only A and B are trained. Layers have
the names of the Hugging Face checkpoint in both backends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instep.checkpoints.adapter import CONFIG, Base, Lora, base_of, check_layout, read_adapter
from instep.errors import CheckpointError, ConfigError
from instep.models.shape import EXPERTS, KV_B
from instep.training.backend import TokenOutputs
from instep.weights.spec import TensorSpec

PEFT = "base_model.model."  # before the names of peft's tensors


def chosen(linear: Sequence[str], lora: Lora, model: str, *, also: Sequence[str] = ()) -> list[str]:
    """Return which of the linear layers `linear` of a model get an adapter, in their order.

    Without targets these are all but KV_B. Routed experts are not in `linear`.

    Args:
        also: other targets that this model has, for the message.

    Raises:
        ConfigError: a target belongs to no layer.
    """
    wanted = lora.targets or tuple(n for n in linear if n.rpartition(".")[2] != KV_B)
    found = {name: [n for n in linear if n == name or n.endswith(f".{name}")] for name in wanted}
    if not linear:
        what = f"{model} has no linear layers for an adapter"
        raise ConfigError(what, where="--lora-rank", remedy="remove it, or use another model (docs/lora.md)")
    if missing := [name for name, layers in found.items() if not layers]:
        known = ", ".join([*sorted({n.rpartition(".")[2] for n in linear}), *also])
        raise ConfigError(
            f"{model} has no linear layer {missing[0]!r}",
            where="--lora-target-modules",
            remedy=f"name some of {known}; or remove it, for all of them",
        )
    names = {n for layers in found.values() for n in layers}
    return [n for n in linear if n in names]


def begin(a: Tensor, b: Tensor, generator: torch.Generator) -> None:
    """Fill whole A and B with their first values, as peft does. B is 0, so that the policy begins as the base."""
    nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    nn.init.zeros_(b)


def peft_config(lora: Lora, layers: Collection[str], base: Base) -> dict[str, Any]:
    """Return the `adapter_config.json` of an adapter of `layers`."""
    last = sorted({name.rpartition(".")[2] for name in layers})
    named = lora.targets if lora.targets and EXPERTS not in lora.targets else last
    return lora.config(list(named), base.path)


# ---- the base --------------------------------------------------------------------------------------------------------


def base_for_all(path: Path) -> Base:
    """Return the identity of the base in `path`, which rank 0 reads (collective)."""
    found = [base_of(path) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    assert found[0] is not None
    return found[0]


def holds_adapter(path: Path, lora: Lora | None, layers: list[str], base: Base | None, *, resumes: bool) -> bool:
    """Return whether the checkpoint `path` holds an adapter, not all weights; see `check_layout`.

    Args:
        resumes: the run goes on from it.

    Raises:
        CheckpointError: it does not belong to this model, or it has no adapter to go on with.
    """
    adapter = check_layout(path, lora, layers, base)
    if lora is not None and not adapter and resumes:
        what = "it holds all weights of a model and no adapter, so a LoRA run cannot resume from it"
        remedy = "give it as --ref-load, to train an adapter of it; or remove --lora-rank"
        raise CheckpointError(what, where=str(path), remedy=remedy)
    return adapter


# ---- the reference ---------------------------------------------------------------------------------------------------


class Switched(Protocol):
    """A layer whose adapter counts while `enabled`."""

    enabled: bool


class Earlier:
    """The policy with its adapter off, or with an earlier one: a reference that needs no second copy of the base.

    Args:
        layers: this rank's layers with an adapter.
        specs: those of the whole adapter, under peft's names.
        weights: returns this rank's parts of A and B, by name.
        part: returns this rank's part of a whole A or B, by name.
        forward_only: the method of the backend.
    """

    is_adapter = True

    def __init__(
        self,
        layers: Collection[Switched],
        specs: Sequence[TensorSpec],
        weights: Callable[[], Mapping[str, Tensor]],
        part: Callable[[str, Tensor], Tensor],
        forward_only: Callable[..., list[TokenOutputs] | None],
    ):
        self._layers, self._specs, self._weights, self._part = layers, specs, weights, part
        self._forward_only = forward_only
        self._former: dict[str, Tensor] | None = None

    def forward_only(self, micro_batches: Any, *, entropy: bool = False) -> list[TokenOutputs] | None:
        with self._swapped():
            return self._forward_only(micro_batches, entropy=entropy)

    def offload(self, *, weights: bool = True) -> None:
        """Do nothing: the weights belong to the policy."""

    def onload(self, *, optimizer: bool = True) -> None:
        """Do nothing."""

    def load_hf(self, folder: Path) -> None:
        """Use the adapter in `folder` from now on. Raises CheckpointError if it belongs to another model."""
        theirs = read_adapter(folder)
        for spec in self._specs:
            full, name = theirs.get(spec.name), spec.name.removeprefix(PEFT)
            if full is None or tuple(full.shape) != spec.shape:
                what = f"{name!r} is missing" if full is None else f"{name!r} has the shape {list(full.shape)}"
                remedy = "give the --lora-rank and --lora-target-modules of this adapter"
                raise CheckpointError(f"this adapter does not fit the run's: {what}", where=str(folder), remedy=remedy)
        self._former = {
            name: self._part(name, theirs[PEFT + name]).to(weight.device, weight.dtype)
            for name, weight in self._weights().items()
        }

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        weights = self._weights() if self._former is not None else {}
        ours = {name: weight.detach().clone() for name, weight in weights.items()}
        try:
            _copy(weights, self._former or {})
            for layer in self._layers:
                layer.enabled = self._former is not None
            yield
        finally:
            _copy(weights, ours)
            for layer in self._layers:
                layer.enabled = True


def earlier_of(path: Path, base: Base | None, make: Callable[[], Earlier]) -> Earlier | None:
    """Return the policy with the adapter in `path`, or with none if `path` is its base; see `TrainBackend.earlier`."""
    is_adapter = (path / CONFIG).exists()
    if base is None or not (is_adapter or str(path) == base.path):
        return None
    reference = make()
    if is_adapter:
        reference.load_hf(path)
    return reference


@torch.no_grad()
def _copy(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])
