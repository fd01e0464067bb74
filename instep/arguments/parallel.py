"""How the trainer's ranks share a model: parallel sizes, virtual pipeline stages, recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from instep.arguments.concern import Given, Problem, Settings, ranks_of_a_copy
from instep.arguments.flag import attribute_name, read_flags
from instep.arguments.model import known_config
from instep.models.shape import FAMILIES, num_experts
from instep.models.stages import stage_layers

PARALLEL = read_flags(__file__)


# ---- what follows from the flags -------------------------------------------------------------------------------------


def sequence_parallel(args: Settings, given: Given) -> bool:
    """Return the flag's value; False without tensor parallelism, as in Megatron: there is nothing to split."""
    return args.sequence_parallel and args.tensor_model_parallel_size > 1


RESOLVERS = (sequence_parallel,)

# ---- rules -----------------------------------------------------------------------------------------------------------


def undivided(args: Settings, ranks: str, flag: str) -> Iterator[Problem]:
    """Check that TP x PP x CP divides the ranks of a role. `ranks`: their number and role in words; `flag`: sets it."""
    model = ranks_of_a_copy(args)
    if args.world_size % model:
        layout = f"TP {args.tensor_model_parallel_size} x PP {args.pipeline_model_parallel_size}"
        layout += f" x CP {args.context_parallel_size} = {model}" if args.context_parallel_size > 1 else f" = {model}"
        yield Problem(f"{layout} does not divide {ranks}", flag, f"use a multiple of {model}")


def undivided_experts(args: Settings, ranks: str, flag: str) -> Iterator[Problem]:
    """Check that EP x ETP x PP divides the ranks of a role, if TP x PP x CP does."""
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    pp = args.pipeline_model_parallel_size
    unit = ep * etp * pp
    if args.world_size % ranks_of_a_copy(args) == 0 and args.world_size % unit:
        what = f"EP {ep} x ETP {etp} x PP {pp} = {unit} does not divide {ranks}"
        yield Problem(what, flag, f"use a multiple of {unit} ranks, or a smaller size")


def parallel(args: Settings, given: set[str]) -> Iterator[Problem]:
    yield from undivided(args, f"{args.world_size} trainer ranks", "--actor-num-gpus-per-node")
    if args.train_backend == "megatron":
        yield from experts(args, given)
    size, config = args.tensor_model_parallel_size, known_config(args)
    if args.train_backend == "hf" and (heads := config.get("num_attention_heads") or 0) % size:
        remedy = "use a divisor of it, or only data-parallel ranks: FSDP2 shards the weights anyway"
        yield Problem(f"does not divide the model's {heads} heads", f"--tensor-model-parallel-size {size}", remedy)
    if "sequence_parallel" in given and (args.tensor_model_parallel_size == 1 or args.train_backend == "hf"):
        without = "tensor parallelism" if args.tensor_model_parallel_size == 1 else "--train-backend megatron"
        yield Problem(f"has no effect without {without}", "--sequence-parallel", "", refused=False)


