"""The tensors in the folder of a Megatron checkpoint, of either format; `megatron.py` knows their meaning."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from instep.checkpoints.dist_checkpoint import read_index
from instep.checkpoints.safe_pickle import MAX_NAME
from instep.checkpoints.torch_files import TensorFiles, load_data
from instep.errors import CheckpointError
from instep.models.weight_map import Kind, WeightEntry

# Megatron's local name of a norm, and Transformer Engine's name of the same norm within the layer after it.
FUSED = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),  # latent attention
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)
LAYERS, LOCAL_EXPERTS, EXPERTS = "decoder.layers.", "mlp.experts.local_experts.", "mlp.experts.experts."
MTP = "mtp."  # layers of multi-token prediction, `mtp.layers.0.`, have a transformer layer and more
# Extra entries of Transformer Engine's modules, norms too: scales and histories of FP8. `_extra_state3` belongs to an
# expert of a grouped GEMM, `_extra_state/shard_0_24` is an object of `torch_dist`.
_EXTRA_STATE = re.compile(r"(^|\.)_extra_state")
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
RANK_FILE = "model_optim_rng.pt"
# The key of the optimizer's state in a file of instep: by chunk, then by the names of state and parameter.
OPTIMIZER = "optimizer_by_parameter"
# A rank's name of the weights of its experts in one module (grouped GEMM): the first number is the expert's number.
_NUMBERED = re.compile(rf"({re.escape(LAYERS)}|mtp\.layers\.)(\d{{1,9}})\.((?:transformer_layer\.)?)(.+)")
_OF_EXPERT = re.compile(rf"{re.escape(LOCAL_EXPERTS)}(\d{{1,9}})\.(.+)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")


@dataclass(frozen=True)
class Chunk:
    """A box of a stored tensor: where it starts, its shape, and how to read it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, in chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    _by_lead: dict[int, dict[tuple[int, ...], list[Chunk]]] = field(default_factory=dict, compare=False, repr=False)

    def at(self, index: tuple[int, ...]) -> Sequence[Chunk]:
        """Return the chunks with a part of the tensor at these leading indices, of a layer or an expert."""
        if (lead := len(index)) not in self._by_lead:
            places: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in self.chunks:
                ranges = [range(o, o + n) for o, n in zip(chunk.offsets[:lead], chunk.sizes[:lead], strict=True)]
                for place in product(*ranges):
                    places.setdefault(place, []).append(chunk)
            self._by_lead[lead] = places
        return self._by_lead[lead].get(index, ())


def full_shape(entry: WeightEntry) -> tuple[int, ...]:
    """Return the shape of the Megatron parameter if one rank holds all of it."""
    return (sum(shape[0] for shape in entry.shapes), *entry.shapes[0][1:])


def torch_dist_tensors(folder: Path) -> dict[str, Stored]:
    """Read the tensors of the format `torch_dist`. Raises CheckpointError as `read_index`."""
    index, files = read_index(folder), TensorFiles(folder)
    stored = {}
    for key, about in index.state_dict_metadata.items():
        if not isinstance(about, TensorStorageMetadata) or _EXTRA_STATE.search(key):
            continue
        chunks, itemsize = [], about.properties.dtype.itemsize
        for chunk in about.chunks:
            info = index.storage_data.get(MetadataIndex(key, chunk.offsets))
            if info is None or not 0 < math.prod(chunk.sizes) * itemsize <= info.length:
                continue  # `Part.read` reports that it is missing
            args = (info.relative_path, info.offset, info.length)
            chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), partial(files.read, *args)))
        stored[key] = Stored(about.properties.dtype, tuple(about.size), tuple(chunks))
    return stored


def torch_tensors(folder: Path, entries: Sequence[WeightEntry]) -> dict[str, Stored]:
    """Read the ranks' files as tensors of the whole model: parts of tensor-parallel ranks are chunks."""
    ranks = _ranks(folder)
    by_name = {entry.megatron: entry for entry in entries}
    counts = {
        (chunk, pp): len({name.split(".")[2] for name in weights if name.startswith(LAYERS)})
        for (tp, pp, ep), chunks in ranks.items()
        for chunk, weights in enumerate(chunks)
        if tp == ep == 0
    }
    found: dict[str, dict[int, Tensor]] = {}
    for (tp, pp, ep), chunks in sorted(ranks.items()):
        for chunk, weights in enumerate(chunks):
            first = sum(n for place, n in counts.items() if place < (chunk, pp))
            for name, tensor in weights.items():
                if isinstance(tensor, Tensor) and not _EXTRA_STATE.search(name):
                    prefix, own = _split(name)
                    found.setdefault(prefix + _whole_name(own, first, ep, weights), {}).setdefault(tp, tensor)
    stored = {}
    for name, parts in found.items():
        own = _split(name)[1]
        entry = by_name.get(own) or by_name.get(_own_name(own))
        if len({part.shape for part in parts.values()}) > 1:
            what, remedy = f"{name} has another shape on each rank", "use another checkpoint, or copy it again"
            raise CheckpointError(what, where=str(folder), remedy=remedy)
        stored[name] = _joined(entry, [parts[tp] for tp in sorted(parts)])
    return stored


