"""How the trainer's ranks share a model: parallel sizes, virtual pipeline stages, recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from instep.arguments.concern import Given, Problem, Settings, flag_name, ranks_of_a_copy
from instep.arguments.flag import COUNT, GPUS, Flag, FlagGroup, Number, attribute_name, hook, later, refused, switch
from instep.arguments.model import known_config
from instep.models.shape import FAMILIES, num_experts
from instep.models.stages import stage_layers

_COEFFICIENT = Number(float, 0, 1e3)

PARALLEL = FlagGroup(
    "Megatron: parallelism and memory",
    (
        Flag("--tensor-model-parallel-size", GPUS, 1, "ranks that share each layer (TP)", whose="VSM"),
        Flag("--pipeline-model-parallel-size", GPUS, 1, "ranks that share the layers in turn (PP)", whose="VSM"),
        switch("--sequence-parallel", "split activations along the sequence, too (with TP)", "VSM"),
        switch("--use-distributed-optimizer", "spread the optimizer's state over data-parallel ranks", "M"),
        Flag(
            "--recompute-granularity",
            choices=("full", "selective"),
            help="recompute activations in the backward pass: of whole layers, or what takes little time (megatron: "
            "--recompute-modules; hf: all but matrix products and attention)",
            whose="VSM",
        ),
        Flag("--recompute-method", choices=("uniform", "block"), help="with full recomputation", whose="VSM"),
        Flag("--recompute-num-layers", COUNT, None, "layers per group of recomputation", whose="VSM"),
        Flag("--context-parallel-size", GPUS, 1, "ranks that share each sample's tokens (CP)", whose="VSM"),
        Flag(
            "--num-virtual-stages-per-pipeline-rank",
            COUNT,
            None,
            "chunks of layers on each pipeline rank, which take turns so that less time is idle (interleaved pipeline)",
            whose="M",
        ),
        Flag("--num-layers-per-virtual-pipeline-stage", COUNT, None, "the same by the layers of a chunk", whose="M"),
        Flag(
            "--decoder-first-pipeline-num-layers",
            COUNT,
            None,
            "layers of the first pipeline stage; the others share the rest equally",
            whose="M",
        ),
        Flag("--decoder-last-pipeline-num-layers", COUNT, None, "likewise of the last pipeline stage", whose="M"),
        Flag("--expert-model-parallel-size", GPUS, 1, "ranks that share the experts of a layer (EP)", whose="VSM"),
        Flag(
            "--expert-tensor-parallel-size",
            GPUS,
            None,
            "ranks that share each expert (ETP); default: --tensor-model-parallel-size",
            whose="VSM",
        ),
        Flag("--moe-aux-loss-coeff", _COEFFICIENT, 0.0, "of the loss that balances the load of experts", whose="M"),
        Flag(
            "--moe-router-load-balancing-type",
            choices=("aux_loss", "seq_aux_loss", "none"),
            help="what --moe-aux-loss-coeff weighs: of these, aux_loss alone; the others go with 0",
            whose="M",
        ),
        Flag("--moe-z-loss-coeff", _COEFFICIENT, None, "of the loss that keeps the router's logits small", whose="M"),
        switch("--moe-grouped-gemm", "one kernel multiplies all experts of a layer, instead of one for each", "M"),
        Flag(
            "--moe-router-dtype",
            choices=("fp32", "fp64"),
            help="precision of the router's matrix product; default: that of the model, of DeepSeek-V3's router fp32",
            whose="M",
        ),
        Flag(
            "--moe-router-bias-update-rate",
            Number(float, 0, 1),
            0.0,
            "by how much a step moves the bias of each expert towards equal loads (DeepSeek-V3); Megatron: 0.001",
            whose="M",
        ),
        Flag(
            "--custom-megatron-init-path",
            hook,
            help="f(args): called on each rank once Megatron's process groups exist, before the model is built",
            whose="VSC",
        ),
        Flag(
            "--custom-megatron-before-log-prob-hook-path",
            hook,
            help="f(args, model, store_prefix): called before log-probs are computed",
            whose="VSC",
        ),
        Flag(
            "--custom-megatron-before-train-step-hook-path",
            hook,
            help="f(args, rollout_id, step_id, model, optimizer, opt_param_scheduler): called before each step",
            whose="VSC",
        ),
        Flag(
            "--custom-model-provider-path",
            hook,
            help="f(pre_process, post_process[, vp_stage]): builds the model of a rank, from that of "
            "instep.training.megatron.hooks.model_provider",
            whose="C",
        ),
        Flag(
            "--spec",
            hook,
            help="MODULE and NAME of f(args, config[, vp_stage]): the spec of the transformer layers of a rank",
            nargs="2",
            whose="CM",
        ),
        *refused(  # of the Megatron that slime's scripts of Qwen3-Next, Qwen3.5 and GLM-4 run on
            "the architecture is read from config.json",
            "C",
            "--use-gated-attention",
            "--post-self-attn-layernorm",
            "--post-mlp-layernorm",
            instead="--hf-checkpoint",
        ),
        *later(
            "low-precision matrix products come later",
            "C",
            "--megatron-deepgemm-forward-layers",
            "--megatron-deepgemm-forward-modules",
            "--megatron-deepgemm-moe-forward-layers",
            "--megatron-deepgemm-moe-forward-modules",
        ),
    ),
)


# ---- what follows from the flags -------------------------------------------------------------------------------------


def sequence_parallel(args: Settings, given: Given) -> bool:
    """As in Megatron, tensor parallelism over one rank leaves nothing to split."""
    return args.sequence_parallel and args.tensor_model_parallel_size > 1


RESOLVERS = (sequence_parallel,)

# ---- rules -----------------------------------------------------------------------------------------------------------


def undivided(args: Settings, ranks: str, flag: str) -> Iterator[Problem]:
    """Ranks of a role that TP x PP x CP does not divide; `ranks` says how many and whose, `flag` how many there are."""
    model = ranks_of_a_copy(args)
    if args.world_size % model:
        layout = f"TP {args.tensor_model_parallel_size} x PP {args.pipeline_model_parallel_size}"
        layout += f" x CP {args.context_parallel_size} = {model}" if args.context_parallel_size > 1 else f" = {model}"
        yield Problem(f"{layout} does not divide {ranks}", flag, f"use a multiple of {model}")


def undivided_experts(args: Settings, ranks: str, flag: str) -> Iterator[Problem]:
    """Ranks of a role that EP x ETP x PP does not divide, though TP x PP x CP does."""
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    pp = args.pipeline_model_parallel_size
    unit = ep * etp * pp
    if args.world_size % ranks_of_a_copy(args) == 0 and args.world_size % unit:
        what = f"EP {ep} x ETP {etp} x PP {pp} = {unit} does not divide {ranks}"
        yield Problem(what, flag, f"use a multiple of {unit} ranks, or a smaller size")


def parallel(args: Settings, given: set[str]) -> Iterator[Problem]:
    yield from undivided(args, f"{args.world_size} trainer ranks", "--actor-num-gpus-per-node")
    if args.train_backend == "hf" and args.pipeline_model_parallel_size > 1:
        what = "the hf backend has no pipelines"
        remedy = "use --tensor-model-parallel-size or more data-parallel ranks; or --train-backend megatron"
        yield Problem(what, "--pipeline-model-parallel-size", remedy)
    if args.train_backend == "hf" and args.context_parallel_size > 1:
        remedy = "use --tensor-model-parallel-size, which shares the attention heads; or --train-backend megatron"
        yield Problem("the hf backend has no context parallelism", "--context-parallel-size", remedy)
    yield from experts(args, given)
    size, config = args.tensor_model_parallel_size, known_config(args)
    if args.train_backend == "hf" and (heads := config.get("num_attention_heads") or 0) % size:
        remedy = "use a divisor of it, or data-parallel ranks alone: FSDP2 shards the weights anyway"
        yield Problem(f"does not divide the model's {heads} heads", f"--tensor-model-parallel-size {size}", remedy)
    if "sequence_parallel" in given and (args.tensor_model_parallel_size == 1 or args.train_backend == "hf"):
        without = "tensor parallelism" if args.tensor_model_parallel_size == 1 else "--train-backend megatron"
        yield Problem(f"has no effect without {without}", "--sequence-parallel", "", refused=False)


def recomputation(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Megatron recomputes groups of layers, by a method, or its selection of modules; hf one layer after the other, or
    its selection of operations."""
    kind, method, layers = args.recompute_granularity, args.recompute_method, args.recompute_num_layers
    if kind != "full" and (method or layers):
        what = f"belongs to full recomputation, {'which is not asked for' if kind is None else 'not to selective'}"
        yield Problem(what, "--recompute-method and --recompute-num-layers", "add --recompute-granularity full")
    elif args.train_backend == "hf" and (method not in (None, "uniform") or layers not in (None, 1)):
        what = "hf recomputes layer by layer, which is uniform and 1"
        yield Problem(what, "--recompute-method and --recompute-num-layers", "leave them out")
    elif args.train_backend == "megatron" and kind == "full" and (method is None or layers is None):
        flag, what, value = ("num-layers", "number of layers", "1") if method else ("method", "method", "uniform")
        yield Problem(f"full recomputation needs a {what}", f"--recompute-{flag}", f"use {value}")
    elif method == "block" and (args.moe_aux_loss_coeff or args.moe_z_loss_coeff):
        what = "with losses of the router: layers that are not recomputed would count padding in them"
        yield Problem(what, "--recompute-method block", "use --recompute-method uniform")


