"""What only Megatron has: flags that `--train-backend hf` refuses, and checks of the model families that it trains."""

from __future__ import annotations

from collections.abc import Iterator

from instep.algorithms.catalog import ONLINE
from instep.arguments.all_flags import own_flags, passed_through
from instep.arguments.concern import Problem, Settings
from instep.arguments.flag import Flag
from instep.arguments.model import known_config
from instep.models.shape import KNOWN, shape_in_file, unsupported
from instep.training.megatron.checks import CANNOT, REMEDY, WHERE, refused_by_model
from instep.weights.way import RESTART

# Sizes without a default. The value 1 asks for nothing.
_SIZES = ("expert_tensor_parallel_size", "num_virtual_stages_per_pipeline_rank")
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def asked_of_megatron(args: Settings, given: set[str]) -> list[Flag]:
    """Return the given flags that only Megatron supports with their values."""
    own = [flag for flag in own_flags().values() if flag.megatron_only and flag.attribute in given]
    values = [(flag, getattr(args, flag.attribute)) for flag in own]
    asked = [f for f, value in values if value and value != f.default and (value != 1 or f.attribute not in _SIZES)]
    passed = dict.fromkeys(passed_through().values())
    return asked + [flag for flag in passed if flag.attribute in args.megatron_overrides]


def only_megatron(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that `--train-backend hf` supports the given flags."""
    if args.train_backend != "hf":
        return
    for flag in asked_of_megatron(args, given):
        what, *remedy = flag.megatron_only or ("only megatron-core has it, not --train-backend hf",)
        yield Problem(what, flag.name, *remedy or ("leave it out, or use --train-backend megatron",))
    if "make_vocab_size_divisible_by" in given:
        what = "has no effect with --train-backend hf, which pads no vocabulary"
        yield Problem(what, "--make-vocab-size-divisible-by", refused=False)


def family(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that Megatron can train the model: instep needs a weight map of its family. Otherwise name hf's flags."""
    config = known_config(args)
    if args.train_backend != "megatron" or args.debug_rollout_only or not (why := unsupported(config)):
        return
    names = [str(name) for name in config.get("architectures") or ()]
    if config.get("is_encoder_decoder") or not all(name.endswith(_CAUSAL) for name in names):
        return  # hf does not train it either: the check of the checkpoint reports that
    # Only the model knows whether hf can split it with tensor parallelism. FSDP2 shards every model.
    out = ["--tensor-model-parallel-size"] if args.tensor_model_parallel_size > 1 else []
    out += [flag.name for flag in asked_of_megatron(args, given)]
    without = f" without {', '.join(out)}" if out else ""
    how = (config.get("quantization_config") or {}).get("quant_method")
    taken = args.command not in ONLINE or args.debug_train_only or args.weight_sync == RESTART
    read = how is None or (how in ("fp8", "gptq", "awq") and taken)
    whole = "" if read else "convert the quantized weights to bfloat16, and give "
    what = f"the megatron train backend {why}"
    yield Problem(what, "--hf-checkpoint", f"{whole}--train-backend hf{without}; or {KNOWN}")


def layout(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check what the workers would refuse because of the model, if no other rule does."""
    if args.train_backend != "megatron" or args.debug_rollout_only or not (shape := shape_in_file(known_config(args))):
        return
    problems = refused_by_model(args, shape)
    if kept := shape.not_with_mtp(args.mtp_num_layers):
        problems.append(f"--mtp-num-layers {args.mtp_num_layers} ({kept})")
    if args.lora_rank and args.mtp_num_layers:
        problems.append("--lora-rank with --mtp-num-layers (these layers would stay frozen)")
    if problems:
        yield Problem(f"{CANNOT}: {'; '.join(problems)}", WHERE, REMEDY)


RULES = (only_megatron, family, layout)