def recomputation(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check the recomputation flags.

    Megatron recomputes groups of layers by a method, or selected modules. hf recomputes layer by layer, or selected
    operations.
    """
    kind, method, layers = args.recompute_granularity, args.recompute_method, args.recompute_num_layers
    if kind != "full" and (method or layers):
        what = f"belongs to full recomputation, {'which is off' if kind is None else 'not to selective'}"
        yield Problem(what, "--recompute-method and --recompute-num-layers", "add --recompute-granularity full")
    elif args.train_backend == "hf" and (method not in (None, "uniform") or layers not in (None, 1)):
        what = "hf recomputes layer by layer: uniform and 1"
        yield Problem(what, "--recompute-method and --recompute-num-layers", "leave them out")
    elif args.train_backend == "megatron" and kind == "full" and (method is None or layers is None):
        flag, what, value = ("num-layers", "number of layers", "1") if method else ("method", "method", "uniform")
        yield Problem(f"full recomputation needs a {what}", f"--recompute-{flag}", f"use {value}")
    elif method == "block" and (args.moe_aux_loss_coeff or args.moe_z_loss_coeff):
        what = "with router losses: layers that are not recomputed would count padding in these losses"
        yield Problem(what, "--recompute-method block", "use --recompute-method uniform")


def experts(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check expert parallelism, which splits the data-, context- and tensor-parallel ranks in another way."""
    ep = args.expert_model_parallel_size
    yield from _balance(args, given)
    config = known_config(args)
    count = num_experts(config)
    if config and not count:
        if ep > 1:
            yield Problem("the model has no experts", f"--expert-model-parallel-size {ep}", "leave it out")
        return
    if count % ep:
        what = f"does not divide the model's {count} experts"
        yield Problem(what, f"--expert-model-parallel-size {ep}", "use a divisor")
    else:
        yield from undivided_experts(args, f"{args.world_size} trainer ranks", "--expert-model-parallel-size")
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        what = "tensor parallelism of a model with experts needs sequence parallelism"
        yield Problem(what, "--tensor-model-parallel-size", "add --sequence-parallel")


def _balance(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check the flags that balance the load of experts."""
    kind, rate = args.moe_router_load_balancing_type, args.moe_router_bias_update_rate
    if args.moe_aux_loss_coeff and kind in ("seq_aux_loss", "none"):
        flag = f"--moe-router-load-balancing-type {kind}"
        what = f"has no loss, so --moe-aux-loss-coeff {args.moe_aux_loss_coeff} has no effect"
        yield Problem(what, flag, "use aux_loss")
    family = FAMILIES.get(known_config(args).get("model_type", ""))
    if rate and family and not family.sigmoid:
        yield Problem("the model's experts have no bias", "--moe-router-bias-update-rate", "leave it out")
    asked = given & {"moe_router_enable_expert_bias", "moe_router_bias_update_rate"}
    if family and family.sigmoid and asked == {"moe_router_enable_expert_bias"}:
        what = "the bias stays as in the checkpoint; Megatron changes it by 0.001 in each step"
        yield Problem(what, "--moe-router-enable-expert-bias", "", refused=False)


def replay(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check routing replay: training takes the experts of an earlier pass, in the trainer or in an engine."""
    engines, modules = args.use_rollout_routing_replay, (args.megatron_overrides or {}).get("recompute_modules") or ()
    if not engines and not args.use_routing_replay:
        return
    flag = "--use-rollout-routing-replay" if engines else "--use-routing-replay"
    if args.train_backend == "megatron" and (config := known_config(args)) and not num_experts(config):
        yield Problem("the model has no experts", flag, "leave it out")
    if args.recompute_granularity == "selective" and "moe" in modules:
        what = "expert layers that are recomputed alone may get the experts of another micro-batch"
        yield Problem(what, f"{flag} with --recompute-modules moe", "use --recompute-granularity full")
    if engines and args.prefill_num_servers:
        what = "vLLM's decode engines do not know the experts that prefill engines chose"
        yield Problem(what, f"{flag} with --prefill-num-servers", "leave one of them out")
    if engines and args.vllm_overrides.get("pipeline_parallel_size", ["1"])[-1] != "1":
        what = "vLLM's pipelines do not return the experts"
        yield Problem(what, f"{flag} with --vllm-pipeline-parallel-size", "leave one of them out")
    if engines and args.device == "cpu" and args.rollout_backend == "vllm":
        yield Problem("vLLM does not record the experts on a CPU", flag, "use --rollout-backend embedded")
    if not engines and args.use_rollout_logprobs:
        what = "no pass computes old log-probs, so there are no experts to replay"
        yield Problem(what, f"{flag} with --use-rollout-logprobs", "use --use-rollout-routing-replay")


def virtual_stages(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check an interleaved pipeline. The build of the model checks that its layers divide."""
    layers, stages = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if args.train_backend == "hf" or (not layers and (stages or 1) == 1):
        return
    flag = "--num-layers-per-virtual-pipeline-stage" if layers else "--num-virtual-stages-per-pipeline-rank"
    unit = args.dp_size * args.pipeline_model_parallel_size
    if layers and stages:
        yield Problem("say the same", f"{flag} and --num-virtual-stages-per-pipeline-rank", "give one of the two")
    elif args.pipeline_model_parallel_size == 1:
        yield Problem("needs a pipeline", flag, "add --pipeline-model-parallel-size, or leave it out")
    elif args.global_batch_size and args.global_batch_size < unit:
        what = f"{args.global_batch_size} samples per step are too few micro-batches for an interleaved pipeline: "
        what += f"{args.dp_size} data-parallel ranks x {args.pipeline_model_parallel_size} stages"
        yield Problem(what, flag, f"use --global-batch-size {unit} or more, or no virtual stages")


def stages(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check the layers of each pipeline stage."""
    if args.train_backend == "hf":
        return
    flags = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
    uneven = [flag for flag in flags if getattr(args, attribute_name(flag)) is not None]
    for flag in uneven if args.pipeline_model_parallel_size == 1 else ():
        yield Problem("needs a pipeline", flag, "add --pipeline-model-parallel-size, or leave it out")
    num_layers = known_config(args).get("num_hidden_layers")
    if args.pipeline_model_parallel_size == 1 or not isinstance(num_layers, int):
        return
    try:
        stage_layers(args, num_layers)
    except ValueError as error:
        remedy = "choose stages with equally many layers, except those of --decoder-first- and "
        remedy += "--decoder-last-pipeline-num-layers"
        yield Problem(str(error), " and ".join(uneven) or "--pipeline-model-parallel-size", remedy)


RULES = (parallel, virtual_stages, stages, recomputation, replay)
