"""The shape of a decoder, read from its Hugging Face configuration; unsupported models are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from instep.errors import ConfigError
from instep.models.mtp import num_mtp_layers
from instep.models.rope import rope_by_layer


@dataclass(frozen=True)
class Family:
    """The differences between model families, except for the numbers of `ModelShape`.

    Attributes:
        latent: multi-head latent attention (`LatentAttention`), with norms on both latents.
        sigmoid: experts are chosen by sigmoids with a bias, not by a softmax (`Experts`).
        delta: most layers have a gated delta net (`DeltaNet`). Attention has an output gate and partial rotary
            positions, norms add 1 to their weights, and shared experts have a gate.
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    experts: bool = False
    latent: bool = False
    sigmoid: bool = False
    delta: bool = False


FAMILIES = {
    "qwen3": Family(qk_norm=True),
    "qwen2": Family(qkv_bias=True),
    "llama": Family(),
    "qwen3_moe": Family(qk_norm=True, experts=True),
    "deepseek_v3": Family(experts=True, latent=True, sigmoid=True),
    "qwen3_next": Family(qk_norm=True, experts=True, delta=True),
    "qwen3_5_text": Family(qk_norm=True, delta=True),
    "qwen3_5_moe_text": Family(qk_norm=True, experts=True, delta=True),
}
KNOWN = f"give one of {', '.join(FAMILIES)}"
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that replaces the MLP in some layers, without capacity limits.

    Attributes:
        num_active: number of experts of a token.
        ffn_hidden_size: of each expert.
        normalized: whether the weights of a token's experts sum to 1 before `scale`.
        layers: the layers that have experts; the others are dense.
        sigmoid: scores are sigmoids, and the choice adds a bias of each expert to them (DeepSeek-AI 2024, arXiv
            2412.19437, section 2.1.2); otherwise a softmax.
        num_groups, num_active_groups: a token's experts are all in its best groups; a group is ranked by its two best
            experts.
        scale: factor of the weights.
        shared_ffn_hidden_size: total width of the experts that every token uses; 0 without such experts.
        shared_gate: whether a sigmoid multiplies their output; each token has its own.
    """

    num: int
    num_active: int
    ffn_hidden_size: int
    normalized: bool
    layers: tuple[int, ...]
    sigmoid: bool = False
    num_groups: int = 1
    num_active_groups: int = 1
    scale: float = 1.0
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False


EXPERTS = "experts"  # in --lora-target-modules: all routed experts
KV_B = "kv_b_proj"  # of latent attention: vLLM computes with its loaded weight and supports no adapter on it


@dataclass(frozen=True)
class LatentAttention:
    """Attention whose queries, keys and values come from latent vectors (arXiv 2412.19437, section 2.1.1).

    Attributes:
        q_rank, kv_rank: widths of the latent vectors; without `q_rank`, queries come from the hidden states.
        content_dim, rotary_dim: the two parts of a head of queries and keys; keys share the rotary one.
        value_dim: the width of a head's values.
    """

    q_rank: int | None
    kv_rank: int
    content_dim: int
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta nets (Yang et al. 2024, arXiv 2412.06464), which replace attention in some layers.

    Attributes:
        key_heads, value_heads: each key head has value_heads / key_heads value heads.
        conv_width: tokens of the causal convolution of queries, keys and values.
        layers: the layers that have one; the others have attention.
        by_head: checkpoints hold two projections, ordered by key head (Qwen3-Next), not one of each kind (Qwen3.5).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    layers: tuple[int, ...]
    by_head: bool

    @property
    def keys(self) -> int:
        """The width of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def projections(self) -> dict[str, int]:
        """The rows of each projection of the hidden states, by the last part of its name."""
        mixed, heads = 2 * self.keys + self.values, self.value_heads
        rows = {"qkv": mixed, "z": self.values, "b": heads, "a": heads}
        if self.by_head:
            rows = {"qkvz": mixed + self.values, "ba": 2 * heads}
        return {f"in_proj_{name}": n for name, n in rows.items()}


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a decoder with rotary positions, RMS norms and a SwiGLU; names as in Megatron-Core."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    rope: dict[str, Any]  # Hugging Face's rope_parameters; has rope_type and rope_theta
    experts: Experts | None = None
    value_head: bool = False  # a critic: the output layer has one row, on every tensor-parallel rank
    latent: LatentAttention | None = None
    num_mtp_layers: int = 0  # of multi-token prediction, in checkpoints
    delta: DeltaNet | None = None
    mtp: int = 0  # those of them that the model has: all or 0

    @property
    def rotary_dim(self) -> int:
        if self.latent:
            return self.latent.rotary_dim
        return int(self.kv_channels * self.rope.get("partial_rotary_factor", 1.0))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that a run of Megatron and its checkpoints have under the same names."""
        names = "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels"
        return {name: getattr(self, name) for name in names.split()}

    def as_critic(self) -> ModelShape:
        """Return the same transformer with a value head."""
        return replace(self, tied=False, value_head=True)

    def with_mtp(self, num: int) -> ModelShape:
        """Return the same transformer with its `num` layers of multi-token prediction.

        Raises:
            ConfigError: its checkpoints have another number of them.
        """
        if problem := self.not_with_mtp(num):
            remedy = "give the number of config.json, or remove the flag"
            raise ConfigError(problem, where=f"--mtp-num-layers {num}", remedy=remedy)
        return replace(self, mtp=num)

    def not_with_mtp(self, num: int) -> str:
        """Return why the model cannot have `num` layers of multi-token prediction, as text; empty if it can."""
        if num and num != self.num_mtp_layers:
            return f"checkpoints of this model have {self.num_mtp_layers} layers of multi-token prediction"
        shared = num > 1 and self.delta is not None
        return "layers of multi-token prediction that share a projection (only one layer)" if shared else ""


def model_shape(hf_config: Any) -> ModelShape:
    """Return the shape of `hf_config` (a transformers 5 `PreTrainedConfig`).

    Raises:
        ConfigError: a family that is not in `FAMILIES`, or options that the Megatron model does not have, all at once.
    """
    c = hf_config.to_dict()
    why, family = unsupported(c), FAMILIES.get(hf_config.model_type, Family())
    experts = None if why else _experts(c, family)
    if why := why or _listed(_unsupported_experts(c, experts)):
        what = f"the megatron train backend {why}"
        raise ConfigError(what, where="--hf-checkpoint, config.json", remedy=f"use --train-backend hf; or {KNOWN}")
    return _shape(c, family)


_COUNTS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


def shape_in_file(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape in a config.json. Return None if Megatron cannot train the model, if an entry is missing (then
    transformers has a default), or if a number is invalid (the check of the checkpoint names it)."""
    family = FAMILIES.get(config.get("model_type", ""))
    try:
        counts = (*_COUNTS, "intermediate_size" if "intermediate_size" in config else "moe_intermediate_size")
        if family is None or unsupported(config) or any(type(config[n]) is not int or config[n] < 1 for n in counts):
            return None
        rope = {} if rope_by_layer(config) else {"rope_parameters": {"rope_type": "default"}}
        return _shape({**config, **rope}, family)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _shape(c: dict[str, Any], family: Family) -> ModelShape:
    rope, latent = next(iter(rope_by_layer(c).values())), _latent(c) if family.latent else None
    return ModelShape(
        num_layers=c["num_hidden_layers"],
        hidden_size=c["hidden_size"],
        ffn_hidden_size=c["intermediate_size"] if "intermediate_size" in c else c["moe_intermediate_size"],
        num_attention_heads=c["num_attention_heads"],
        num_query_groups=c.get("num_key_value_heads") or c["num_attention_heads"],
        kv_channels=latent.content_dim + latent.rotary_dim if latent else _head_dim(c),
        vocab_size=c["vocab_size"],
        max_position_embeddings=c["max_position_embeddings"],
        norm_epsilon=c["rms_norm_eps"],
        tied=bool(c.get("tie_word_embeddings")),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        rope=rope,
        experts=_experts(c, family),
        latent=latent,
        num_mtp_layers=num_mtp_layers(c, family.delta) if family.latent or family.delta else 0,
        delta=delta_net(c) if family.delta else None,
    )


