"""Hugging Face weights <-> Megatron-Core parameters of a decoder, for any tensor-parallel size.

One rule is used for loading and exporting. Each Hugging Face tensor of an entry is cut along `split_dim` into equal
parts, one per tensor-parallel rank; in a tensor with sections, each section is cut. `fuse` makes a rank's Megatron
parameter from its parts; `unfuse` is the inverse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from instep.models.shape import DeltaNet, Experts, LatentAttention, ModelShape

EMBEDDING = "embedding.word_embeddings.weight"
_IN_LAYER = re.compile(r"(?:decoder\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer)\.")
HEAD = "output_layer.weight"  # Megatron's name of the output layer
EXPERT_BIAS = "expert_bias"  # of a router: it is added to the scores for the choice of experts


class Kind(StrEnum):
    """The layout of an entry over tensor-parallel ranks."""

    REPLICATED = "replicated"
    VOCAB = "vocab"  # rows, padded with zeros to the padded vocabulary
    ROWS = "rows"  # split on dim 0
    COLUMNS = "columns"  # split on dim 1
    QKV = "qkv"  # per group of key/value heads: its query heads, their output gates if the model has any, k, v
    DELTA = "delta"  # per key head of a gated delta net: its rows of each section
    GATE_UP = "gate_up"  # a rank's gate rows, then its up rows


@dataclass(frozen=True)
class WeightEntry:
    """A Megatron parameter (its name counts layers over all stages, and experts over all ranks) and its Hugging Face
    tensors. Parameters of an expert are split over expert-tensor-parallel ranks.

    Attributes:
        keep_fp32: the tensors are float32 in any model: a buffer that no gradient changes.
        repeats: another entry has the same parameter; checkpoints may lack these tensors.
        sections: rows of each section of the first tensor; empty if it is one section, as all other tensors are.
    """

    megatron: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # full, as in the Hugging Face checkpoint
    kind: Kind
    layer: int | None = None  # None: before or after the layers
    expert: int | None = None
    keep_fp32: bool = False
    sections: tuple[int, ...] = ()
    repeats: bool = False

    @property
    def tensors(self) -> Tensors:
        """The shapes of the Hugging Face tensors, by name."""
        return dict(zip(self.names, self.shapes, strict=True))

    @property
    def prefix(self) -> str:
        """The start of Megatron's names of all parameters of its transformer layer; empty outside of layers."""
        match = _IN_LAYER.match(self.megatron)
        return match[0] if match else ""

    @property
    def split_dim(self) -> int | None:
        return {Kind.REPLICATED: None, Kind.COLUMNS: 1}.get(self.kind, 0)


Tensors = dict[str, tuple[int, ...]]


class Part(NamedTuple):
    """Of a layer: Megatron's name, the layout, Hugging Face's tensors, and the sections of the first one."""

    megatron: str
    kind: Kind
    tensors: Tensors
    sections: tuple[int, ...] = ()


def weight_entries(shape: ModelShape) -> list[WeightEntry]:
    """Return every parameter in the order of the forward pass. A tied output layer has no separate entry."""
    hidden = shape.hidden_size
    vocab = (shape.vocab_size, hidden)
    entries = [WeightEntry(EMBEDDING, ("model.embed_tokens.weight",), (vocab,), Kind.VOCAB)]
    for i in range(shape.num_layers):
        experts = shape.experts if shape.experts and i in shape.experts.layers else None
        parts = _layer(shape, experts, delta=shape.delta is not None and i in shape.delta.layers)
        names = f"decoder.layers.{i}.", f"model.layers.{i}."
        entries += [_entry(*names, part, expert, layer=i) for part, expert in parts]
    entries.append(WeightEntry("decoder.final_layernorm.weight", ("model.norm.weight",), ((hidden,),), Kind.REPLICATED))
    if shape.value_head:
        entries.append(WeightEntry(HEAD, ("lm_head.weight",), ((1, hidden),), Kind.REPLICATED))
    elif not shape.tied:
        entries.append(WeightEntry(HEAD, ("lm_head.weight",), (vocab,), Kind.VOCAB))
    for i in range(shape.mtp):
        entries += _multi_token_prediction(shape, i)
    return entries


