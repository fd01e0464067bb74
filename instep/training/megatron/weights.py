"""A Megatron model's weights under Hugging Face names: reading them (a `WeightSource`) and loading them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.checkpoints.weight_files import opened, weight_files
from instep.errors import CheckpointError
from instep.models.shape import ModelShape
from instep.models.weight_map import HEAD, Kind, WeightEntry, fuse, join, part_range, weight_entries
from instep.weights.source import TensorSpec, WeightSource


@dataclass
class Placement:
    """Which part of the model this process holds. Groups are torch.distributed's."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    tp_group: Any
    pp_group: Any
    num_layers: int

    def stage(self, entry: WeightEntry) -> int:
        """The pipeline stage that holds `entry` (for tied weights the first one)."""
        if entry.layer is not None:
            return entry.layer // (self.num_layers // self.pp_size)
        return 0 if entry.kind is Kind.VOCAB and entry.megatron.startswith("embedding.") else self.pp_size - 1


def local_parameters(model: torch.nn.Module, placement: Placement) -> dict[str, torch.nn.Parameter]:
    """The parameters of this rank's stage by Megatron name, layers counted over all stages."""
    offset = placement.pp_rank * (placement.num_layers // placement.pp_size)
    layers = "decoder.layers."
    named = {}
    for name, param in model.named_parameters():
        if name.startswith(layers):
            index, rest = name.removeprefix(layers).split(".", 1)
            name = f"{layers}{int(index) + offset}.{rest}"
        named[name] = param
    return named


@dataclass
class MegatronWeightSource(WeightSource):
    """Full tensors on global rank 0, gathered one Megatron parameter at a time; None on the other ranks."""

    shape: ModelShape
    placement: Placement
    parameters: dict[str, torch.nn.Parameter]
    dtype: torch.dtype
    device: torch.device
    specs: list[TensorSpec] = field(init=False)
    emits: bool = field(init=False)

    def __post_init__(self) -> None:
        self.entries = weight_entries(self.shape)
        self.emits = dist.get_rank() == 0
        self.specs = [
            TensorSpec(name, shape, self.dtype)
            for entry in self.entries
            for name, shape in zip(entry.names, entry.shapes, strict=True)
        ]

    def __iter__(self) -> Iterator[tuple[TensorSpec, Tensor | None]]:
        specs = iter(self.specs)
        for entry in self.entries:
            tensors = self._gather(entry) if self.placement.dp_rank == 0 else None
            for i in range(len(entry.names)):
                yield next(specs), None if tensors is None else tensors[i]

    @torch.no_grad()
    def _gather(self, entry: WeightEntry) -> list[Tensor] | None:
        p, stage = self.placement, self.placement.stage(entry)
        tensors = None
        if p.pp_rank == stage:
            local = self.parameters[entry.megatron].detach()
            if entry.kind is Kind.REPLICATED or p.tp_size == 1:
                parts: list[Tensor] | None = [local]
            else:
                parts = [torch.empty_like(local) for _ in range(p.tp_size)] if p.tp_rank == 0 else None
                dist.gather(local.contiguous(), parts, group=p.tp_group, group_dst=0)
            if p.tp_rank == 0:
                assert parts is not None
                tensors = [t.to(self.dtype) for t in join(entry, parts, self.shape)]
        if stage == 0 or p.tp_rank != 0:
            return tensors if p.pp_rank == 0 else None
        if p.pp_rank == stage:
            assert tensors is not None
            for tensor in tensors:
                dist.send(tensor, group=p.pp_group, group_dst=0)
        elif p.pp_rank == 0:
            tensors = [torch.empty(shape, dtype=self.dtype, device=self.device) for shape in entry.shapes]
            for tensor in tensors:
                dist.recv(tensor, group=p.pp_group, group_src=stage)
            return tensors
        return None


@torch.no_grad()
def load_hf(
    path: Path, shape: ModelShape, placement: Placement, parameters: dict[str, torch.nn.Parameter], padded_vocab: int
) -> None:
    """Read this rank's slices of the checkpoint `path` into its parameters; the head of a critic becomes zero.

    Raises:
        CheckpointError: an unreadable folder, or tensors that are not the model's.
    """
    files = weight_files(path)
    entries = [entry for entry in weight_entries(shape) if not (shape.value_head and entry.megatron == HEAD)]
    by_name = {entry.megatron: entry for entry in entries}
    if shape.tied:  # the last stage of a pipeline has its own copy
        by_name[HEAD] = by_name["embedding.word_embeddings.weight"]
    with ExitStack() as stack:
        shards = {file: stack.enter_context(opened(file)) for file in sorted(set(files.values()))}
        slices = {name: shards[file].get_slice(name) for name, file in files.items()}
        _check(path, entries, slices, headless=shape.tied or shape.value_head)
        for name, param in parameters.items():
            if shape.value_head and name == HEAD:
                param.zero_()
                continue
            entry = by_name[name]
            parts = []
            for i, hf_name in enumerate(entry.names):
                stored = slices[hf_name]
                if entry.split_dim is None:
                    parts.append(stored[:])
                    continue
                start, stop = part_range(entry, i, placement.tp_rank, placement.tp_size, padded_vocab)
                parts.append(stored[start:stop] if entry.split_dim == 0 else stored[:, start:stop])
            param.copy_(fuse(entry, [part.to(param.dtype) for part in parts], shape, param.shape[0]))


def _check(path: Path, entries: list[WeightEntry], slices: dict[str, Any], *, headless: bool) -> None:
    """Every tensor of the model is in the checkpoint with its shape, and nothing else is.

    Args:
        headless: the output layer, if the checkpoint has one, is not looked at.

    Raises:
        CheckpointError: names all that are missing, unknown or of another shape.
    """
    wanted = {n: s for entry in entries for n, s in zip(entry.names, entry.shapes, strict=True)}
    ignored = {"lm_head.weight"} if headless else set()
    found = {name for name in slices if not name.endswith("rotary_emb.inv_freq")} - ignored
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is no tensor of this model" for name in sorted(found - set(wanted))]
    for name in wanted:
        if name in found and (shape := tuple(slices[name].get_shape())) != wanted[name]:
            problems.append(f"{name} has shape {shape}, config.json says {wanted[name]}")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            "; ".join(problems[:8]) + more, where=str(path), remedy="use weights that belong to config.json"
        )
