"""The engine's side of the way `lora`: an adapter is merged into the live weights, whose base is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from instep.system.processes import pulse
from instep_engine.manifest import WeightMismatch, dtype_name

PEFT, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


class Adapter:
    """The adapter of the live `parameters`, by name: `W + alpha / r * B A` replaces `W`."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]):
        self._parameters = parameters
        self._base: dict[str, torch.Tensor] = {}  # W of each layer that an adapter has changed
        self.received: dict[str, torch.Tensor] = {}  # in this session, under peft's names
        self._config: dict[str, Any] = {}

    def receive(self, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        """Check and keep tensors of the adapter that `config` describes.

        Raises:
            WeightMismatch: a tensor belongs to no layer, came twice, has another rank, shape or dtype, or is not
                finite.
            KeyError, TypeError: `config` is not a configuration of peft.
        """
        rank, alpha, num = config["r"], config["lora_alpha"], config["num_tensors"]
        if not (type(rank) is type(num) is int and rank > 0 and isinstance(alpha, int | float)):
            raise TypeError("the adapter's configuration has no rank, alpha or number of tensors")
        if self.received and config != self._config:
            raise WeightMismatch("two buckets belong to different adapters", next(iter(tensors), None))
        self._config = config
        for name, tensor in tensors.items():
            layer = f"{name.removeprefix(PEFT).removesuffix(A).removesuffix(B)}.weight"
            weight = self._parameters.get(layer)
            if weight is None or weight.ndim != 2 or not name.startswith(PEFT) or name in self.received:
                what = "came twice" if name in self.received else "belongs to no layer of this model"
                raise WeightMismatch(f"{name} {what}", name)
            shape = (rank, weight.shape[1]) if name.endswith(A) else (weight.shape[0], rank)
            if (tuple(tensor.shape), tensor.dtype) != (shape, weight.dtype):
                got = (tuple(tensor.shape), dtype_name(tensor.dtype))
                want = (shape, dtype_name(weight.dtype))
                raise WeightMismatch(f"{name}: received shape and dtype {got}, expected {want}", name)
            if not bool(tensor.isfinite().all()):
                raise WeightMismatch(f"{name} is not finite", name)
        self.received |= {name: tensor.clone() for name, tensor in tensors.items()}

    def merge(self) -> None:
        """Write the received adapter into the parameters. Layers outside the adapter get their base weights again.

        Raises:
            WeightMismatch: some of its tensors have not arrived.
        """
        received, self.received = self.received, {}
        if len(received) != self._config["num_tensors"]:
            pairs = {name: name.replace(A, B) if name.endswith(A) else name.replace(B, A) for name in received}
            first = next((pair for pair in pairs.values() if pair not in received), None)
            what = f"{len(received)} of {self._config['num_tensors']} tensors of the adapter were delivered"
            raise WeightMismatch(what + (f", {first} was not" if first else ""), first)
        layers = {name.removeprefix(PEFT).removesuffix(A) for name in received if name.endswith(A)}
        for name in {*(f"{layer}.weight" for layer in layers), *self._base}:
            pulse()
            weight, layer = self._parameters[name], f"{PEFT}{name.removesuffix('.weight')}"
            base = self._base.setdefault(name, weight.clone())
            a, b = received.get(layer + A), received.get(layer + B)
            if a is None or b is None:
                weight.copy_(base)
                continue
            scaling = self._config["lora_alpha"] / self._config["r"]
            delta = b.to(weight.device, torch.float32) @ a.to(weight.device, torch.float32)
            weight.copy_(base.float() + scaling * delta)

    def forget(self, names: Iterable[str]) -> None:
        """Note that the parameters `names` have received full weights, which are their base from now on."""
        for name in names:
            self._base.pop(name, None)