def by_megatron(entries: Iterable[WeightEntry], *, tied: bool) -> dict[str, WeightEntry]:
    """Return the entries by parameter; in a `tied` model the last stage of a pipeline has a copy of the embedding."""
    found = {entry.megatron: entry for entry in entries if not entry.repeats}
    return found | ({HEAD: found[EMBEDDING]} if tied else {})


def _layer(shape: ModelShape, experts: Experts | None, *, delta: bool) -> list[tuple[Part, int | None]]:
    """Return the parts of a layer, each with the number of its expert."""
    hidden = shape.hidden_size
    layer = [Part("input_layernorm.weight", Kind.REPLICATED, {"input_layernorm.weight": (hidden,)})]
    if shape.delta and delta:
        layer += _delta_net(hidden, shape.delta)
    else:
        layer += _attention(shape) if shape.latent is None else _latent_attention(shape, shape.latent)
    layer.append(Part("pre_mlp_layernorm.weight", Kind.REPLICATED, {"post_attention_layernorm.weight": (hidden,)}))
    of_experts: list[tuple[Part, int | None]] = []
    if experts is None:
        layer += _mlp("mlp", "mlp", hidden, shape.ffn_hidden_size)
    else:
        layer += _around_experts(hidden, experts)
        for e in range(experts.num):
            parts = _mlp(f"mlp.experts.local_experts.{e}", f"mlp.experts.{e}", hidden, experts.ffn_hidden_size)
            of_experts += [(part, e) for part in parts]
    return [*((part, None) for part in layer), *of_experts]


def _around_experts(hidden: int, experts: Experts) -> list[Part]:
    """Return the router of a layer, and the experts that all tokens share."""
    layer = [Part("mlp.router.weight", Kind.REPLICATED, {"mlp.gate.weight": (experts.num, hidden)})]
    if experts.sigmoid:
        bias: Tensors = {"mlp.gate.e_score_correction_bias": (experts.num,)}
        layer.append(Part(f"mlp.router.{EXPERT_BIAS}", Kind.REPLICATED, bias))
    if width := experts.shared_ffn_hidden_size:
        name = "mlp.shared_expert" if experts.shared_gate else "mlp.shared_experts"
        layer += _mlp("mlp.shared_experts", name, hidden, width)
    if experts.shared_gate:
        gate: Tensors = {"mlp.shared_expert_gate.weight": (1, hidden)}
        layer.append(Part("mlp.shared_experts.gate_weight", Kind.REPLICATED, gate))
    return layer


