"""Hugging Face weights <-> Megatron-Core parameters of a dense decoder, for any tensor-parallel size.

One rule serves loading and exporting: each Hugging Face tensor of an entry is cut along `split_dim` into equal parts,
one per tensor-parallel rank; `fuse` makes of a rank's parts its Megatron parameter, `unfuse` takes it apart again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from instep.models.shape import ModelShape

HEAD = "output_layer.weight"  # Megatron's name of the output layer


class Kind(StrEnum):
    """The layout of an entry over tensor-parallel ranks."""

    REPLICATED = "replicated"
    VOCAB = "vocab"  # rows, padded with zeros to the padded vocabulary
    COLUMNS = "columns"  # split on dim 1
    QKV = "qkv"  # per group of key/value heads: its query heads, k, v
    GATE_UP = "gate_up"  # a rank's gate rows, then its up rows


@dataclass(frozen=True)
class WeightEntry:
    """A Megatron parameter (its name counts layers over all stages) and the Hugging Face tensors that it is made of."""

    megatron: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # full, as in the Hugging Face checkpoint
    kind: Kind
    layer: int | None = None  # None: before or after the layers

    @property
    def split_dim(self) -> int | None:
        return {Kind.REPLICATED: None, Kind.COLUMNS: 1}.get(self.kind, 0)


def weight_entries(shape: ModelShape) -> list[WeightEntry]:
    """Every parameter of the model, in the order of the forward pass. A tied output layer has no entry of its own."""
    hidden, ffn, head_dim = shape.hidden_size, shape.ffn_hidden_size, shape.kv_channels
    q_rows, kv_rows = shape.num_attention_heads * head_dim, shape.num_query_groups * head_dim
    rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
    vocab = (shape.vocab_size, hidden)
    entries = [WeightEntry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (vocab,), Kind.VOCAB)]
    for i in range(shape.num_layers):
        layer: list[tuple[str, Kind, dict[str, tuple[int, ...]]]] = [
            ("input_layernorm.weight", Kind.REPLICATED, {"input_layernorm.weight": (hidden,)}),
            (
                "self_attention.linear_qkv.weight",
                Kind.QKV,
                {f"self_attn.{x}_proj.weight": (n, hidden) for x, n in rows.items()},
            ),
        ]
        if shape.qkv_bias:
            biases: dict[str, tuple[int, ...]] = {f"self_attn.{x}_proj.bias": (n,) for x, n in rows.items()}
            layer.append(("self_attention.linear_qkv.bias", Kind.QKV, biases))
        if shape.qk_norm:
            for x in "qk":
                norm: dict[str, tuple[int, ...]] = {f"self_attn.{x}_norm.weight": (head_dim,)}
                layer.append((f"self_attention.{x}_layernorm.weight", Kind.REPLICATED, norm))
        layer += [
            ("self_attention.linear_proj.weight", Kind.COLUMNS, {"self_attn.o_proj.weight": (hidden, q_rows)}),
            ("pre_mlp_layernorm.weight", Kind.REPLICATED, {"post_attention_layernorm.weight": (hidden,)}),
            (
                "mlp.linear_fc1.weight",
                Kind.GATE_UP,
                {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)},
            ),
            ("mlp.linear_fc2.weight", Kind.COLUMNS, {"mlp.down_proj.weight": (hidden, ffn)}),
        ]
        for name, kind, tensors in layer:
            names = tuple(f"model.layers.{i}.{n}" for n in tensors)
            entries.append(WeightEntry(f"decoder.layers.{i}.{name}", names, tuple(tensors.values()), kind, i))
    entries.append(WeightEntry("decoder.final_layernorm.weight", ("model.norm.weight",), ((hidden,),), Kind.REPLICATED))
    if shape.value_head:
        entries.append(WeightEntry(HEAD, ("lm_head.weight",), ((1, hidden),), Kind.REPLICATED))
    elif not shape.tied:
        entries.append(WeightEntry(HEAD, ("lm_head.weight",), (vocab,), Kind.VOCAB))
    return entries


def part_range(entry: WeightEntry, index: int, rank: int, size: int, padded_vocab: int) -> tuple[int, int]:
    """[start, stop) along `split_dim` of rank `rank`'s part of tensor `index`; cut off at the real vocabulary."""
    assert entry.split_dim is not None
    full = entry.shapes[index][entry.split_dim]
    step = (padded_vocab if entry.kind is Kind.VOCAB else full) // size
    return min(rank * step, full), min((rank + 1) * step, full)


def fuse(entry: WeightEntry, parts: Sequence[Tensor], shape: ModelShape, rows: int) -> Tensor:
    """One rank's Megatron parameter from its parts, in the order of `entry.names`; `rows` is its size in dim 0."""
    if entry.kind is Kind.QKV:
        groups = parts[1].shape[0] // shape.kv_channels
        return torch.cat([p.reshape(groups, -1, *p.shape[1:]) for p in parts], dim=1).flatten(0, 1)
    if entry.kind is Kind.GATE_UP:
        return torch.cat(list(parts))
    if entry.kind is Kind.VOCAB and parts[0].shape[0] < rows:
        return torch.nn.functional.pad(parts[0], (0, 0, 0, rows - parts[0].shape[0]))
    return parts[0]


def unfuse(entry: WeightEntry, local: Tensor, shape: ModelShape) -> list[Tensor]:
    """A rank's parts from its Megatron parameter: the inverse of `fuse`, but for the padded rows."""
    if entry.kind is Kind.QKV:
        per_group = shape.num_attention_heads // shape.num_query_groups
        sizes = [per_group * shape.kv_channels, shape.kv_channels, shape.kv_channels]
        grouped = local.view(-1, sum(sizes), *local.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]
    if entry.kind is Kind.GATE_UP:
        return list(local.chunk(2))
    return [local]


def join(entry: WeightEntry, locals_: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    """The full Hugging Face tensors from all tensor-parallel ranks' parameters (of a replicated one: from any)."""
    per_rank = [unfuse(entry, local, shape) for local in locals_]
    full = []
    for index, want in enumerate(entry.shapes):
        parts = [parts[index] for parts in per_rank]
        whole = len(parts) == 1 or entry.split_dim is None
        tensor = parts[0] if whole else torch.cat(parts, dim=entry.split_dim)
        full.append(tensor[: want[0]].contiguous())
    return full
