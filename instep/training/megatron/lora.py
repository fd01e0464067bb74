"""LoRA in the `megatron` backend: A and B per Hugging Face projection, beside Megatron's fused layers.

A layer of Megatron may compute several projections (q, k and v; gate and up; those of a gated delta net). Each has its
own A and B, as in the `hf` backend. One product with all A, and one with all B in the order of the fused weight, add to
the output. What a rank holds depends on the layer:

- tensor-parallel ranks divide its outputs: the whole A, and the rows of B for the rank's outputs;
- they divide its inputs: the columns of A for the rank's inputs, and the whole B;
- each rank has the whole layer: the whole A and B.

Ranks exchange only the products with A, of width `rank`. A whole factor's gradient is complete on each rank, except
with sequence parallelism and in experts: there it covers a part of the tokens or outputs, and ranks sum it.

Imports `megatron.core`: only after `cpu_platform.install()`, see there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from instep.checkpoints.adapter import Base, Lora, export_adapter, write_layout
from instep.checkpoints.dist_checkpoint import load_tensors, read_index, refuse_others
from instep.errors import ConfigError
from instep.models.shape import EXPERTS, ModelShape
from instep.models.weight_map import Kind, WeightEntry, fuse, part_ranges, weight_entries
from instep.training.grouped import grouped_linear
from instep.training.hf.optimizer import MOMENTS
from instep.training.lora import PEFT, Earlier, begin, chosen, earlier_of, holds_adapter, peft_config
from instep.training.megatron.checkpoint import load_moments, num_steps, whole_states
from instep.training.megatron.layout import Placement
from instep.training.megatron.weights import ADAPTER, MegatronWeightSource, local_parameters, name_in_model
from instep.training.saving import Saver


@dataclass(frozen=True)
class Pair:
    """A and B of one projection, as entries with peft's names; `base` is the entry of the fused weight."""

    base: WeightEntry
    projection: str  # the last part of its name
    layer: str  # its whole name
    a: WeightEntry
    b: WeightEntry


def pairs(shape: ModelShape, lora: Lora) -> list[Pair]:
    """Return the adapter's A and B in the order of the layers, which is that of the `hf` backend.

    Raises:
        ConfigError: a target belongs to no linear layer.
    """
    entries = [e for e in weight_entries(shape) if e.layer is not None and len(e.shapes[0]) == 2]
    entries = [e for e in entries if not e.names[0].endswith(".mlp.gate.weight")]  # a router is no linear layer
    found = [(e, i, n.removesuffix(".weight")) for e in entries for i, n in enumerate(e.names)]
    targets = tuple(t for t in lora.targets or () if t != EXPERTS)
    names: set[str] = set()
    if targets or not lora.targets:
        dense = [name for e, _, name in found if e.expert is None]
        also = (EXPERTS,) if shape.experts else ()
        names |= {*chosen(dense, replace(lora, targets=targets or None), "this model", also=also)}
    if EXPERTS in (lora.targets or ()):
        names |= {name for e, _, name in found if e.expert is not None}
        if shape.experts is None:
            what, where = "this model has no experts", f"--lora-target-modules {EXPERTS}"
            raise ConfigError(what, where=where, remedy="leave it out")
    return [_pair(e, i, name, lora.rank) for e, i, name in found if name in names]


def _module(base: WeightEntry) -> str:
    """Return Megatron's name of the layer that computes with this weight."""
    return base.megatron.removesuffix("weight").rstrip("._")


def _pair(base: WeightEntry, index: int, layer: str, rank: int) -> Pair:
    rows, columns = base.shapes[index]
    last = layer.rpartition(".")[2]
    kinds = {Kind.COLUMNS: (Kind.COLUMNS, Kind.REPLICATED), Kind.REPLICATED: (Kind.REPLICATED, Kind.REPLICATED)}
    of_a, of_b = kinds.get(base.kind, (Kind.REPLICATED, Kind.ROWS))
    sections = base.sections if index == 0 else ()

    def entry(x: str, shape: tuple[int, int], kind: Kind, sections: tuple[int, ...] = ()) -> WeightEntry:
        name, of_rank = f"{PEFT}{layer}.lora_{x}.weight", f"{_module(base)}{ADAPTER}lora_{x}.{last}"
        return WeightEntry(of_rank, (name,), (shape,), kind, base.layer, base.expert, sections=sections)

    return Pair(base, last, layer, entry("A", (rank, columns), of_a), entry("B", (rows, rank), of_b, sections))


