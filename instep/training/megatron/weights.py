"""A Megatron model's weights under Hugging Face names: reading (a `WeightSource`) and loading."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.checkpoints.folder_names import PLAIN, FolderNames, plain_names
from instep.checkpoints.hf_weights import StoredTensor, opened_weights
from instep.errors import CheckpointError, ConfigError
from instep.models.images import image_names
from instep.models.mtp import mtp_names
from instep.models.shape import ModelShape
from instep.models.weight_map import (
    EXPERT_BIAS,
    HEAD,
    Kind,
    WeightEntry,
    by_megatron,
    fuse,
    join,
    part_ranges,
    weight_entries,
)
from instep.training.megatron.layout import Placement
from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec

ADAPTER = ".adapter."  # in the names of the parameters of an adapter, see `lora.py`


def local_parameters(
    chunks: Sequence[torch.nn.Module], placement: Placement, *, adapter: bool = False
) -> dict[str, Tensor]:
    """Return the parameters of this rank's chunks, and the biases of their routers, by Megatron name.

    Layers count over all stages, experts over all ranks. With `adapter`, these are only those of the adapter, otherwise
    all others.
    """
    named: dict[str, Tensor] = {}
    for chunk, model in enumerate(chunks):
        biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(EXPERT_BIAS))
        for name, param in (*model.named_parameters(), *biases):
            if (ADAPTER in name) == adapter:
                named[name_in_model(name, chunk, placement)] = param
    return named


def name_in_model(name: str, chunk: int, placement: Placement) -> str:
    """Return the name of a parameter or module of this rank's chunk `chunk`, with layers counted over all stages and
    experts over all ranks."""
    layers, experts = "decoder.layers.", ".local_experts."
    if name.startswith(layers):
        index, dot, rest = name.removeprefix(layers).partition(".")
        name = f"{layers}{int(index) + placement.first_layer(chunk)}{dot}{rest}"
    before, _, numbered = name.partition(experts)
    if numbered:
        index, dot, rest = numbered.partition(".")
        name = f"{before}{experts}{int(index) + placement.ep_rank * placement.num_local_experts}{dot}{rest}"
    return name


def check_parameters(names: Collection[str], shape: ModelShape, placement: Placement, where: str) -> None:
    """Check that a model built by user functions has the parameters of its checkpoint on this rank.

    Args:
        names: of `local_parameters`.
        where: the flags that name the functions.

    Raises:
        ConfigError: names parameters that are missing, and those that no checkpoint has.
    """
    p, entries = placement, weight_entries(shape)
    here = {
        entry.megatron
        for entry in entries
        if p.stage(entry) == p.pp_rank and (entry.expert is None or entry.expert // p.num_local_experts == p.ep_rank)
    }
    known = here | ({HEAD} if shape.tied else set())  # the copy in the last stage
    problems = [f"{name} is missing" for name in sorted(here - set(names))]
    problems += [f"{name} is not a parameter of this model" for name in sorted(set(names) - known)]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ConfigError(
            f"the parameters of the model differ from its checkpoint: {'; '.join(problems[:8])}{more}",
            where=where,
            remedy="keep Megatron's names: checkpoints and engines identify weights by them",
        )


@dataclass
class MegatronWeightSource(WeightSource):
    """Full tensors on global rank 0, gathered one Megatron parameter at a time; None on the other ranks.

    Attributes:
        entries: all weights of the model by default.
        more: adds to the gathered tensors of an entry, which are None except on rank 0; collective.
        names: of the folder that engines load.
    """

    shape: ModelShape
    placement: Placement
    parameters: dict[str, Tensor]  # of `local_parameters`
    dtype: torch.dtype
    device: torch.device
    entries: list[WeightEntry] = field(default_factory=list)
    more: Callable[[WeightEntry, list[Tensor] | None], None] | None = None
    names: FolderNames = PLAIN
    specs: list[TensorSpec] = field(init=False)
    emits: bool = field(init=False)

    def __post_init__(self) -> None:
        self.entries = self.entries or weight_entries(self.shape)
        self.emits = dist.get_rank() == 0
        self.specs = self.names.specs(spec for entry in self.entries for spec in self._specs(entry))

    def _dtype(self, entry: WeightEntry) -> torch.dtype:
        return torch.float32 if entry.keep_fp32 else self.dtype

    def _specs(self, entry: WeightEntry) -> list[TensorSpec]:
        return [TensorSpec(n, s, self._dtype(entry)) for n, s in entry.tensors.items()]

    def __iter__(self) -> Iterator[tuple[TensorSpec, Tensor | None]]:
        return self.names.tensors(self._gathered())

    def _gathered(self) -> Iterator[tuple[TensorSpec, Tensor | None]]:
        for entry in self.entries:
            tensors = self.gather(entry)
            if self.more is not None:
                self.more(entry, tensors)
            for i, spec in enumerate(self._specs(entry)):
                yield spec, None if tensors is None else tensors[i]

    @torch.no_grad()
    def gather(self, entry: WeightEntry) -> list[Tensor] | None:
        """Return the full tensors of an entry on rank 0, None on the others; collective.

        Gather over tensor-parallel ranks, then from the ranks of the expert to the first ones, then to the first
        stage.
        """
        p, stage = self.placement, self.placement.stage(entry)
        if (p.copy_rank if entry.expert is None else p.expert_copy_rank) > 0:
            return None
        rank, size, group = p.split(entry)
        holder, ep_rank = (0, 0) if entry.expert is None else (entry.expert // p.num_local_experts, p.ep_rank)
        tensors = None
        if p.pp_rank == stage and ep_rank == holder:
            local = self.parameters[entry.megatron].detach()
            if entry.kind is Kind.REPLICATED or size == 1:
                parts: list[Tensor] | None = [local]
            else:
                parts = [torch.empty_like(local) for _ in range(size)] if rank == 0 else None
                dist.gather(local.contiguous(), parts, group=group, group_dst=0)
            if rank == 0:
                assert parts is not None
                tensors = [t.to(self._dtype(entry)) for t in join(entry, parts, self.shape)]
        if rank != 0:
            return None
        if p.pp_rank == stage:
            tensors = self._to_first(entry, tensors, p.ep_group, ep_rank, holder)
        return self._to_first(entry, tensors, p.pp_group, p.pp_rank, stage) if ep_rank == 0 else None

    def _to_first(
        self, entry: WeightEntry, tensors: list[Tensor] | None, group: Any, rank: int, holder: int
    ) -> list[Tensor] | None:
        """Move the tensors of rank `holder` of a group to its first rank; return None on the others."""
        if holder == 0:
            return tensors if rank == 0 else None
        if rank == holder:
            assert tensors is not None
            for tensor in tensors:
                dist.send(tensor, group=group, group_dst=0)
        elif rank == 0:
            dtype = self._dtype(entry)
            tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape in entry.shapes]
            for tensor in tensors:
                dist.recv(tensor, group=group, group_src=holder)
            return tensors
        return None


@torch.no_grad()
def load_hf(
    path: Path, shape: ModelShape, placement: Placement, parameters: dict[str, Tensor], padded_vocab: int
) -> list[str]:
    """Read this rank's slices of the checkpoint `path` into its parameters; the head of a critic becomes zero.

    Returns:
        The names of the tensors of multi-token prediction and of layers for images, which are not read.

    Raises:
        CheckpointError, ConfigError: the folder cannot be read, or tensors do not belong to the model.
    """
    by_name = by_megatron(weight_entries(shape), tied=shape.tied)
    dtype = next(iter(parameters.values())).dtype
    with opened_weights(path, dtype) as stored:
        tensors = plain_names(stored)
        unread = [*check_tensors(path, shape, tensors), *image_names(stored)]
        for name, param in parameters.items():
            if shape.value_head and name == HEAD:
                param.zero_()
                continue
            entry = by_name[name]
            parts = []
            for i, hf_name in enumerate(entry.names):
                if entry.split_dim is None:
                    parts.append(tensors[hf_name].read())
                    continue
                ranges = part_ranges(entry, i, *placement.split(entry)[:2], padded_vocab)
                sections = [tensors[hf_name].read(entry.split_dim, start, stop) for start, stop in ranges]
                parts.append(torch.cat(sections) if len(sections) > 1 else sections[0])
            param.copy_(fuse(entry, [part.to(param.dtype) for part in parts], shape, param.shape[0]))
    return unread


def check_tensors(path: Path, shape: ModelShape, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Check that all tensors of the model are in the checkpoint with their shapes, and no others except unread ones.

    Args:
        tensors: of the checkpoint. The output layer of a model that has none, or of a critic, is not checked.

    Returns:
        The names of tensors of multi-token prediction, if the model has no such layers.

    Raises:
        CheckpointError: names all that are missing, unknown or of another shape.
    """
    behind = shape.num_mtp_layers if shape.latent else 0
    unread = [] if shape.mtp else mtp_names(tensors, shape.num_layers, behind)
    entries = [entry for entry in weight_entries(shape) if not (shape.value_head and entry.megatron == HEAD)]
    wanted = {n: s for e in entries for n, s in e.tensors.items() if not (e.repeats and n not in tensors)}
    ignored = {*unread, *(["lm_head.weight"] if shape.tied or shape.value_head else [])}
    found = {name for name in tensors if not name.endswith("rotary_emb.inv_freq")} - ignored
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not a tensor of this model" for name in sorted(found - set(wanted))]
    for name in wanted:
        if name in found and (size := tensors[name].shape) != wanted[name]:
            problems.append(f"{name} has shape {size}, config.json says {wanted[name]}")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            "; ".join(problems[:8]) + more, where=str(path), remedy="use weights that belong to config.json"
        )
    return unread
