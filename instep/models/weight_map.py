"""Hugging Face weights <-> Megatron-Core parameters of a decoder, for any tensor-parallel size.

One rule is used for loading and exporting. Each Hugging Face tensor of an entry is cut along `split_dim` into equal
parts, one per tensor-parallel rank. `fuse` makes a rank's Megatron parameter from its parts; `unfuse` is the inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from instep.models.shape import LatentAttention, ModelShape

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"  # Megatron's name of the output layer
EXPERT_BIAS = "expert_bias"  # of a router: it is added to the scores for the choice of experts


class Kind(StrEnum):
    """The layout of an entry over tensor-parallel ranks."""

    REPLICATED = "replicated"
    VOCAB = "vocab"  # rows, padded with zeros to the padded vocabulary
    ROWS = "rows"  # split on dim 0
    COLUMNS = "columns"  # split on dim 1
    QKV = "qkv"  # per group of key/value heads: its query heads, k, v
    GATE_UP = "gate_up"  # a rank's gate rows, then its up rows


@dataclass(frozen=True)
class WeightEntry:
    """A Megatron parameter (its name counts layers over all stages, and experts over all ranks) and its Hugging Face
    tensors. Parameters of an expert are split over expert-tensor-parallel ranks.

    Attributes:
        keep_fp32: the tensors are float32 in any model: a buffer that no gradient changes.
    """

    megatron: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # full, as in the Hugging Face checkpoint
    kind: Kind
    layer: int | None = None  # None: before or after the layers
    expert: int | None = None
    keep_fp32: bool = False

    @property
    def split_dim(self) -> int | None:
        return {Kind.REPLICATED: None, Kind.COLUMNS: 1}.get(self.kind, 0)


Part = tuple[str, Kind, dict[str, tuple[int, ...]]]  # of a layer: Megatron's name, layout, Hugging Face's tensors


def weight_entries(shape: ModelShape) -> list[WeightEntry]:
    """Return every parameter of the model, in the order of the forward pass. A tied output layer has no separate
    entry."""
    hidden = shape.hidden_size
    vocab = (shape.vocab_size, hidden)
    entries = [WeightEntry(EMBEDDING, ("model.embed_tokens.weight",), (vocab,), Kind.VOCAB)]
    for i in range(shape.num_layers):
        layer: list[Part] = [("input_layernorm.weight", Kind.REPLICATED, {"input_layernorm.weight": (hidden,)})]
        layer += _attention(shape) if shape.latent is None else _latent_attention(shape, shape.latent)
        layer.append(("pre_mlp_layernorm.weight", Kind.REPLICATED, {"post_attention_layernorm.weight": (hidden,)}))
        experts = shape.experts if shape.experts and i in shape.experts.layers else None
        if experts is None:
            layer += _mlp("mlp", "mlp", hidden, shape.ffn_hidden_size)
        else:
            layer.append(("mlp.router.weight", Kind.REPLICATED, {"mlp.gate.weight": (experts.num, hidden)}))
            if experts.sigmoid:
                bias: dict[str, tuple[int, ...]] = {"mlp.gate.e_score_correction_bias": (experts.num,)}
                layer.append((f"mlp.router.{EXPERT_BIAS}", Kind.REPLICATED, bias))
            if width := experts.shared_ffn_hidden_size:
                layer += _mlp("mlp.shared_experts", "mlp.shared_experts", hidden, width)
        entries += [_entry(i, *part) for part in layer]
        if experts is not None:
            for e in range(experts.num):
                parts = _mlp(f"mlp.experts.local_experts.{e}", f"mlp.experts.{e}", hidden, experts.ffn_hidden_size)
                entries += [_entry(i, *part, e) for part in parts]
    entries.append(WeightEntry("decoder.final_layernorm.weight", ("model.norm.weight",), ((hidden,),), Kind.REPLICATED))
    if shape.value_head:
        entries.append(WeightEntry(HEAD, ("lm_head.weight",), ((1, hidden),), Kind.REPLICATED))
    elif not shape.tied:
        entries.append(WeightEntry(HEAD, ("lm_head.weight",), (vocab,), Kind.VOCAB))
    return entries


def _attention(shape: ModelShape) -> list[Part]:
    hidden, head_dim = shape.hidden_size, shape.kv_channels
    q_rows, kv_rows = shape.num_attention_heads * head_dim, shape.num_query_groups * head_dim
    rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
    weights: dict[str, tuple[int, ...]] = {f"self_attn.{x}_proj.weight": (n, hidden) for x, n in rows.items()}
    layer: list[Part] = [("self_attention.linear_qkv.weight", Kind.QKV, weights)]
    if shape.qkv_bias:
        biases: dict[str, tuple[int, ...]] = {f"self_attn.{x}_proj.bias": (n,) for x, n in rows.items()}
        layer.append(("self_attention.linear_qkv.bias", Kind.QKV, biases))
    if shape.qk_norm:
        for x in "qk":
            norm: dict[str, tuple[int, ...]] = {f"self_attn.{x}_norm.weight": (head_dim,)}
            layer.append((f"self_attention.{x}_layernorm.weight", Kind.REPLICATED, norm))
    layer.append(("self_attention.linear_proj.weight", Kind.COLUMNS, {"self_attn.o_proj.weight": (hidden, q_rows)}))
    return layer


def _latent_attention(shape: ModelShape, a: LatentAttention) -> list[Part]:
    hidden, heads, same = shape.hidden_size, shape.num_attention_heads, Kind.REPLICATED
    q_rows, kv_rows = heads * shape.kv_channels, heads * (a.content_dim + a.value_dim)
    named: list[tuple[str, Kind, str, tuple[int, ...]]] = [("linear_q_proj", Kind.ROWS, "q_proj", (q_rows, hidden))]
    if a.q_rank is not None:
        named = [
            ("linear_q_down_proj", same, "q_a_proj", (a.q_rank, hidden)),
            ("q_layernorm", same, "q_a_layernorm", (a.q_rank,)),
            ("linear_q_up_proj", Kind.ROWS, "q_b_proj", (q_rows, a.q_rank)),
        ]
    named += [
        ("linear_kv_down_proj", same, "kv_a_proj_with_mqa", (a.kv_rank + a.rotary_dim, hidden)),
        ("kv_layernorm", same, "kv_a_layernorm", (a.kv_rank,)),
        ("linear_kv_up_proj", Kind.ROWS, "kv_b_proj", (kv_rows, a.kv_rank)),
        ("linear_proj", Kind.COLUMNS, "o_proj", (hidden, heads * a.value_dim)),
    ]
    return [(f"self_attention.{m}.weight", kind, {f"self_attn.{n}.weight": size}) for m, kind, n, size in named]


def _mlp(megatron: str, name: str, hidden: int, ffn: int) -> list[Part]:
    rows: dict[str, tuple[int, ...]] = {f"{name}.{x}_proj.weight": (ffn, hidden) for x in ("gate", "up")}
    return [
        (f"{megatron}.linear_fc1.weight", Kind.GATE_UP, rows),
        (f"{megatron}.linear_fc2.weight", Kind.COLUMNS, {f"{name}.down_proj.weight": (hidden, ffn)}),
    ]


def _entry(
    layer: int, name: str, kind: Kind, tensors: dict[str, tuple[int, ...]], expert: int | None = None
) -> WeightEntry:
    names = tuple(f"model.layers.{layer}.{n}" for n in tensors)
    megatron, shapes = f"decoder.layers.{layer}.{name}", tuple(tensors.values())
    return WeightEntry(megatron, names, shapes, kind, layer, expert, keep_fp32=name.endswith(EXPERT_BIAS))


def part_range(entry: WeightEntry, index: int, rank: int, size: int, padded_vocab: int) -> tuple[int, int]:
    """Return [start, stop) along `split_dim` of rank `rank`'s part of tensor `index`, without padding of the
    vocabulary."""
    assert entry.split_dim is not None
    full = entry.shapes[index][entry.split_dim]
    step = (padded_vocab if entry.kind is Kind.VOCAB else full) // size
    return min(rank * step, full), min((rank + 1) * step, full)


def fuse(entry: WeightEntry, parts: Sequence[Tensor], shape: ModelShape, rows: int) -> Tensor:
    """Return a rank's Megatron parameter from its parts, in the order of `entry.names`; `rows` is its size in dim 0."""
    stacked = pieces(entry, parts, shape, rows)
    return torch.cat(stacked) if len(stacked) > 1 else stacked[0]


