"""Megatron's flags: those that act in instep, and the table of all flags of Megatron core_v0.16.1.

The shape flags of slime's and vime's model scripts are accepted, and compared with config.json of `--hf-checkpoint`,
which is what the model is built from. Every further flag that names a field of a megatron-core configuration is handed
through (`args.megatron_overrides`), unless instep sets that field itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from instep.arguments import architecture
from instep.arguments.concern import Problem, Settings
from instep.arguments.flag import COUNT, NO_MTP, Flag, FlagGroup, Number, accepted, switch, text
from instep.arguments.model import known_config
from instep.models.shape import FAMILIES, num_experts

_NO_EFFECT_WHY = "batches are packed, and as long as their samples"
_NO_EFFECT = f"accepted for Megatron's scripts, without effect: {_NO_EFFECT_WHY}"
ZERO = Number(float, 0, 0)
NOT_HONOURED = "a flag of Megatron that is not honoured by instep's trainer"

SHAPE = FlagGroup(
    "Megatron: shape of the model (compared with config.json of --hf-checkpoint)",
    (
        Flag("--num-layers", COUNT, None, "layers", whose="VSM"),
        Flag("--hidden-size", COUNT, None, "width", whose="VSM"),
        Flag("--ffn-hidden-size", COUNT, None, "width of the MLP", whose="VSM"),
        Flag("--num-experts", COUNT, None, "experts of a layer", whose="M"),
        Flag("--moe-router-topk", COUNT, None, "experts of a token", whose="M"),
        Flag("--moe-ffn-hidden-size", COUNT, None, "width of an expert", whose="M"),
        Flag("--num-attention-heads", COUNT, None, "query heads", whose="VSM"),
        *architecture.FLAGS,
        switch("--group-query-attention", "fewer key heads than query heads", "VSM"),
        Flag("--num-query-groups", COUNT, None, "key heads", whose="VSM"),
        Flag("--kv-channels", COUNT, None, "width of a head", whose="VSM"),
        Flag("--vocab-size", COUNT, None, "entries of the vocabulary", whose="VSM"),
        Flag("--normalization", choices=("LayerNorm", "RMSNorm"), help="kind of norm", whose="VSM"),
        Flag("--norm-epsilon", Number(float, 0, 1, above=True), None, "epsilon of the norms", whose="VSM"),
        Flag("--rotary-base", Number(float, 1, 1e12), None, "base of the rotary embedding", whose="VSM"),
        Flag("--rotary-percent", Number(float, 0, 1, above=True), None, "part of a head that is rotated", whose="M"),
        Flag("--position-embedding-type", choices=("rope",), help="kind of position embedding", whose="M"),
        switch("--use-rotary-position-embeddings", "rotary embedding", "VSM"),
        switch("--swiglu", "gated MLP with SiLU", "VSM"),
        switch("--qk-layernorm", "norms on queries and keys", "VSM"),
        Flag("--disable-bias-linear", bool, None, "linear layers without bias", whose="VSM"),
        switch("--add-qkv-bias", "bias in the query, key and value layers", "M"),
        switch("--untie-embeddings-and-output-weights", "input and output embeddings are two tensors", "M"),
        Flag("--make-vocab-size-divisible-by", COUNT, 128, "pad the vocabulary to this times TP", whose="M"),
        Flag("--seq-length", COUNT, None, _NO_EFFECT, whose="VSM"),
        Flag(
            "--max-position-embeddings", COUNT, None, _NO_EFFECT, aliases=("--max-positional-embedding",), whose="VSM"
        ),
        Flag("--attention-dropout", ZERO, 0.0, "only 0: dropout would part the trainer from the engine", whose="M"),
        Flag("--hidden-dropout", ZERO, 0.0, "only 0: dropout would part the trainer from the engine", whose="M"),
        *accepted("gradients are always summed in fp32", "M", "--accumulate-allreduce-grads-in-fp32"),
        *accepted("a step that is not finite is always skipped", "M", "--no-check-for-nan-in-loss-and-grad"),
    ),
)

# Flags of Megatron's table that are not handed through: pattern of the name, status, why, what instead. The first
# pattern that matches counts.
_NOT_PASSED: tuple[tuple[str, str, str, str], ...] = (
    ("--attention-softmax-in-fp32$", "accepted", "attention always computes its softmax in fp32", ""),
    ("--no-masked-softmax-fusion$", "accepted", "attention is one kernel, whose softmax is no step of its own", ""),
    ("--use-flash-attn$", "accepted", "attention of packed batches is a flash kernel wherever the GPU has one", ""),
    ("--no-rope-fusion$", "accepted", "the rotary embedding is not fused", ""),
    ("--cross-entropy-(loss-fusion|fusion-impl)$", "accepted", "instep makes log-probs in fused chunks", ""),
    ("--(embedding-)?init-method-std$", "accepted", "weights are read from --hf-checkpoint or --load", ""),
    ("--no-position-embedding$", "accepted", "the position embedding is that of config.json", ""),
    ("--no-async-tensor-model-parallel-allreduce$", "accepted", "megatron-core 0.16 does not read it", ""),
    ("--use-precision-aware-optimizer$", "accepted", "gradients, masters and moments are fp32 unless a flag says", ""),
    (
        "--(overlap-cpu-optimizer-d2h-h2d|use-torch-optimizer-for-cpu-offload|no-pin-cpu-(grads|params))$",
        "accepted",
        "with --optimizer-cpu-offload moments alone lie in host memory, and a GPU computes the step with them",
        "",
    ),
    ("--optimizer-offload-fraction$", "refused", "all moments lie in host memory, or none", "--optimizer-cpu-offload"),
    ("--no-align-param-gather$", "accepted", "weights are gathered at the end of a step, and nothing overlaps it", ""),
    ("--no-gradient-accumulation-fusion$", "accepted", "no kernel of apex or Transformer Engine adds gradients up", ""),
    (
        "--(no-gradient-reduce-div-fusion|suggested-communication-unit-size)$",
        "refused",
        "only Megatron's FSDP reads it",
        "",
    ),
    (
        "--(cpu-offloading-num-layers)$",
        "refused",
        "needs Transformer Engine, which instep's trainer does not use",
        "--recompute-granularity full",
    ),
    ("--(defer-embedding-wgrad|wgrad-deferral)", "refused", "logits are made in chunks", ""),
    ("--(fine-grained-activation|offload-modules|min-offloaded)", "later", "offloading of activations comes later", ""),
    ("--use-ring-exchange-p2p$", "refused", "needs a PyTorch of its own", ""),
    ("--(use-nccl-ub|disable-symmetric-reg)", "refused", "gradients lie in no buffers that NCCL knows", ""),
    ("--batch-invariant-mode$", "refused", "needs kernels that instep's trainer does not use", "--deterministic-mode"),
    ("--(disable-bf16-reduced|pipeline-model-parallel-comm-backend|num-distributed-optimizer-inst)", "refused", "", ""),
    ("--account-for-", "later", "stages have equally many layers", "--pipeline-model-parallel-size"),
    ("--moe-token-dispatcher-type", "refused", "tokens travel by alltoall", ""),
    ("--moe-(enable-deepep|deepep-num|flex-disp|hybridep)", "refused", "tokens travel by alltoall, not by DeepEP", ""),
    ("--moe-(token-drop-policy|expert-capacity|pad-expert-input)", "refused", "experts have no capacity", ""),
    ("--moe-(permute|router)-fusion$", "accepted", "Transformer Engine's kernel is not used; results are the same", ""),
    ("--moe-layer-recompute$", "refused", NOT_HONOURED, "--recompute-granularity full"),
    ("--moe-(shared-expert-gate|latent-size)", "refused", "read from config.json", "--hf-checkpoint"),
    (
        "--moe-enable-routing-replay",
        "refused",
        "instep's routers replay by themselves",
        "--use-rollout-routing-replay or --use-routing-replay",
    ),
    (
        "--(overlap-moe|moe-shared-expert-overlap|ep-overlap|delay-wgrad)",
        "later",
        "tokens travel between experts while nothing is computed",
        "",
    ),
    ("--moe-", "refused", "", ""),
    (
        "--(hierarchical-context|hybrid-context|cp-comm-type|max-seqlen-per-dp-cp)",
        "refused",
        "context-parallel ranks gather keys and values",
        "--context-parallel-size alone",
    ),
    ("--mtp-", "later", NO_MTP, ""),
    (
        "--(microbatch-group-size|overlap-p2p|no-overlap-p2p|.*virtual)",
        "refused",
        "interleaved pipelines have one order and one way of communicating",
        "--num-virtual-stages-per-pipeline-rank",
    ),
    (
        "--(fp8|fp4|no-fp8|keep-fp8|reuse-grad-buf|first-last-layers|num-layers-at-|.*kitchen)",
        "later",
        "low precision needs Transformer Engine, which instep's trainer does not use yet",
        "--precision bf16",
    ),
    (
        "--(tp-comm|no-tp-comm|use-te|transformer-impl|.*cuda-graph|symmetric-ar|te-)",
        "refused",
        "needs Transformer Engine, which instep's trainer does not use",
        "",
    ),
    ("--attention-backend", "refused", "instep chooses the attention kernel by device", ""),
    (
        "--(fp16|loss-scale|initial-loss-scale|min-loss-scale|hysteresis|fp32-residual)",
        "refused",
        "fp16 is not trained here",
        "--precision bf16 or --precision fp32",
    ),
    ("--(muon|sgd)-", "refused", "the optimizer is adam", "--optimizer adam"),
    ("--overlap-param-gather", "later", "weights would be read before they are gathered", ""),
    ("--(exp-avg|main-grads-dtype|main-params-dtype)", "later", "optimizer states are fp32", ""),
    ("--pipeline-model-parallel-layout", "later", "stages have equally many layers", "--pipeline-model-parallel-size"),
    ("--decoupled-", "refused", "one learning rate for all weights", "--lr"),
    ("--(use-cpu-init|no-initialization|init-model-with-meta)", "refused", "instep decides how weights are made", ""),
    (
        ".*fsdp|--(data-parallel-sharding|outer-dp-sharding)",
        "refused",
        "FSDP is the other backend",
        "--train-backend hf",
    ),
    ("--(inference-|flash-decode|mlp-chunks)", "refused", "generation happens in the engines", ""),
    ("--(config-logger-dir|log-|no-barrier)", "refused", "instep has metrics of its own", ""),
    ("--test-mode", "refused", "for Megatron's own tests", ""),
    (
        "--(mamba|is-hybrid|disable-mamba|linear-|dsa-|experimental-att|mrope|window-|no-rope-freq|softmax-type"
        "|qk-clip|qk-l2|attention-output-gate|glu-linear|activation-func|rotary-interleaved|apply-layernorm-1p"
        "|apply-residual|use-fused-weighted|apply-query-key)",
        "refused",
        "the architecture is read from config.json",
        "--hf-checkpoint",
    ),
)

# What to use instead of the flags of Megatron's scripts that are most often carried over.
_INSTEAD = {
    "--train-iters": "--num-rollout",
    "--train-samples": "--num-rollout",
    "--tokenizer-type": "--hf-checkpoint",
    "--tokenizer-model": "--hf-checkpoint",
    "--data-path": "--prompt-data",
    "--train-data-path": "--prompt-data",
    "--tensorboard-dir": "--use-tensorboard with --run-dir",
    "--finetune": "--ref-load, without --load",
    "--pretrained-checkpoint": "--ref-load",
    "--sft": "instep sft",
    "--use-torch-fsdp2": "--train-backend hf",
    "--recompute-activations": "--recompute-granularity selective",
    "--checkpoint-activations": "--recompute-granularity full",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--warmup": "--lr-warmup-iters",
    "--lr-warmup-samples": "--lr-warmup-iters",
    "--lr-decay-samples": "--lr-decay-iters",
    "--wandb-entity": "--wandb-team",
    "--wandb-exp-name": "--wandb-group",
    "--wandb-save-dir": "--wandb-dir",
    "--exit-interval": "--num-rollout",
    "--persistent-save-interval": "--save-interval",
}
# Values of flags that do not act which ask for what instep does anyway; so does 0 where it is Megatron's default.
_NEUTRAL = {
    "--attention-backend": ("auto", "flash"),
    "--cp-comm-type": ("p2p", "all_gather"),
    "--moe-token-dispatcher-type": ("alltoall",),
    "--moe-token-drop-policy": ("probs", "position"),
    "--transformer-impl": ("local",),
    "--cuda-graph-impl": ("none",),
    "--softmax-type": ("vanilla",),
    "--weight-decay-incr-style": ("constant",),
    "--num-distributed-optimizer-instances": ("1",),
    "--optimizer-offload-fraction": ("1", "1.0"),
    "--pipeline-model-parallel-comm-backend": ("nccl",),
    "--tp-comm-bootstrap-backend": ("nccl",),
    "--data-parallel-sharding-strategy": ("no_shard",),
    "--outer-dp-sharding-strategy": ("no_shard",),
    **dict.fromkeys(("--exp-avg-dtype", "--exp-avg-sq-dtype", "--main-grads-dtype", "--main-params-dtype"), ("fp32",)),
}


_INT, _FLOAT = Number(int, -(2**63), 2**63 - 1), Number(float, -1e38, 1e38)


def _element(value: str) -> Any:
    """A whole number, else a float, else text."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return text(value)


