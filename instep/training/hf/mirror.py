"""The weights that a policy computes with, where they are an engine's own (`--weight-sync single-copy`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from instep.models.checkpoint_names import CheckpointNames, named_weights
from instep.training.hf.model import Policy
from instep.training.hf.weights import HfWeightSource
from instep.weights.memory import EngineMemory


class Mirror:
    """Float32 masters, which the optimizer steps, and a model in the serving dtype that follows them.

    The first session makes that model's parameters views of the engine's memory. From then on forward and backward
    passes read the engine's weights, and `refresh` writes the masters through to them, each rank its shard. It does so
    in a session, and between two optimizer steps of a rollout, when the engine is paused (`WeightSync.hold`).

    Args:
        masters: plain, or sharded over all ranks; its parameters' gradients are set here.
        compute: the model of forward and backward passes; `masters` itself where one float32 rank needs no second copy.
    """

    def __init__(self, masters: Policy, compute: Policy):
        self.compute = compute
        self._is_one = compute is masters
        names = named_weights(masters.model)
        self._pairs = [(name, tensor, names[name]) for name, tensor in named_weights(compute.model).items()]
        self._stale = not self._is_one
        self._memory: EngineMemory | None = None
        self._views = False  # whether the parameters are views of it
        self._gradients: dict[nn.Parameter, Tensor] = {}
        if not self._is_one:
            for parameter in compute.parameters():
                parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: nn.Parameter) -> None:
        """Add up the gradient in float32, and free it."""
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.float(), None
        held = self._gradients.get(parameter)
        self._gradients[parameter] = gradient if held is None else held.add_(gradient)

    def hand_over_gradients(self) -> None:
        """Give the masters the gradients of all micro-batches, summed over ranks (collective)."""
        for _, tensor, master in self._pairs:
            if not isinstance(tensor, nn.Parameter) or tensor not in self._gradients:
                continue
            gradient = self._gradients.pop(tensor)
            if isinstance(master, DTensor):
                dist.all_reduce(gradient)
                mesh, placements = master.device_mesh, master.placements
                master.grad = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
            else:
                master.grad = gradient

    def changed(self) -> None:
        """The masters have changed."""
        self._stale = not self._is_one

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the masters through to the model, if they have changed (collective)."""
        if not self._stale:
            return
        for _, tensor, master in self._pairs:
            if isinstance(master, DTensor) and not self._views:
                tensor.copy_(master.full_tensor())
            elif isinstance(master, DTensor):
                shape, offset = compute_local_shape_and_global_offset(
                    master.shape, master.device_mesh, master.placements
                )
                part = tensor[tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))]
                part.copy_(master.to_local())
            else:
                tensor.copy_(master)
        if self._views and dist.get_world_size() > 1:
            dist.barrier()  # all shards are written
        self._stale = False

    @torch.no_grad()
    def move_into(self, memory: EngineMemory, views: Mapping[str, Tensor | None]) -> bool:
        """Make the model's parameters views of an engine's memory; False if one of them does not lie there whole.

        Args:
            views: of that memory, by the model's names.
        """
        if memory is not self._memory:
            self._views = all(views.get(name) is not None for name, _, _ in self._pairs)
            for name, tensor, _ in self._pairs if self._views else ():
                view = views[name]
                assert view is not None
                if self._is_one:
                    view.copy_(tensor)
                tensor.data = view
            self._memory = memory
            self.changed()
        return self._views


class MirroredSource(HfWeightSource):
    """The masters in the serving dtype, for exports; a session writes them through."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, names: CheckpointNames, mirror: Mirror):
        super().__init__(model, dtype, names)
        self._mirror = mirror

    def write_into(self, memory: EngineMemory) -> None:
        single = [group for group in self._names.groups if group.converter is None]
        views = {group.model[0]: memory.whole(group.checkpoint[0]) for group in single}
        if self._mirror.move_into(memory, views):
            self._mirror.refresh()
        else:
            super().write_into(memory)