# ---- layers ----------------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """The A `[rank, in]` and B `[out, rank]` of a layer's projections, this rank's parts, in float32.

    Args:
        layer: of Megatron: divided by outputs or inputs, or whole.
        base: the entry of its weight.
        shape: of the model.
        size: the number of ranks that divide the layer.
    """

    def __init__(
        self, layer: nn.Module, base: WeightEntry, shape: ModelShape, size: int, device: torch.device, scaling: float
    ):
        super().__init__()
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self.scaling, self.enabled = scaling, True
        self._kind, pieces = base.kind, size if base.split_dim == 0 else 1
        self._rows = {n.split(".")[-2]: rows // pieces for n, (rows, _) in base.tensors.items()}
        order = torch.arange(sum(self._rows.values()), device=device)
        fused = fuse(base, order.split([*self._rows.values()]), shape, len(order))
        self._order = None if torch.equal(fused, order) else fused  # of the rows of B
        whole = base.kind is Kind.REPLICATED or layer.explicit_expert_comm  # dispatchers of experts communicate
        self._group = None if whole else layer.tp_group
        self._sequence_parallel = not whole and layer.sequence_parallel
        layer.register_forward_hook(self._add)

    def _add(self, layer: nn.Module, args: tuple[Tensor, ...], output: Any) -> Any:
        """Return the output of the layer plus that of the adapter: a forward hook."""
        if not self.enabled:
            return output
        if isinstance(output, tuple):
            return self._sum(args[0], output[0]), *output[1:]
        return self._sum(args[0], output)

    def _sum(self, x: Tensor, out: Tensor) -> Tensor:
        a, b = self.factors(x.dtype)
        return out.add(F.linear(self._exchanged(F.linear(x, a)), b), alpha=self.scaling)

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return all A `[n * rank, in]`, and B `[out, n * rank]` in the order of the layer's rows: zero where a row is
        of another one of the n projections."""
        a, held = torch.cat([*self.lora_A.values()]), self.lora_B
        blocks = [held[name] if name in held else a.new_empty(rows, 0) for name, rows in self._rows.items()]
        b = blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)
        return a.to(dtype), (b if self._order is None else b.index_select(0, self._order)).to(dtype)

    def _exchanged(self, narrow: Tensor) -> Tensor:
        """Return the products with A for all tokens and inputs that B of this rank needs."""
        if self._group is None:
            return narrow
        if self._kind is Kind.COLUMNS:
            if self._sequence_parallel:
                return reduce_scatter_to_sequence_parallel_region(narrow, group=self._group)
            return reduce_from_tensor_model_parallel_region(narrow, group=self._group)
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(narrow, group=self._group)
        return copy_to_tensor_model_parallel_region(narrow, group=self._group)


