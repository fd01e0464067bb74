"""What Megatron alone has: flags, which `--train-backend hf` refuses, and the families of models that it trains."""

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

# Sizes without a default of which 1 asks for nothing.
_SIZES = ("expert_tensor_parallel_size", "num_virtual_stages_per_pipeline_rank")
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def asked_of_megatron(args: Settings, given: set[str]) -> list[Flag]:
    """The flags with values that ask for what Megatron alone has."""
    own = [flag for flag in own_flags().values() if flag.megatron_only and flag.attribute in given]
    values = [(flag, getattr(args, flag.attribute)) for flag in own]
    asked = [f for f, value in values if value and value != f.default and (value != 1 or f.attribute not in _SIZES)]
    passed = dict.fromkeys(passed_through().values())
    return asked + [flag for flag in passed if flag.attribute in args.megatron_overrides]


def only_megatron(args: Settings, given: set[str]) -> Iterator[Problem]:
    """What `--train-backend hf` does not have."""
    if args.train_backend != "hf":
        return
    for flag in asked_of_megatron(args, given):
        what, *remedy = flag.megatron_only or ("only megatron-core has it, not --train-backend hf",)
        yield Problem(what, flag.name, *remedy or ("leave it out, or use --train-backend megatron",))
    if "make_vocab_size_divisible_by" in given:
        what = "has no effect with --train-backend hf, which pads no vocabulary"
        yield Problem(what, "--make-vocab-size-divisible-by", refused=False)


def family(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Megatron trains the families that instep has a map of weights for; hf does not take all flags of a command."""
    config = known_config(args)
    if args.train_backend != "megatron" or args.debug_rollout_only or not (why := unsupported(config)):
        return
    names = [str(name) for name in config.get("architectures") or ()]
    if config.get("is_encoder_decoder") or not all(name.endswith(_CAUSAL) for name in names):
        return  # hf does not train it either: the check of the checkpoint says so
    # Whether hf splits a model, only the model says; FSDP2 shards any.
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
    """What the workers would refuse for the model's sake, and no other rule does."""
    if args.train_backend != "megatron" or args.debug_rollout_only or not (shape := shape_in_file(known_config(args))):
        return
    if problems := refused_by_model(args, shape):
        yield Problem(f"{CANNOT}: {'; '.join(problems)}", WHERE, REMEDY)


RULES = (only_megatron, family, layout)