def unsupported(config: Mapping[str, Any]) -> str:
    """Return why Megatron cannot train the model of a config.json (or of its class's `to_dict`), as text after its
    name. Return an empty text if no reason is known, as for a file without a `model_type`."""
    kind, names = config.get("model_type"), config.get("architectures") or []
    if kind is not None and kind not in FAMILIES:
        return f"has no model map for {''.join(map(str, names[:1])) or 'a model'} (model_type {kind!r})"
    found = [key for key in (*NUM_EXPERTS, "moe_num_experts") if isinstance(config.get(key), int) and config[key] > 1]
    if found and not (kind is not None and FAMILIES[kind].experts):
        return f"has no model map for a mixture of experts ({found[0]} {config[found[0]]}) like this"
    return _listed(_unsupported(config)) if kind is not None else ""


def num_experts(config: Mapping[str, Any]) -> int:
    """Return the experts of a layer; 0 for a dense model. Configurations have several names for it."""
    found = next((config[name] for name in NUM_EXPERTS if config.get(name)), 0)
    return found if isinstance(found, int) else 0


def expert_layers(config: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Return the layers that have experts, in a model that has any."""
    layers = range(config["num_hidden_layers"])
    if family.sigmoid:
        return tuple(layers[config.get("first_k_dense_replace") or 0 :])
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return tuple(i for i in layers if i not in dense and (i + 1) % every == 0)


def _head_dim(c: dict[str, Any]) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def _experts(c: dict[str, Any], family: Family) -> Experts | None:
    if not (num := num_experts(c)):
        return None
    normalized = bool(c.get("norm_topk_prob", True) if family.delta else c["norm_topk_prob"])
    width, layers = c["moe_intermediate_size"], expert_layers(c, family)
    plain = Experts(num, c["num_experts_per_tok"], width, normalized, layers)
    if family.delta:
        return replace(plain, shared_ffn_hidden_size=c["shared_expert_intermediate_size"], shared_gate=True)
    if not family.sigmoid:
        return plain
    groups, active = c.get("n_group") or 1, c.get("topk_group") or 1
    return replace(
        plain,
        sigmoid=True,
        num_groups=groups if active < groups else 1,
        num_active_groups=active if active < groups else 1,
        scale=c["routed_scaling_factor"],
        shared_ffn_hidden_size=width * (c.get("n_shared_experts") or 0),
    )


def _latent(c: dict[str, Any]) -> LatentAttention:
    return LatentAttention(
        q_rank=c.get("q_lora_rank"),
        kv_rank=c["kv_lora_rank"],
        content_dim=c["qk_nope_head_dim"],
        rotary_dim=c["qk_rope_head_dim"],
        value_dim=c["v_head_dim"],
    )


def delta_net(c: Mapping[str, Any]) -> DeltaNet:
    """Return the gated delta nets of a config.json with all entries of transformers' class."""
    kinds = c.get("layer_types") or attention_pattern(c)
    return DeltaNet(
        key_heads=c["linear_num_key_heads"],
        value_heads=c["linear_num_value_heads"],
        key_dim=c["linear_key_head_dim"],
        value_dim=c["linear_value_head_dim"],
        conv_width=c["linear_conv_kernel_dim"],
        layers=tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention"),
        by_head=c["model_type"] == "qwen3_next",
    )


def attention_pattern(c: Mapping[str, Any]) -> list[str]:
    """Return the layer types of a hybrid model whose config.json has only their interval, 4 by default."""
    every = c.get("full_attention_interval") or 4
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(c["num_hidden_layers"])]