def experts(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Expert parallelism lays data-, context- and tensor-parallel ranks out anew."""
    ep = args.expert_model_parallel_size
    own = [flag for flag in ("expert_model_parallel_size", "expert_tensor_parallel_size") if getattr(args, flag)]
    if args.train_backend == "hf":
        for flag in (flag_name(flag) for flag in own if getattr(args, flag) > 1):
            remedy = "leave it out: FSDP2 shards experts over all ranks; or use --train-backend megatron"
            yield Problem("the hf backend has no expert parallelism", flag, remedy)
        of_routers = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_dtype", "moe_router_bias_update_rate")
        for flag in ("moe_grouped_gemm", *of_routers):
            if getattr(args, flag):
                yield Problem("only megatron-core has it, not --train-backend hf", flag_name(flag), "leave it out")
        return
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
    """What keeps the loads of experts alike."""
    kind, rate = args.moe_router_load_balancing_type, args.moe_router_bias_update_rate
    if args.moe_aux_loss_coeff and kind in ("seq_aux_loss", "none"):
        flag = f"--moe-router-load-balancing-type {kind}"
        yield Problem(f"has no loss for --moe-aux-loss-coeff {args.moe_aux_loss_coeff} to weigh", flag, "use aux_loss")
    family = FAMILIES.get(known_config(args).get("model_type", ""))
    if rate and family and not family.sigmoid:
        yield Problem("the model's experts have no bias", "--moe-router-bias-update-rate", "leave it out")
    asked = given & {"moe_router_enable_expert_bias", "moe_router_bias_update_rate"}
    if family and family.sigmoid and asked == {"moe_router_enable_expert_bias"}:
        what = "the bias stays as it is in the checkpoint; Megatron moves it by 0.001 in each step"
        yield Problem(what, "--moe-router-enable-expert-bias", "", refused=False)


def replay(args: Settings, given: set[str]) -> Iterator[Problem]:
    """The experts of an earlier pass in training: Megatron's routers take them; of the engine's, if it tells them."""
    engines, modules = args.use_rollout_routing_replay, (args.megatron_overrides or {}).get("recompute_modules") or ()
    if not engines and not args.use_routing_replay:
        return
    flag = "--use-rollout-routing-replay" if engines else "--use-routing-replay"
    if args.train_backend == "hf":
        yield Problem("only megatron-core has it, not --train-backend hf", flag, "leave it out")
    elif (config := known_config(args)) and not num_experts(config):
        yield Problem("the model has no experts", flag, "leave it out")
    if args.recompute_granularity == "selective" and "moe" in modules:
        what = "layers of experts that are recomputed alone may meet the experts of another micro-batch"
        yield Problem(what, f"{flag} with --recompute-modules moe", "use --recompute-granularity full")
    if engines and args.prefill_num_servers:
        what = "vLLM's decode engines do not know the experts that prefill engines chose"
        yield Problem(what, f"{flag} with --prefill-num-servers", "leave one of them out")
    if engines and args.vllm_overrides.get("pipeline_parallel_size", ["1"])[-1] != "1":
        what = "vLLM's pipelines do not return the experts"
        yield Problem(what, f"{flag} with --vllm-pipeline-parallel-size", "leave one of them out")
    if engines and args.device == "cpu" and args.rollout_backend == "vllm":
        yield Problem("vLLM does not note the experts on a CPU", flag, "use --rollout-backend embedded")
    if not engines and args.use_rollout_logprobs:
        what = "no pass computes old log-probs, whose experts could be taken"
        yield Problem(what, f"{flag} with --use-rollout-logprobs", "use --use-rollout-routing-replay")


def hooks(args: Settings, given: set[str]) -> Iterator[Problem]:
    for flag in PARALLEL.flags if args.train_backend == "hf" else ():
        if flag.type is hook and getattr(args, flag.attribute):
            yield Problem("is called by Megatron's ranks alone", flag.name, "give --train-backend megatron")


def virtual_stages(args: Settings, given: set[str]) -> Iterator[Problem]:
    """An interleaved pipeline; a model whose layers do not divide is refused where it is built."""
    layers, stages = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if not layers and (stages or 1) == 1:
        return
    flag = "--num-layers-per-virtual-pipeline-stage" if layers else "--num-virtual-stages-per-pipeline-rank"
    unit = args.dp_size * args.pipeline_model_parallel_size
    if layers and stages:
        yield Problem("say the same thing twice", f"{flag} and --num-virtual-stages-per-pipeline-rank", "give one")
    elif args.train_backend == "hf":
        yield Problem("the hf backend has no pipelines", flag, "leave it out, or use --train-backend megatron")
    elif args.pipeline_model_parallel_size == 1:
        yield Problem("needs a pipeline", flag, "add --pipeline-model-parallel-size, or leave it out")
    elif args.global_batch_size and args.global_batch_size < unit:
        what = f"{args.global_batch_size} samples a step make fewer micro-batches than an interleaved pipeline needs: "
        what += f"{args.dp_size} data-parallel ranks x {args.pipeline_model_parallel_size} stages"
        yield Problem(what, flag, f"use --global-batch-size {unit} or more, or no virtual stages")


def stages(args: Settings, given: set[str]) -> Iterator[Problem]:
    """The layers of each pipeline stage."""
    flags = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
    uneven = [flag for flag in flags if getattr(args, attribute_name(flag)) is not None]
    for flag in uneven:
        if args.train_backend == "hf":
            yield Problem("the hf backend has no pipelines", flag, "leave it out, or use --train-backend megatron")
        elif args.pipeline_model_parallel_size == 1:
            yield Problem("needs a pipeline", flag, "add --pipeline-model-parallel-size, or leave it out")
    num_layers = known_config(args).get("num_hidden_layers")
    if args.train_backend == "hf" or args.pipeline_model_parallel_size == 1 or not isinstance(num_layers, int):
        return
    try:
        stage_layers(args, num_layers)
    except ValueError as error:
        remedy = "choose stages that share the layers equally, but for those that --decoder-first- and "
        remedy += "--decoder-last-pipeline-num-layers name"
        yield Problem(str(error), " and ".join(uneven) or "--pipeline-model-parallel-size", remedy)


RULES = (parallel, virtual_stages, stages, recomputation, replay, hooks)
