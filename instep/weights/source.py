"""The weight source, through which a trainer passes its weights to a sync or an export, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from instep.weights.memory import EngineMemory
from instep.weights.spec import TensorSpec

Samples = dict[str, dict[str, torch.Tensor]]  # sample bytes by the nonce of a worker's memory, and by name
Weights = Iterable[tuple[TensorSpec, torch.Tensor | None]]


class WeightSource(Protocol):
    """The policy's weights under Hugging Face names; tied weights appear once.

    Iterating is collective: all ranks iterate in the same order. A yielded tensor is valid until the next one, and is
    None on ranks whose `emits` is False.
    """

    specs: list[TensorSpec]  # known without moving a byte
    emits: bool  # True on the ranks that receive full tensors (rank 0 at least)

    def __iter__(self) -> Iterator[tuple[TensorSpec, torch.Tensor | None]]: ...

    def write_into(self, memory: EngineMemory) -> Samples:
        """Write all weights into the memory of the engines (collective).

        If possible, the trainer's parameters become views of it.

        Returns:
            The required contents of that memory, computed from the trainer's own weights, for the workers opened here.
        """
        samples: Samples = {nonce: {} for nonce in memory.slices}
        self._write(memory, self, samples)
        return samples

    def unwritten(self, memory: EngineMemory) -> list[str]:
        """Return the names of weights that differ in any bit in the memory opened here (collective)."""
        return names_of(self._unlike(memory, self))

    def _unlike(self, memory: EngineMemory, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        return ((spec.name, memory.unlike(spec.name, tensor)) for spec, tensor in _wholes(memory, weights))

    def _write(self, memory: EngineMemory, weights: Weights, samples: Samples) -> None:
        """Write weights, which rank 0 has, into what each rank has opened, and add their samples (collective)."""
        for spec, tensor in _wholes(memory, weights):
            memory.write(spec.name, tensor)
            for nonce, sample in memory.samples(spec.name, tensor).items():
                samples[nonce][spec.name] = sample


def _wholes(memory: EngineMemory, weights: Weights) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield weights of rank 0 on the ranks that open the engines' memory (collective)."""
    for spec, tensor in weights:
        if memory.on_gpus and dist.get_world_size() > 1:
            if tensor is None:
                tensor = torch.empty(spec.shape, dtype=spec.dtype, device="cuda")
            tensor = tensor.contiguous()
            dist.broadcast(tensor, 0)
        if tensor is not None:
            yield spec, tensor


def names_of(flags: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names whose flag, a 0-dim bool, is set. A GPU is asked once."""
    names, found = [*zip(*flags, strict=True)] or [(), ()]
    return [name for name, one in zip(names, torch.stack(found).tolist(), strict=True) if one] if names else []


class AdapterSource(WeightSource, Protocol):
    """The A and B of an adapter under peft's names; `config` is peft's `adapter_config.json`."""

    config: dict[str, Any]


def adapter_config(source: WeightSource) -> dict[str, Any]:
    """Return the configuration of the adapter of `source`, with its number of tensors as `num_tensors`."""
    return {**cast(AdapterSource, source).config, "num_tensors": len(source.specs)}