@cache
def megatron_table() -> tuple[Flag, ...]:
    """All flags of Megatron's command line (names, types, defaults, choices of core_v0.16.1) with instep's status."""
    rows = json.loads((Path(__file__).parent / "megatron_table.json").read_text(encoding="ascii"))["flags"]
    types: dict[str, Any] = {"int": _INT, "float": _FLOAT, "str": text, "true": bool, "false": bool, "on_off": bool}
    flags = []
    for row in rows:
        zero = ("0",) if row["type"] in ("int", "float") and row["default"] == 0 else ()
        status, note, instead = _verdict(row["names"][0], bool(row.get("config")) and row["type"] in types)
        flags.append(
            Flag(
                row["names"][0],
                types.get(row["type"], _element),
                row["default"],
                choices=tuple(row.get("choices", ())),
                nargs=row.get("nargs"),
                dest=row["dest"],
                aliases=tuple(row["names"][1:]),
                status=status,
                note=note,
                instead=instead,
                whose="M",
                constant=row["type"] != "false",
                neutral=_NEUTRAL.get(row["names"][0], zero if status != "acts" else ()),
            )
        )
    return tuple(flags)


@cache
def _patterns() -> list[re.Pattern[str]]:
    return [re.compile(pattern) for pattern, *_ in _NOT_PASSED]


