"""The arguments and models that the megatron backend refuses. This module imports nothing large."""

from __future__ import annotations

from instep.arguments.settings import ParallelSettings, Settings
from instep.errors import ConfigError
from instep.models.shape import Experts, ModelShape
from instep.models.stages import stage_layers

CANNOT, WHERE = "the megatron train backend cannot do", "the Megatron arguments"
REMEDY = "choose parallel sizes that divide these numbers of the model; remove refused flags"
# Overrides that would break guarantees of this backend, and why.
REFUSED_OVERRIDES = {
    "hidden_dropout": "log-probs would change between passes",
    "attention_dropout": "log-probs would change between passes",
    "overlap_param_gather": "weights would be read before they are gathered",
    "overlap_param_gather_with_optimizer_step": "weights would be read before they are gathered",
    "calculate_per_token_loss": "the loss contains its own denominators",
    "average_in_collective": "gradients are sums",
    "use_megatron_fsdp": "its parameters have another layout; use --train-backend fsdp",
}


def padded_vocab_size(vocab_size: int, args: ParallelSettings) -> int:
    """Return `vocab_size`, or the next multiple of `make_vocab_size_divisible_by` (128) x
    tensor_model_parallel_size."""
    multiple = (getattr(args, "make_vocab_size_divisible_by", None) or 128) * args.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def check_arguments(args: Settings, shape: ModelShape) -> None:
    """Raise one ConfigError that names all options that this backend does not support for a model of this shape.

    The rules of the command line check the rest, and the same options for the policy; a teacher may have another shape.
    """
    problems, experts = refused_by_model(args, shape), shape.experts.num if shape.experts else 0
    if experts % args.expert_model_parallel_size:
        sizes = f"--expert-model-parallel-size {args.expert_model_parallel_size}"
        problems.append(f"{experts} experts are not a multiple of {sizes}")
    if experts and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        problems.append("tensor parallelism of a mixture of experts needs --sequence-parallel")
    try:
        stage_layers(args, shape.num_layers)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError(f"{CANNOT}: {'; '.join(problems)}", where=WHERE, remedy=REMEDY)


def refused_by_model(args: Settings, shape: ModelShape) -> list[str]:
    """List what only the rule `layout` of the command line refuses."""
    tp, overrides = args.tensor_model_parallel_size, args.megatron_overrides or {}
    problems = [
        f"{name} {getattr(shape, name)} is not a multiple of --tensor-model-parallel-size {tp}"
        for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size")
        if getattr(shape, name) % tp
    ]
    if shape.delta and shape.delta.key_heads % (tp * args.context_parallel_size):
        sizes = f"--tensor-model-parallel-size {tp} x --context-parallel-size {args.context_parallel_size}"
        problems.append(f"{shape.delta.key_heads} key heads of linear attention are not a multiple of {sizes}")
    if shape.experts:
        problems += _widths(args, shape.experts)
    problems += _virtual_stages(args, shape.num_layers)
    if args.mtp_num_layers and args.context_parallel_size > 1:
        problems.append("--mtp-num-layers with --context-parallel-size (a token and the next ones are on other ranks)")
    modules = overrides.get("recompute_modules") or ()
    if shape.latent and "mla_up_proj" in modules:
        problems.append("--recompute-modules mla_up_proj (full recomputation covers it)")
    if "layernorm" in modules:
        what = "Megatron-Core needs Transformer Engine for it; name other modules, or use --recompute-granularity full"
        problems.append(f"--recompute-modules layernorm ({what})")
    if shape.experts and args.moe_grouped_gemm and overrides.get("moe_apply_probs_on_input"):
        problems.append("moe_apply_probs_on_input with --moe-grouped-gemm (remove one of them)")
    return problems + [f"{name} ({why})" for name, why in REFUSED_OVERRIDES.items() if overrides.get(name)]


def _widths(args: ParallelSettings, experts: Experts) -> list[str]:
    tp, problems = args.tensor_model_parallel_size, []
    etp = args.expert_tensor_parallel_size or tp
    if experts.ffn_hidden_size % etp:
        width = experts.ffn_hidden_size
        problems.append(f"the width {width} of experts is not a multiple of --expert-tensor-parallel-size {etp}")
    if experts.shared_ffn_hidden_size % tp:
        width = experts.shared_ffn_hidden_size
        problems.append(f"the width {width} of shared experts is not a multiple of --tensor-model-parallel-size {tp}")
    return problems


def _virtual_stages(args: ParallelSettings, num_layers: int) -> list[str]:
    try:
        sizes = stage_layers(args, num_layers)
    except ValueError:
        return []  # reported already
    layers, stages = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if layers and len(set(sizes)) > 1:
        return ["--num-layers-per-virtual-pipeline-stage with stages of several sizes"]
    for size in sizes:
        what = f"{size} layers of a pipeline rank are not a multiple of"
        if layers and size % layers:
            return [f"{what} --num-layers-per-virtual-pipeline-stage {layers}"]
        if stages and size % stages:
            return [f"{what} --num-virtual-stages-per-pipeline-rank {stages}"]
    return []
