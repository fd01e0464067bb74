"""The shape of a dense decoder, read from its Hugging Face configuration; unsupported models are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from instep.errors import ConfigError
from instep.models.rope import rope_by_layer


@dataclass(frozen=True)
class Family:
    """The differences between dense families, apart from the numbers of `ModelShape`."""

    qk_norm: bool = False
    qkv_bias: bool = False


FAMILIES = {"qwen3": Family(qk_norm=True), "qwen2": Family(qkv_bias=True), "llama": Family()}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a dense decoder with rotary positions, RMS norms and a SwiGLU; names as in Megatron-Core."""

    family: str
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
    value_head: bool = False  # a critic: the output layer has one row, on every tensor-parallel rank

    def as_critic(self) -> ModelShape:
        """The same transformer with a value head."""
        return replace(self, tied=False, value_head=True)


def model_shape(hf_config: Any) -> ModelShape:
    """The shape of `hf_config` (a transformers 5 `PreTrainedConfig`).

    Raises:
        ConfigError: a family that is not in `FAMILIES`, or options that the Megatron model does not have, all at once.
    """
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise ConfigError(
            f"the megatron train backend has no model map for model_type {hf_config.model_type!r}",
            where="--hf-checkpoint, config.json",
            remedy=f"use one of {', '.join(FAMILIES)}, or --train-backend hf",
        )
    c = hf_config.to_dict()
    ropes = rope_by_layer(c)
    rope = next(iter(ropes.values()))
    if problems := _unsupported(c, ropes):
        raise ConfigError(
            f"the megatron train backend does not support {'; '.join(problems)}",
            where="--hf-checkpoint, config.json",
            remedy="use --train-backend hf",
        )
    return ModelShape(
        family=hf_config.model_type,
        num_layers=c["num_hidden_layers"],
        hidden_size=c["hidden_size"],
        ffn_hidden_size=c["intermediate_size"],
        num_attention_heads=c["num_attention_heads"],
        num_query_groups=c.get("num_key_value_heads") or c["num_attention_heads"],
        kv_channels=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        vocab_size=c["vocab_size"],
        max_position_embeddings=c["max_position_embeddings"],
        norm_epsilon=c["rms_norm_eps"],
        tied=bool(c.get("tie_word_embeddings")),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        rope=rope,
    )


def _unsupported(c: dict[str, Any], ropes: Mapping[str | None, dict[str, Any]]) -> list[str]:
    problems, rope = [], next(iter(ropes.values()))
    if len(ropes) > 1:
        problems.append(f"rope_parameters by layer type ({', '.join(map(str, ropes))})")
    if c["hidden_act"] != "silu":
        problems.append(f"hidden_act={c['hidden_act']!r} (only silu)")
    problems += [f"{key}=true" for key in ("attention_bias", "mlp_bias", "use_sliding_window") if c.get(key)]
    if c.get("attention_dropout"):
        problems.append(f"attention_dropout={c['attention_dropout']} (log-probs would not be repeatable)")
    if set(c.get("layer_types") or ()) - {"full_attention"}:
        problems.append(f"layer_types {sorted(set(c['layer_types']))} (only full_attention)")
    if rope["rope_type"] not in ROPE_TYPES:
        problems.append(f"rope_type={rope['rope_type']!r} (only {', '.join(ROPE_TYPES)})")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor={rope['partial_rotary_factor']}")
    return problems
