"""The arguments and models that the megatron backend refuses. This module imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instep.errors import ConfigError
from instep.models.shape import ModelShape

if TYPE_CHECKING:
    from instep.arguments.settings import Settings

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


def padded_vocab_size(vocab_size: int, args: Settings) -> int:
    """`vocab_size`, or the next multiple of `make_vocab_size_divisible_by` (128) x tensor_model_parallel_size."""
    multiple = (getattr(args, "make_vocab_size_divisible_by", None) or 128) * args.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def check_arguments(args: Settings, shape: ModelShape, world_size: int) -> None:
    """Raise one ConfigError that names everything which this backend does not do with a model of this shape."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    problems = []
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
            remedy="choose parallel sizes that divide these numbers of the model; leave out what is refused",
        )