def _unsupported_experts(c: dict[str, Any], experts: Experts | None) -> list[str]:
    """Return options that transformers does not compute, and those that Megatron computes differently."""
    if experts is None or not experts.sigmoid:
        return []
    said = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    problems = [f"{key}={c[key]!r} (only {only!r})" for key, only in said.items() if c.get(key, only) != only]
    if experts.num_groups > 1 and experts.num_active // experts.num_active_groups != 2:
        active, groups = experts.num_active, experts.num_active_groups
        problems.append(
            f"{active} experts of a token from {groups} groups (only two of each: Megatron ranks groups so)"
        )
    return problems


def _listed(problems: list[str]) -> str:
    return f"does not support {'; '.join(problems)}" if problems else ""


def _unsupported(c: Mapping[str, Any]) -> list[str]:
    problems, ropes = [], rope_by_layer(c)
    rope = next(iter(ropes.values()), {"rope_type": "default"})
    if len(ropes) > 1:
        problems.append(f"rope_parameters by layer type ({', '.join(map(str, ropes))})")
    if c.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act={c['hidden_act']!r} (only silu)")
    problems += [f"{key}=true" for key in ("attention_bias", "mlp_bias", "use_sliding_window") if c.get(key)]
    if c.get("attention_dropout"):
        problems.append(f"attention_dropout={c['attention_dropout']} (log-probs would change between passes)")
    delta = FAMILIES[c["model_type"]].delta
    if set(c.get("layer_types") or ()) - {"full_attention", *(["linear_attention"] if delta else [])}:
        problems.append(f"layer_types {sorted(set(c['layer_types']))} (only full_attention)")
    if rope["rope_type"] not in ROPE_TYPES:
        problems.append(f"rope_type={rope['rope_type']!r} (only {', '.join(ROPE_TYPES)})")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and not delta:
        problems.append(f"partial_rotary_factor={rope['partial_rotary_factor']}")
    return problems