def pieces(entry: WeightEntry, parts: Sequence[Tensor], shape: ModelShape, rows: int) -> list[Tensor]:
    """Return what `fuse` stacks on dim 0: the parts, or views of them, and the padding rows."""
    if entry.kind is Kind.QKV:
        groups = parts[1].shape[0] // shape.kv_channels
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return [part[group] for group in range(groups) for part in grouped]
    if entry.kind is Kind.VOCAB and (missing := rows - parts[0].shape[0]) > 0:
        return [parts[0], parts[0].new_zeros(missing, *parts[0].shape[1:])]
    return list(parts)


def unfuse(entry: WeightEntry, local: Tensor, shape: ModelShape) -> list[Tensor]:
    """Return a rank's parts from its Megatron parameter: the inverse of `fuse`, without the padding rows."""
    if entry.kind is Kind.QKV:
        per_group = shape.num_attention_heads // shape.num_query_groups
        sizes = [per_group * shape.kv_channels, shape.kv_channels, shape.kv_channels]
        grouped = local.view(-1, sum(sizes), *local.shape[1:])
        return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]
    if entry.kind is Kind.GATE_UP:
        return list(local.chunk(2))
    return [local]


def join(entry: WeightEntry, locals_: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    """Return the full Hugging Face tensors from all tensor-parallel ranks' parameters (a replicated one: from any
    rank)."""
    per_rank = [unfuse(entry, local, shape) for local in locals_]
    full = []
    for index, want in enumerate(entry.shapes):
        parts = [parts[index] for parts in per_rank]
        whole = len(parts) == 1 or entry.split_dim is None
        tensor = parts[0] if whole else torch.cat(parts, dim=entry.split_dim)
        full.append(tensor[: want[0]].contiguous())
    return full