def _verdict(name: str, is_field: bool) -> tuple[Any, str, str]:
    for pattern, (_, status, note, instead) in zip(_patterns(), _NOT_PASSED, strict=True):
        if pattern.match(name):
            return status, note or NOT_HONOURED, _INSTEAD.get(name, instead)
    if is_field:
        return "acts", "handed to megatron-core as it is", ""
    return "refused", NOT_HONOURED, _INSTEAD.get(name, "")


def shape_in_file(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says about the flags of the model's shape; None: it does not, as transformers has a default."""
    rope, family = config.get("rope_parameters") or {}, FAMILIES.get(config.get("model_type", ""))
    heads, width = (config.get(name) for name in ("num_attention_heads", "hidden_size"))
    groups, base = config.get("num_key_value_heads", heads), config.get("rope_theta", rope.get("rope_theta"))
    head_dim = config.get("head_dim") or (width // heads if width and heads else None)
    biases = [bool(config[name]) for name in ("attention_bias", "mlp_bias") if name in config]
    gate = config.get("hidden_act", config.get("activation_function"))
    layer_norm = next((name for name in ("layer_norm_eps", "layer_norm_epsilon") if name in config), "")
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    tied = config.get("tie_word_embeddings")
    return {
        "--num-layers": config.get("num_hidden_layers"),
        "--hidden-size": width,
        "--ffn-hidden-size": config.get("intermediate_size"),
        **architecture.in_file(config),
        "--num-experts": num_experts(config) or None,
        "--moe-router-topk": config.get("num_experts_per_tok"),
        "--moe-ffn-hidden-size": config.get("moe_intermediate_size"),
        "--num-attention-heads": heads,
        "--group-query-attention": None if groups is None else groups < heads,
        "--num-query-groups": groups,
        # Megatron does not read it where attention is latent.
        "--kv-channels": None if family and family.latent else head_dim,
        "--vocab-size": config.get("vocab_size"),
        "--normalization": "RMSNorm" if "rms_norm_eps" in config else "LayerNorm" if layer_norm else None,
        "--norm-epsilon": config.get("rms_norm_eps", config.get(layer_norm)),
        "--rotary-base": base,
        "--rotary-percent": 1.0 if rotated is None and family else rotated,
        "--position-embedding-type": "rope" if base or rope else config.get("position_embedding_type"),
        "--use-rotary-position-embeddings": True if base or rope else None,
        "--swiglu": None if gate is None else gate in ("silu", "swish"),
        "--qk-layernorm": family and (family.qk_norm or family.latent),
        "--disable-bias-linear": True if family and not any(biases) else not any(biases) if biases else None,
        "--add-qkv-bias": family and family.qkv_bias,
        "--untie-embeddings-and-output-weights": None if tied is None else not tied,
    }


# ---- rules -----------------------------------------------------------------------------------------------------------


def only_megatron(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.train_backend != "hf":
        return
    if args.use_distributed_optimizer:
        yield Problem("FSDP2 spreads the optimizer anyway", "--use-distributed-optimizer", "leave it out")
    if args.megatron_overrides:
        names = {flag.attribute: flag.name for flag in megatron_table() if flag.status == "acts"}
        for name in args.megatron_overrides:
            yield Problem("only megatron-core has it, not --train-backend hf", names[name], "leave it out")
    if "make_vocab_size_divisible_by" in given:
        what = "has no effect with --train-backend hf, which pads no vocabulary"
        yield Problem(what, "--make-vocab-size-divisible-by", refused=False)


def shape(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Flags of the model's shape must agree with config.json, which the model is built from."""
    config = known_config(args)
    in_file = shape_in_file(config) if config else {}
    for flag in (flag for flag in SHAPE.flags if flag.attribute in given):
        mine, actual = getattr(args, flag.attribute), in_file.get(flag.name)
        if flag.name == "--moe-layer-freq" and isinstance(mine, int):  # each mine-th layer
            mine = tuple(int(i % mine == 0) for i in range(config.get("num_hidden_layers", 0)))
        if flag.help == _NO_EFFECT:
            yield Problem(f"has no effect: {_NO_EFFECT_WHY}", flag.name, refused=False)
        elif flag.name in in_file and actual is None:
            yield Problem("is not compared: config.json does not say, and it decides", flag.name, refused=False)
        elif flag.name in in_file and mine != actual:
            yield Problem(
                f"is {mine}, but config.json says {actual}", flag.name, "leave it out: the checkpoint decides"
            )


RULES = (shape, only_megatron)
