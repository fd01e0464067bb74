"""The weights for the passes of a policy, if they are an engine's own (`--weight-sync single-copy`) or a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from instep.models.checkpoint_names import CheckpointNames, named_weights
from instep.training.hf.gather import in_batches
from instep.training.hf.model import Policy
from instep.training.hf.samples import Sampler
from instep.training.hf.shards import DP, box, local, num_dp, over_dp, whole
from instep.training.hf.weights import HfWeightSource
from instep.weights.memory import EngineMemory, unlike
from instep.weights.parking import give_back, shard
from instep.weights.source import Samples, Weights, names_of

Piece = tuple[str, Tensor, Tensor]  # a name, the model's tensor, and its masters


class Mirror:
    """Float32 masters, which the optimizer steps, and a model in the serving dtype that follows them.

    The first session makes that model's parameters views of the engine's memory. From then on forward and backward
    passes read the engine's weights, and `refresh` writes the masters into them, each rank its shard. It does so in a
    session, and between two optimizer steps of a rollout, when the engine is paused (`WeightSync.hold`).

    Args:
        masters: plain, or sharded over all ranks; its parameters' gradients are set here.
        compute: the model of forward and backward passes; `masters` itself where one float32 rank needs no second copy.
    """

    def __init__(self, masters: Policy, compute: Policy):
        self.compute = compute
        self._is_one = compute is masters
        names = named_weights(masters.model)
        self._pairs = [(name, tensor, names[name]) for name, tensor in named_weights(compute.model).items()]
        self._is_plain = not any(isinstance(t, DTensor) for _, *both in self._pairs for t in both)
        self._memory: EngineMemory | None = None
        self._sampler: Sampler | None = None  # of the same memory
        self._views: set[str] = set()  # the names of the parameters that are views of it
        self._everywhere: set[str] = set()  # of those that are views on all ranks that can reach an engine's memory
        self._shared = False  # whether all ranks have all views in memory of all: then each writes its shard
        self._index, self._others = 0, False  # the worker whose memory is viewed; whether a rank has another one, too
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._same, self._cut = self._pieces()
        self.changed()
        if not self._is_one:
            for parameter in (p for p in compute.parameters() if p.requires_grad):
                parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: nn.Parameter) -> None:
        """Add the gradient in float32, and free it."""
        assert parameter.grad is not None
        gradient, held = local(parameter.grad), self._gradients.get(parameter)
        self._gradients[parameter] = gradient.float() if held is None else held.add_(gradient)
        parameter.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that `hand_over_gradients` will pass on; empty if the masters have them."""
        return list(self._gradients.values())

    def forget_gradients(self) -> None:
        self._gradients.clear()

    def hand_over_gradients(self) -> None:
        """Give the masters the gradients of all micro-batches, summed over data-parallel ranks (collective)."""
        for _, tensor, master in self._pairs:
            if not isinstance(tensor, nn.Parameter) or tensor not in self._gradients:
                continue
            gradient = self._gradients.pop(tensor)
            if isinstance(master, DTensor):
                dist.all_reduce(gradient, group=master.device_mesh.get_group(DP))
                grad = torch.empty_like(master)
                local(grad).copy_(over_dp(master, gradient))
                master.grad = grad
            else:
                master.grad = gradient

    def changed(self) -> None:
        """Note that the masters have changed."""
        self._stale = not self._is_one

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the masters into the model, if they have changed (collective)."""
        if not self._stale:
            return
        for _, part, master in self._gathered(self._cut):
            part.copy_(master)
        if self._same:
            torch._foreach_copy_([part for _, part, _ in self._same], [master for _, _, master in self._same])
        if self._memory is not None and not self._memory.on_gpus and dist.get_world_size() > 1:
            dist.barrier()  # all ranks have written into the shared memory
        self._stale = False

    def _pieces(self) -> tuple[list[Piece], list[Piece]]:
        """Return this rank's tensors of the model and their masters: pieces with equal division, and pieces to gather.

        They are found once for each memory: a search of hundreds of DTensors takes longer than writing them.
        """
        if self._is_one:
            return [], []
        if self._is_plain:
            return self._pairs, []
        same, cut = [], []
        for name, tensor, master in self._pairs:
            part, mine = shard(tensor), shard(master)
            if isinstance(master, DTensor) and num_dp(master.device_mesh) > 1:  # each of its ranks has a shard
                if not self._shared:
                    cut.append((name, tensor, master))
                    continue
                begins = [i - o for i, o in zip(box(master)[1], box(tensor)[1], strict=True)]
                part = part[tuple(slice(i, i + n) for i, n in zip(begins, mine.shape, strict=True))]
            same.append((name, part, mine))
        return same, cut

    def _gathered(self, cut: list[Piece]) -> Iterator[Piece]:
        """Yield pieces whose masters are partly on other ranks, in the model's dtype (collective)."""
        wholes = in_batches([(master, tensor.dtype) for _, tensor, master in cut], emits=True)
        for (name, tensor, _), full in zip(cut, wholes, strict=True):
            assert full is not None
            yield name, local(tensor), full[tuple(slice(o, o + n) for n, o in zip(*box(tensor), strict=True))]

    @torch.no_grad()
    def write_into(self, memory: EngineMemory, names: Mapping[str, str]) -> Samples:
        """Write all weights into the engines' memory; the model's parameters become views of it (collective).

        Args:
            names: of the weights in the memory, by the model's names.

        Returns:
            The content that workers must find there; see `WeightSource.write_into`.
        """
        if memory is not self._memory:
            self._move_into(memory, names)
            self._sampler = Sampler(memory, {names[name]: master for name, _, master in self._pairs if name in names})
        self.refresh()
        for name, full in self._written_apart(memory, names):
            memory.write(names[name], full, without=self._index if name in self._views else None)
        assert self._sampler is not None
        memory.wait()
        return self._sampler.samples()

    @torch.no_grad()
    def unlike(self, memory: EngineMemory, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Return whether a bit of the memory differs from the result of `write_into`, by name (collective)."""
        for name, part, master in chain(self._same, self._gathered(self._cut)):
            yield names.get(name, name), unlike(part, master)
        for name, full in self._written_apart(memory, names):
            yield names[name], memory.unlike(names[name], full)

    def _written_apart(self, memory: EngineMemory, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights that are not views on all ranks, on the ranks that write them (collective)."""
        for name, tensor, _ in self._pairs:
            if name in names and (self._others or name not in self._everywhere):
                full = whole(tensor)
                if memory.on_gpus or dist.get_rank() == 0:
                    yield name, full

    def _move_into(self, memory: EngineMemory, names: Mapping[str, str]) -> None:
        """Make the parameters views of an engine's memory, if they are stored there in one piece."""
        mesh = next((t.device_mesh for _, t, _ in self._pairs if isinstance(t, DTensor)), None)
        own = mesh is not None and not memory.on_gpus and mesh.size() == len(memory.slices)
        self._index = mesh.get_local_rank() if mesh is not None and own else 0  # on a CPU each rank of TP has its own
        self._others, self._views = memory.crowded and not own, set()
        for name, tensor, _ in self._pairs if memory.slices else ():
            view = memory.box(names[name], *box(tensor), self._index) if name in names else None
            if view is not None:
                if self._is_one:
                    view.copy_(tensor)
                if isinstance(tensor, DTensor):
                    tensor._local_tensor = view
                else:
                    tensor.data = view
                self._views.add(name)
        found = [self._views if memory.slices else set(names)]  # a rank beside the engine's GPU writes nothing
        if (size := dist.get_world_size()) > 1:
            found *= size
            dist.all_gather_object(found, found[0])
        self._everywhere = set.intersection(*found)
        self._shared = not memory.on_gpus and len(self._everywhere) == len(self._pairs)
        self._memory = memory
        self._same, self._cut = self._pieces()
        give_back(next(self.compute.parameters()).device)  # free the former parameters
        self.changed()


class MirroredSource(HfWeightSource):
    """The masters in the serving dtype, for exports; a session writes them into the engine."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, names: CheckpointNames, mirror: Mirror):
        super().__init__(model, dtype, names)
        self._mirror = mirror
        # The checkpoint names of parameters that hold one weight each.
        self._plain = {g.model[0]: g.checkpoint[0] for g in names.groups if g.converter is None}

    def write_into(self, memory: EngineMemory) -> Samples:
        samples = self._mirror.write_into(memory, self._plain)
        self._write(memory, self._converted(), samples)
        return samples

    def unwritten(self, memory: EngineMemory) -> list[str]:
        plain = names_of(self._mirror.unlike(memory, self._plain))
        return plain + names_of(self._unlike(memory, self._converted()))

    def _converted(self) -> Weights:
        """Yield the weights that a parameter holds in another form (collective)."""
        return self._gathered([pair for pair in self._groups if pair[0].converter is not None])


def blank(policy: Policy, device: torch.device) -> Policy:
    """Return the model on `device` with parameters that are not written yet: their present content is not copied."""
    for parameter in policy.parameters():
        parameter.data = torch.empty_like(parameter, device=device)
    return policy.to(device)


def like_sharded(copy: Policy, masters: Policy, dtype: torch.dtype) -> None:
    """Make the copy compute as under FSDP2: with the masters' unrounded buffers, and weights in `dtype`."""
    for module, twin in zip(copy.modules(), masters.modules(), strict=True):
        module._buffers.update(twin._buffers)
    for parameter in copy.parameters():
        parameter.data = parameter.data.to(dtype)