def _split(name: str) -> tuple[str, str]:
    """Return the prefix of a state of the optimizer (empty for a weight), and the parameter's name."""
    match = re.match(r"optimizer\.\w+\.", name)
    return (match[0], name[match.end() :]) if match else ("", name)


def _ranks(folder: Path) -> dict[tuple[int, int, int], list[dict[str, Any]]]:
    """Return the part of the model of each rank (tensor, pipeline, expert), in chunks."""
    files = {m: p for p in sorted(folder.iterdir()) if (m := _RANK_FOLDER.fullmatch(p.name))}
    models: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for match, path in files.items():
        state = load_data(path / RANK_FILE)
        keys = [k for k in ("model", *(f"model{i}" for i in range(len(state)))) if k in state]
        chunks, states = [state[k] for k in keys], state.get(OPTIMIZER) or {}
        dicts = [*chunks, states, *(states.values() if isinstance(states, dict) else ())]
        if not chunks or not all(isinstance(part, dict) for part in dicts):
            raise CheckpointError("it holds no model", where=str(path / RANK_FILE), remedy="use another checkpoint")
        if not all(
            isinstance(name, str) and len(name) <= MAX_NAME and name.isprintable() for part in dicts for name in part
        ):
            what = f"the name of a tensor is not a text of at most {MAX_NAME} characters"
            raise CheckpointError(what, where=str(path / RANK_FILE), remedy="use another checkpoint")
        models[tuple(g for g in match.groups() if g is not None)] = [
            chunk | {f"optimizer.{name}": tensor for name, tensor in states.get(key, {}).items()}
            for key, chunk in zip(keys, chunks, strict=True)
        ]
    # One number after the tensor-parallel rank is the stage, unless every rank has the embedding.
    stages = not all(any("word_embeddings" in name for chunk in c for name in chunk) for c in models.values())
    out = {}
    for numbers, chunks in models.items():
        tp, *more = map(int, numbers)
        if len(more) == 1 and not stages:
            more = [0, *more]
        pp, ep = (*more, 0, 0)[:2]
        out[tp, pp, ep] = chunks
    return out


def _whole_name(name: str, first: int, ep: int, weights: dict[str, Any]) -> str:
    """Return the name in the whole model of a rank's `name`: layers over all stages, experts over all ranks."""
    if (numbered := _NUMBERED.fullmatch(name)) is None:
        return name
    stack, layer, inner, rest = numbered.groups()
    rest = _GROUPED.sub(rf"{LOCAL_EXPERTS}\3.\1.\2", rest)
    if (of_expert := _OF_EXPERT.fullmatch(rest)) is not None:
        down = r"mlp\.experts\.(local_experts\.\d+\.linear_fc2\.weight|linear_fc2\.weight\d+)"
        other = re.escape(f"{stack}{layer}.{inner}") + down
        local = sum(re.fullmatch(other, key) is not None for key in weights)
        rest = f"{EXPERTS}{ep * local + int(of_expert[1])}.{of_expert[2]}"
    return f"{stack}{int(layer) + (first if stack == LAYERS else 0)}.{inner}{rest}"


def _own_name(name: str) -> str:
    """Return Megatron's local name of a tensor that Transformer Engine or an expert-parallel rank calls `name`."""
    for own, fused in FUSED:
        layer = rf"{re.escape(LAYERS)}\d+\.|mtp\.layers\.\d+\.transformer_layer\."
        name = re.sub(rf"^({layer}){re.escape(fused)}", rf"\1{own}", name)
    return name.replace(EXPERTS, LOCAL_EXPERTS)


def _joined(entry: WeightEntry | None, parts: Sequence[Tensor]) -> Stored:
    first = parts[0]
    if not first.ndim:
        return Stored(first.dtype, (), (Chunk((), (), first.contiguous),))
    dim = None if entry is None else entry.split_dim
    alone = len(parts) == 1 or dim is None or dim >= first.ndim
    if entry is None or dim is None or alone or first.shape[dim] == full_shape(entry)[dim]:
        parts, dim = parts[:1], 0
    chunks, at = [], 0
    for part in parts:
        if entry is not None and entry.kind is Kind.GATE_UP:  # a rank's gate rows, then its up rows
            half = part.shape[0] // 2
            for piece, start in ((part[:half], at), (part[half:], len(parts) * half + at)):
                offsets = (start, *[0] * (part.ndim - 1))
                chunks.append(Chunk(offsets, tuple(piece.shape), piece.contiguous))
            at += half
        else:
            offsets = tuple(at if d == dim else 0 for d in range(part.ndim))
            chunks.append(Chunk(offsets, tuple(part.shape), part.contiguous))
            at += part.shape[dim]
    shape = list(first.shape)
    if shape:
        shape[dim] = sum(part.shape[dim] for part in parts)
    return Stored(first.dtype, tuple(shape), tuple(chunks))
