"""What the megatron backend refuses, told from arguments and checkpoint alone: imports nothing heavy."""

from __future__ import annotations

from typing import Any

from instep.errors import ConfigError
from instep.models.shape import ModelShape

# Parallel sizes that this backend does not have yet.
LATER = (
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
)
# Overrides that would break what this backend promises, and why.
REFUSED_OVERRIDES = {
    "hidden_dropout": "log-probs would not be repeatable",
    "attention_dropout": "log-probs would not be repeatable",
    "overlap_param_gather": "weights would be read before they are gathered",
    "overlap_param_gather_with_optimizer_step": "weights would be read before they are gathered",
    "calculate_per_token_loss": "the loss carries its own denominators",
    "average_in_collective": "gradients are sums",
    "use_megatron_fsdp": "its parameters are laid out differently; use --train-backend fsdp",
    "num_moe_experts": "mixtures of experts come later",
}


def padded_vocab_size(vocab_size: int, args: Any) -> int:
    """`vocab_size`, or the next multiple of `make_vocab_size_divisible_by` (128) x tensor_model_parallel_size."""
    multiple = (getattr(args, "make_vocab_size_divisible_by", None) or 128) * args.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def check_arguments(args: Any, shape: ModelShape, world_size: int) -> None:
    """Refuse, all at once, what this backend does not do and what contradicts the checkpoint.

    Raises:
        ConfigError
    """
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    problems = [
        f"--{name.replace('_', '-')} {getattr(args, name)} (later)"
        for name in LATER
        if (getattr(args, name, None) or 1) > 1
    ]
    if args.sequence_parallel and tp == 1:
        problems.append("--sequence-parallel with --tensor-model-parallel-size 1")
    if world_size % (tp * pp):
        problems.append(f"{world_size} ranks are no multiple of tensor ({tp}) x pipeline ({pp}) parallel sizes")
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if getattr(shape, name) % tp:
            problems.append(f"{name} {getattr(shape, name)} is no multiple of --tensor-model-parallel-size {tp}")
    if shape.num_layers % pp:
        problems.append(f"{shape.num_layers} layers are no multiple of --pipeline-model-parallel-size {pp}")
    problems += [
        f"{name} ({why})" for name, why in REFUSED_OVERRIDES.items() if (args.megatron_overrides or {}).get(name)
    ]
    if problems:
        raise ConfigError(
            f"the megatron train backend cannot do: {'; '.join(problems)}",
            where="the Megatron arguments",
            remedy="change these flags",
        )
    differences = shape_differences(args, shape)
    if differences:
        raise ConfigError(
            f"flags contradict the checkpoint: {'; '.join(differences)}",
            where="the Megatron model arguments",
            remedy="leave them out: they are read from the checkpoint's config.json",
        )


def shape_differences(args: Any, shape: ModelShape) -> list[str]:
    """Megatron model flags that were given (not None; switches: not False) and are not those of the checkpoint."""
    values = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.kv_channels,
        "vocab_size": shape.vocab_size,
        "norm_epsilon": shape.norm_epsilon,
        "normalization": "RMSNorm",
        "rotary_percent": 1.0,
        "rotary_base": shape.rope["rope_theta"],
    }
    switches = {
        "untie_embeddings_and_output_weights": not shape.tied,
        "qk_layernorm": shape.qk_norm,
        "add_qkv_bias": shape.qkv_bias,
    }
    given = [(name, want, getattr(args, name, None)) for name, want in values.items()]
    given += [(name, want, getattr(args, name, None) or None) for name, want in switches.items()]
    return [
        f"--{name.replace('_', '-')} {value} (checkpoint: {want})"
        for name, want, value in given
        if value is not None and value != want
    ]