def add_grouped(adapters: Sequence[Adapter], x: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Return `out` plus what the adapters of a rank's experts add; see `grouped_linear`. They have the same form."""
    if not adapters[0].enabled:
        return out
    a, b = zip(*(adapter.factors(x.dtype) for adapter in adapters), strict=True)
    padding = -len(a[0]) % 8  # the kernel wants rows of 16 bytes
    narrow = grouped_linear(x, ends, [F.pad(factor, (0, 0, 0, padding)) for factor in a])
    wide = grouped_linear(narrow, ends, [F.pad(factor, (0, padding)) for factor in b])
    return out.add(wide, alpha=adapters[0].scaling)


# ---- the adapter of a model ------------------------------------------------------------------------------------------


class MegatronLora:
    """The adapter of this rank's chunks. It freezes their weights, which already have the model's dtype.

    The random A depend on `seed` alone, and are those of the `hf` backend.

    Attributes:
        base: set when the weights of the base are read.

    Raises:
        ConfigError: a target belongs to no layer, or a chunk has nothing to train.
    """

    base: Base | None = None

    def __init__(self, lora: Lora, chunks: Sequence[nn.Module], shape: ModelShape, placement: Placement, seed: int):
        self.lora, self._placement, self._pairs = lora, placement, pairs(shape, lora)
        device = next(chunks[0].parameters()).device
        self._where: dict[str, Any] = dict(shape=shape, placement=placement, device=device)
        self.layers = [pair.layer for pair in self._pairs]
        self._entries = [e for pair in self._pairs for e in (pair.a, pair.b)]
        modules = {
            name_in_model(name, i, placement): module
            for i, chunk in enumerate(chunks)
            for name, module in chunk.named_modules()
        }
        for chunk in chunks:
            chunk.requires_grad_(False)
        _check_stages(self._pairs, placement)
        generator = torch.Generator().manual_seed(seed)
        self._adapters: dict[str, Adapter] = {}
        for pair in self._pairs:
            whole = torch.empty(pair.a.shapes[0]), torch.empty(pair.b.shapes[0])
            begin(*whole, generator)
            layer = modules.get(_module(pair.base))
            if layer is not None:
                adapter = self._adapters.get(pair.base.megatron)
                if adapter is None:
                    size = placement.split(pair.base)[1]
                    adapter = layer.adapter = Adapter(layer, pair.base, shape, size, device, lora.scaling)
                    self._adapters[pair.base.megatron] = adapter
                for factors, entry, full in zip((adapter.lora_A, adapter.lora_B), (pair.a, pair.b), whole, strict=True):
                    factor = nn.Parameter(self.part(entry, full).to(device, copy=True))
                    _mark(factor, entry, placement)
                    factors[pair.projection] = factor
        self.factors = local_parameters(chunks, placement, adapter=True)

    def part(self, entry: WeightEntry, full: Tensor) -> Tensor:
        """Return what this rank has of a whole A or B."""
        if entry.split_dim is None:
            return full
        ranges = part_ranges(entry, 0, *self._placement.split(entry)[:2], 0)
        return torch.cat([full.narrow(entry.split_dim, a, b - a) for a, b in ranges], dim=entry.split_dim)

    @torch.no_grad()
    def sum_over_expert_ranks(self) -> None:
        """Sum the gradients of experts' whole factors: each expert-tensor-parallel rank has those of its own part."""
        found = [cast(Any, p).main_grad for e, p in self.held() if e.expert is not None and e.split_dim is None]
        if found and self._placement.etp_size > 1:
            together = torch.cat([grad.flatten() for grad in found])
            dist.all_reduce(together, group=self._placement.etp_group)
            for grad, summed in zip(found, together.split([grad.numel() for grad in found]), strict=True):
                grad.copy_(summed.view_as(grad))

    def held(self) -> Iterator[tuple[WeightEntry, Tensor]]:
        """Yield the entries of this rank with their parameters."""
        return ((e, self.factors[e.megatron]) for e in self._entries if e.megatron in self.factors)

    # Weights

    def source(self, dtype: torch.dtype) -> AdapterSource:
        """Return a `WeightSource` of only the adapter, under peft's names."""
        assert self.base is not None, "this model has no weights yet"
        config = peft_config(self.lora, self.layers, self.base)
        return AdapterSource(parameters=self.factors, dtype=dtype, entries=self._entries, config=config, **self._where)

    def export(self, path: Path) -> None:
        """Write the adapter as the folder `path`, in float32 (collective)."""
        source = self.source(torch.float32)
        export_adapter(source, source.config, path)

    def merged(self, **source: Any) -> MegatronWeightSource:
        """Return the `WeightSource` of all weights plus `alpha / rank * B A`, added in float32."""
        factors = self.source(torch.float32)
        of_base: dict[str, list[Pair]] = {}
        for pair in self._pairs:
            of_base.setdefault(pair.base.megatron, []).append(pair)

        def add(entry: WeightEntry, tensors: list[Tensor] | None) -> None:
            for pair in of_base.get(entry.megatron, ()):
                a, b = factors.gather(pair.a), factors.gather(pair.b)
                if tensors is not None and a is not None and b is not None:
                    i = entry.names.index(f"{pair.layer}.weight")
                    tensors[i] = (tensors[i].float() + self.lora.scaling * (b[0] @ a[0])).to(tensors[i].dtype)

        return MegatronWeightSource(more=add, **source, **self._where)

    def earlier(self, path: Path, forward_only: Callable[..., Any]) -> Earlier | None:
        """See `TrainBackend.earlier`."""
        entries = {e.names[0].removeprefix(PEFT): e for e, _ in self.held()}
        return earlier_of(
            path,
            self.base,
            lambda: Earlier(
                self._adapters.values(),
                self.source(torch.float32).specs,
                lambda: {name: self.factors[e.megatron].detach() for name, e in entries.items()},
                lambda name, full: self.part(entries[name], full),
                forward_only,
            ),
        )

    # Checkpoints

    def save(self, path: Path, optimizer: Any | None, saver: Saver) -> None:
        """Write the adapter and its moments into the folder `path`, in the format of the `hf` backend (collective)."""
        state: dict[str, Any] = {"model": self.whole(self.factors)}
        if optimizer is not None:
            moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in MOMENTS}
            names = {param: name for name, param in self.factors.items()}
            for param, kind, full in whole_states(optimizer, [*names]):
                if full is not None:
                    moments[kind][names[param]] = full
            step = torch.tensor(num_steps(optimizer, self._where["device"]))
            wholes = {kind: self.whole(tensors) for kind, tensors in moments.items()}
            state["optimizer"] = {
                name: {"step": step.clone(), **{kind: whole[name] for kind, whole in wholes.items()}}
                for name in state["model"]
            }
        first = dist.get_rank() == 0
        saver.save(state if first else {}, path)
        if first and self.base is not None:
            write_layout(path, self.lora, self.layers, self.base)

    def whole(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors by the names of a checkpoint, on rank 0 (collective)."""
        more = dict(parameters=parameters, dtype=torch.float32, entries=self._entries)
        source = MegatronWeightSource(**more, **self._where)
        return {spec.name.removeprefix(PEFT): tensor.cpu() for spec, tensor in source if tensor is not None}

    @torch.no_grad()
    def load(self, path: Path, optimizer: Any | None) -> bool:
        """Read this rank's part of what `save`, or the `hf` backend, wrote (collective).

        Args:
            optimizer: None: the moments stay, and a checkpoint of all weights may follow.

        Returns:
            Whether it holds an adapter.

        Raises:
            CheckpointError: its adapter belongs to another model, or a tensor is missing.
        """
        if not holds_adapter(path, self.lora, self.layers, self.base, resumes=optimizer is not None):
            return False
        held = {e.names[0].removeprefix(PEFT): (e, param) for e, param in self.held()}
        state: dict[str, Any] = {"model": {name: torch.empty(e.shapes[0]) for name, (e, _) in held.items()}}
        if optimizer is not None:
            state["optimizer"] = {
                name: {"step": torch.zeros(()), **{kind: torch.empty_like(whole) for kind in MOMENTS}}
                for name, whole in state["model"].items()
            }
        index = read_index(path)
        refuse_others(path, index, {e.names[0].removeprefix(PEFT) for e in self._entries})
        load_tensors(state, path, index)
        for name, (e, param) in held.items():
            param.copy_(self.part(e, state["model"][name]))
        if optimizer is not None:
            saved = state["optimizer"]
            moments = {p: {k: self.part(e, saved[n][k]) for k in MOMENTS} for n, (e, p) in held.items()}
            load_moments(optimizer, moments, float(next(iter(saved.values()))["step"]))
        return True


def _check_stages(found: Sequence[Pair], placement: Placement) -> None:
    """Check on all ranks alike that each chunk of each pipeline stage has something to train."""
    layers = {pair.base.layer for pair in found}
    for rank, size in enumerate(placement.stage_layers):
        stage = replace(placement, pp_rank=rank)
        firsts = [stage.first_layer(chunk) for chunk in range(placement.num_chunks)]
        if any(layers.isdisjoint(range(first, first + size // placement.num_chunks)) for first in firsts):
            raise ConfigError(
                f"pipeline stage {rank}, or one of its virtual stages, has no layer with an adapter",
                where="--lora-target-modules",
                remedy="name layers of each stage, or use --pipeline-model-parallel-size 1 without virtual stages",
            )


def _mark(factor: nn.Parameter, entry: WeightEntry, placement: Placement) -> None:
    """Tell Megatron over which ranks a gradient is summed, and where it counts in the norm."""
    split, of_expert = entry.split_dim is not None, entry.expert is not None
    marks: Any = factor
    marks.allreduce = not of_expert  # False: experts have their own data-parallel ranks
    marks.tensor_model_parallel = split or of_expert
    marks.partition_dim, marks.partition_stride = entry.split_dim or 0, 1
    marks.sequence_parallel = not split and not of_expert  # it counts if the model has sequence parallelism
    marks.shared = of_expert and not split and placement.etp_rank > 0  # its norm counts on the first rank


@dataclass
class AdapterSource(MegatronWeightSource):
    """A source of only the adapter; `config` is peft's `adapter_config.json`."""

    config: dict[str, Any] = field(default_factory=dict)