def _multi_token_prediction(shape: ModelShape, index: int) -> list[WeightEntry]:
    """Return layer `index` of multi-token prediction: Megatron's names, and those of DeepSeek-V3 or Qwen3-Next.

    DeepSeek-V3 stores it as a layer behind the model's own, with copies of the embedding and of the output layer.
    """
    hidden, megatron = shape.hidden_size, f"mtp.layers.{index}."
    names = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "final_layernorm": "norm",
    }
    around, layer = "mtp.", f"mtp.layers.{index}."
    if shape.latent:
        names |= {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
        around = layer = f"model.layers.{shape.num_layers + index}."
    sizes = {"eh_proj": (hidden, 2 * hidden)}
    parts = [
        Part(f"{m}.weight", Kind.ROWS if m in sizes else Kind.REPLICATED, {f"{hf}.weight": sizes.get(m, (hidden,))})
        for m, hf in names.items()
    ]
    entries = [_entry(megatron, around, part) for part in parts]
    inside = _layer(shape, shape.experts, delta=False)
    entries += [_entry(f"{megatron}transformer_layer.", layer, part, expert) for part, expert in inside]
    vocab = ((shape.vocab_size, hidden),)
    for name, own in (("embed_tokens", EMBEDDING), ("shared_head.head", EMBEDDING if shape.tied else HEAD)):
        if shape.latent:
            entries.append(WeightEntry(own, (f"{layer}{name}.weight",), vocab, Kind.VOCAB, repeats=True))
    return entries


def _attention(shape: ModelShape) -> list[Part]:
    hidden, head_dim = shape.hidden_size, shape.kv_channels
    q_rows, kv_rows = shape.num_attention_heads * head_dim, shape.num_query_groups * head_dim
    rows = {"q": q_rows * (2 if shape.delta else 1), "k": kv_rows, "v": kv_rows}
    weights: Tensors = {f"self_attn.{x}_proj.weight": (n, hidden) for x, n in rows.items()}
    layer = [Part("self_attention.linear_qkv.weight", Kind.QKV, weights)]
    if shape.qkv_bias:
        biases: Tensors = {f"self_attn.{x}_proj.bias": (n,) for x, n in rows.items()}
        layer.append(Part("self_attention.linear_qkv.bias", Kind.QKV, biases))
    if shape.qk_norm:
        for x in "qk":
            norm: Tensors = {f"self_attn.{x}_norm.weight": (head_dim,)}
            layer.append(Part(f"self_attention.{x}_layernorm.weight", Kind.REPLICATED, norm))
    layer.append(Part("self_attention.linear_proj.weight", Kind.COLUMNS, {"self_attn.o_proj.weight": (hidden, q_rows)}))
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
    return [Part(f"self_attention.{m}.weight", kind, {f"self_attn.{n}.weight": size}) for m, kind, n, size in named]


def _delta_net(hidden: int, d: DeltaNet) -> list[Part]:
    heads, mixed = d.value_heads, (d.keys, d.keys, d.values)  # queries, keys, values
    in_proj: Tensors = {f"linear_attn.{name}.weight": (n, hidden) for name, n in d.projections.items()}
    conv: Tensors = {"linear_attn.conv1d.weight": (sum(mixed), 1, d.conv_width)}
    out = Part("self_attention.out_proj.weight", Kind.COLUMNS, {"linear_attn.out_proj.weight": (hidden, d.values)})
    projections = [Part("self_attention.in_heads.weight", Kind.DELTA, in_proj, () if d.by_head else mixed), out]
    return [
        *(projections if d.by_head else reversed(projections)),  # the order of transformers' modules: see `lora.py`
        Part("self_attention.conv_heads.weight", Kind.DELTA, conv, mixed),
        Part("self_attention.dt_bias", Kind.ROWS, {"linear_attn.dt_bias": (heads,)}),
        Part("self_attention.A_log", Kind.ROWS, {"linear_attn.A_log": (heads,)}),
        Part("self_attention.out_norm.weight", Kind.REPLICATED, {"linear_attn.norm.weight": (d.value_dim,)}),
    ]


def _mlp(megatron: str, name: str, hidden: int, ffn: int) -> list[Part]:
    rows: Tensors = {f"{name}.{x}_proj.weight": (ffn, hidden) for x in ("gate", "up")}
    return [
        Part(f"{megatron}.linear_fc1.weight", Kind.GATE_UP, rows),
        Part(f"{megatron}.linear_fc2.weight", Kind.COLUMNS, {f"{name}.down_proj.weight": (hidden, ffn)}),
    ]


def _entry(megatron: str, hf: str, part: Part, expert: int | None = None, *, layer: int | None = None) -> WeightEntry:
    """Return the entry of a part whose names begin with `megatron` and `hf`."""
    names, shapes = tuple(f"{hf}{n}" for n in part.tensors), tuple(part.tensors.values())
    keep_fp32 = part.megatron.endswith(EXPERT_BIAS)
    return WeightEntry(megatron + part.megatron, names, shapes, part.kind, layer, expert, keep_fp32, part.sections)


def part_ranges(entry: WeightEntry, index: int, rank: int, size: int, padded_vocab: int) -> list[tuple[int, int]]:
    """Return [start, stop) along `split_dim` of rank `rank`'s part of each section of tensor `index`, without padding
    of the vocabulary."""
    assert entry.split_dim is not None
    ranges, first = [], 0
    for full in _sections(entry, index):
        step = (padded_vocab if entry.kind is Kind.VOCAB else full) // size
        ranges.append((first + min(rank * step, full), first + min((rank + 1) * step, full)))
        first += full
    return ranges


def _sections(entry: WeightEntry, index: int) -> tuple[int, ...]:
    """Return the sizes of the sections of tensor `index` along `split_dim`."""
    assert entry.split_dim is not None
    return (entry.sections if index == 0 else ()) or (entry.shapes[index][entry.split_dim],)


def _rows(entry: WeightEntry, shape: ModelShape) -> list[list[int]]:
    """Return the rows that a group of heads has of each section, by tensor."""
    groups = shape.delta.key_heads if entry.kind is Kind.DELTA and shape.delta else shape.num_query_groups
    return [[rows // groups for rows in _sections(entry, index)] for index in range(len(entry.names))]


def fuse(entry: WeightEntry, parts: Sequence[Tensor], shape: ModelShape, rows: int) -> Tensor:
    """Return a rank's Megatron parameter from its parts, in the order of `entry.names`; `rows` is its size in dim 0."""
    stacked = pieces(entry, parts, shape, rows)
    return torch.cat(stacked) if len(stacked) > 1 else stacked[0]


def pieces(entry: WeightEntry, parts: Sequence[Tensor], shape: ModelShape, rows: int) -> list[Tensor]:
    """Return what `fuse` stacks on dim 0: the parts, or views of them, and the padding rows."""
    if entry.kind in (Kind.QKV, Kind.DELTA):
        grouped = []
        for part, rows_of_group in zip(parts, _rows(entry, shape), strict=True):
            groups = part.shape[0] // sum(rows_of_group)
            sections = part.split([groups * n for n in rows_of_group])
            grouped += [section.unflatten(0, (groups, -1)) for section in sections]
        if entry.kind is Kind.QKV and shape.delta:  # a head's query and gate are neighbours there
            heads = grouped[0].unflatten(1, (-1, 2, shape.kv_channels))
            grouped[:1] = [heads[:, head, part] for part in range(2) for head in range(heads.shape[1])]
        return [part[group] for group in range(groups) for part in grouped]
    if entry.kind is Kind.VOCAB and (missing := rows - parts[0].shape[0]) > 0:
        return [parts[0], parts[0].new_zeros(missing, *parts[0].shape[1:])]
    return list(parts)


def unfuse(entry: WeightEntry, local: Tensor, shape: ModelShape) -> list[Tensor]:
    """Return a rank's parts from its Megatron parameter: the inverse of `fuse`, without the padding rows."""
    if entry.kind in (Kind.QKV, Kind.DELTA):
        sizes = _rows(entry, shape)
        grouped = local.unflatten(0, (-1, sum(map(sum, sizes))))
        parts: list[Tensor] = []
        for tensor, sections in zip(grouped.split([*map(sum, sizes)], dim=1), sizes, strict=True):
            if entry.kind is Kind.QKV and shape.delta and not parts:
                tensor = tensor.unflatten(1, (2, -1, shape.kv_channels)).transpose(1, 2).flatten(1, 3)
            parts.append(torch.cat([section.flatten(0, 1) for section in tensor.split(sections, dim=1)]))
        return parts
    if entry.kind is Kind.GATE_UP:
        return list(local.chunk(2))
    return [local]


def join(entry: WeightEntry, locals_: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    """Return the full Hugging Face tensors from all tensor-parallel ranks' parameters (replicated: any rank's)."""
    per_rank = [unfuse(entry, local, shape) for local in locals_]
    full = []
    for index, want in enumerate(entry.shapes):
        parts = [parts[index] for parts in per_rank]
        if len(parts) == 1 or entry.split_dim is None:
            tensor = parts[0]
        elif index == 0 and entry.sections:
            cut = [part.split([n // len(parts) for n in entry.sections]) for part in parts]
            tensor = torch.cat([ranks[section] for section in range(len(entry.sections)) for ranks in cut])
        else:
            tensor = torch.cat(parts, dim=entry.split_dim)
        full.append(tensor[: want[0]].contiguous())
    return full
