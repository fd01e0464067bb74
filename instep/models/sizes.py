"""The numbers of a model that decide its memory and its time: from config.json and the headers of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from instep.models.config_file import read_config
from instep.models.files import safetensors_header, tensor_files
from instep.models.mtp import mtp_names
from instep.models.shape import EXPERTS, FAMILIES, DeltaNet, delta_net, expert_layers, num_experts

_WHOLE = {"F64", "F32", "F16", "BF16"}  # types of weights that are not packed


@dataclass(frozen=True)
class Shape:
    """A decoder.

    Attributes:
        ffn: width of the feed-forward part that a token uses, all its experts together; the mean over layers if some
            have no experts.
        layer: parameters of a layer, the mean.
        total: parameters of the model; a tied output layer counts once.
        used: parameters that a token is multiplied with: with the output layer, without the input embedding.
        experts: the part of `total` in experts; 0 in a dense model.
        routed: experts per token in a layer, the mean; 0 in a dense model.
        routed_ffn: the part of `ffn` in routed experts.
        delta: linear attention of some layers; the others have `heads` and `kv_heads`.
        cached: numbers (not bytes) that an engine caches per token and layer on every rank, with latent attention; 0 if
            it caches keys and values. `kv_heads` and `head_dim` are those of the trainer.
        mtp: layers of multi-token prediction among `num_layers`.
    """

    num_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qk_norm: bool
    layer: int
    total: int
    used: int
    context: int
    experts: int = 0
    value_head: bool = False
    cached: int = 0
    routed: float = 0.0
    routed_ffn: float = 0.0
    delta: DeltaNet | None = None
    mtp: int = 0

    @property
    def attending(self) -> int:
        """The number of layers with attention to all earlier tokens."""
        return self.num_layers - (len(self.delta.layers) if self.delta else 0)

    @property
    def state(self) -> int:
        """Numbers that an engine keeps per request, whatever its length: the states of linear attention."""
        d = self.delta
        window = 0 if d is None else (d.conv_width - 1) * (2 * d.keys + d.values)
        return 0 if d is None else len(d.layers) * (d.key_dim * d.values + window)

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def outside(self) -> int:
        """Parameters outside of the layers."""
        return self.total - self.num_layers * self.layer

    def flops(self, length: int) -> float:
        """Return the FLOPs of the forward pass over a sequence, with logits of all tokens; a backward pass has twice as
        many. Those of linear attention's states, some percent, are left out."""
        return 2.0 * self.used * length + 2.0 * self.attending * self.queries * length**2

    def factors(self, targets: Sequence[str] | None, tp: int = 1, expert_pieces: int = 1) -> float:
        """Return the number of parameters in A and B on one process, per unit of the adapter's rank.

        Args:
            targets: of `--lora-target-modules`.
            tp: the number of ranks that share heads and widths; hidden states are whole on each.
            expert_pieces: the number of ranks that share the experts of a layer.
        """
        hidden, q, k, d = self.hidden, self.queries / tp, self.keys / tp, self.delta
        f = (self.ffn - self.routed_ffn) / tp  # of dense layers and shared experts
        of_query = 2 * q if d else q  # with the output gate
        attention = {"q_proj": hidden + of_query, "k_proj": hidden + k, "v_proj": hidden + k, "o_proj": q + hidden}
        mlp = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + f) if f else {}
        layers = [(self.attending, attention), (self.num_layers, mlp)]
        if d:
            mlp |= {"shared_expert_gate": hidden + 1} if self.experts else {}
            net = {name: hidden + rows / tp for name, rows in d.projections.items()}
            layers.append((len(d.layers), net | {"out_proj": d.values / tp + hidden}))
        known = {name for _, sizes in layers for name in sizes}
        names = {name.rpartition(".")[2] for name in targets or known}
        found = sum(num * sizes[name] for num, sizes in layers for name in names & sizes.keys())
        # Other projections, of latent attention or of other families, are about as large as a query's.
        found += len(names - known - {EXPERTS}) * self.num_layers * (hidden + q)
        if EXPERTS in names and self.routed:  # matrices of hidden x (routed_ffn / routed)
            found += self.experts * (1 / hidden + self.routed / self.routed_ffn) / expert_pieces
        return found

    def as_critic(self) -> Shape:
        """Return the same decoder with a value head."""
        total = self.total - (0 if self.tied else self.embedding) + self.hidden
        return replace(self, tied=False, total=total, used=self.used - self.embedding, value_head=True)

    def with_mtp(self, num: int) -> Shape:
        """Return the same decoder with `num` layers of multi-token prediction: a mean layer, a projection, three norms,
        and one more use of the output layer."""
        layer, around = self.num_layers, 2 * self.hidden**2 + 3 * self.hidden
        used = (self.used - self.embedding) // layer + around + self.embedding
        return replace(
            self,
            num_layers=layer + num,
            total=self.total + num * (self.layer + around),
            used=self.used + num * used,
            experts=self.experts + num * (self.experts // layer),
            mtp=num,
        )


@lru_cache(maxsize=16)
def shape_of(folder: str | None) -> Shape | None:
    """Return the shape of the model in a Hugging Face folder; None if config.json is missing or describes no decoder.

    Parameters are counted in the headers of the safetensors files, which takes milliseconds. Without these files, and
    with packed or additional weights (quantized or multimodal models), they follow from config.json.
    """
    if folder is None:
        return None
    try:
        config = read_config(folder)
    except (OSError, ValueError):
        return None
    shape = shape_in(config)
    if shape is None:
        return None
    counted = None if "text_config" in config else _counted(Path(folder), shape)
    if counted is None:
        return shape
    total, experts = counted
    layer = (total - shape.outside) // shape.num_layers
    used = shape.used + (layer - shape.layer) * shape.num_layers
    return replace(shape, layer=layer, total=total, used=used, experts=experts)


@lru_cache(maxsize=16)
def quantized_bytes(folder: str | None) -> int | None:
    """Return the bytes of the weights of a quantized checkpoint; None for other models, or without its files."""
    if folder is None:
        return None
    try:
        files = tensor_files(Path(folder)) if "quantization_config" in read_config(folder) else []
        return sum(file.stat().st_size for file in files) or None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def shape_in(config: Mapping[str, Any]) -> Shape | None:
    """Return the shape that a config.json describes; None unless it describes a decoder."""
    try:
        return _of_config(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _of_config(config: Mapping[str, Any]) -> Shape:
    hidden, layers, vocab = (int(config[k]) for k in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads = int(config["num_attention_heads"])
    kv_heads, head_dim = int(config.get("num_key_value_heads") or heads), int(config.get("head_dim") or hidden // heads)
    experts, name = num_experts(config), str(config.get("model_type", ""))
    chosen = int(config.get("num_experts_per_tok") or 1) if experts > 1 else 1
    ffn = int((config.get("moe_intermediate_size") if experts > 1 else None) or config["intermediate_size"])
    family = FAMILIES.get(name) or FAMILIES.get(name.removesuffix("_moe"))
    tied = bool(config.get("tie_word_embeddings"))
    queries, keys = heads * head_dim, kv_heads * head_dim
    qk_norm = family is not None and family.qk_norm
    small = 2 * hidden + 2 * head_dim * qk_norm
    small += queries + 2 * keys if family is not None and family.qkv_bias else 0
    attention, cached = 2 * hidden * (queries + keys), 0
    if kv_rank := int(config.get("kv_lora_rank") or 0):
        attention, kv_heads = _latent_attention(config, hidden, heads, kv_rank), heads
        head_dim = int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
        cached = kv_rank + int(config["qk_rope_head_dim"])
    router = (hidden + bool(family and family.sigmoid)) * experts if experts > 1 else 0
    dense = min(layers, int(config.get("first_k_dense_replace") or 0)) if experts > 1 else 0
    if family is not None and family.experts and experts > 1:
        dense = layers - len(expert_layers(config, family))
    shared = ffn * int(config.get("n_shared_experts") or 0) if experts > 1 else 0
    mixed, dense_width = layers - dense, int(config.get("intermediate_size") or ffn)
    attentions, delta = layers * attention, delta_net(config) if family is not None and family.delta else None
    if delta is not None:
        attentions, small = _hybrid(hidden, queries, keys, head_dim, layers, delta), 2 * hidden
    if delta is not None and experts > 1:
        shared, router = int(config["shared_expert_intermediate_size"]), router + hidden  # and its gate
    around = attentions + layers * small + mixed * router + 3 * hidden * (dense * dense_width + mixed * shared)
    in_experts = mixed * 3 * hidden * ffn * max(1, experts)
    total = around + in_experts + vocab * hidden * (1 if tied else 2) + hidden
    used = around + mixed * 3 * hidden * ffn * chosen + vocab * hidden + hidden
    width = (dense * dense_width + mixed * (shared + ffn * chosen)) // layers
    return Shape(
        layers, hidden, width, heads, kv_heads, head_dim, vocab, tied, qk_norm, (around + in_experts) // layers, total,
        used, int(config.get("max_position_embeddings") or 2**17), in_experts if experts > 1 else 0, cached=cached,
        routed=mixed * chosen / layers if experts > 1 else 0.0,
        routed_ffn=mixed * chosen * ffn / layers if experts > 1 else 0.0, delta=delta,
    )  # fmt: skip


def _hybrid(hidden: int, queries: int, keys: int, head_dim: int, layers: int, d: DeltaNet) -> int:
    """Return the parameters of attention, with output gates and norms of heads, and of delta nets in all layers."""
    attention = hidden * (3 * queries + 2 * keys) + 2 * head_dim
    mixed = 2 * d.keys + d.values
    delta = hidden * (mixed + 2 * d.values + 2 * d.value_heads) + mixed * d.conv_width + 2 * d.value_heads + d.value_dim
    return (layers - len(d.layers)) * attention + len(d.layers) * delta


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int, kv_rank: int) -> int:
    """Return the parameters of latent attention in a layer, with the norms of its latent vectors."""
    content, rotary, value = (int(config[k]) for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q_rank, rows = int(config.get("q_lora_rank") or 0), heads * (content + rotary)
    queries = q_rank * (hidden + 1 + rows) if q_rank else hidden * rows
    return queries + hidden * (kv_rank + rotary) + kv_rank * (1 + heads * (content + value)) + heads * value * hidden


def _counted(folder: Path, shape: Shape) -> tuple[int, int] | None:
    """Count the elements of all tensors in the model's safetensors files, and of experts; None if this is not clear.

    It is not clear for quantized models, without files, and with damaged files, which other checks report. Multi-token
    prediction does not count.
    """
    count = experts = 0
    try:
        for path in tensor_files(folder):
            for name, tensor in safetensors_header(path).items():
                if name == "__metadata__" or mtp_names([name], shape.num_layers, 10**9):
                    continue
                if shape.tied and name == "lm_head.weight":
                    continue
                if tensor["dtype"] not in _WHOLE:
                    return None
                size = prod(tensor["shape"])
                count += size
                experts += size if ".experts." in name else 0
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return (count, experts) if count else None
