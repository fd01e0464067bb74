"""The families of models that Megatron trains; for any other the remedy is the other backend, as it can be given."""

from __future__ import annotations

from collections.abc import Iterator

from instep.algorithms.catalog import ONLINE
from instep.arguments import megatron, parallel
from instep.arguments.args import Draft
from instep.arguments.concern import Problem
from instep.arguments.model import known_config
from instep.models.shape import KNOWN, shape_in_file, unsupported
from instep.training.megatron.checks import CANNOT, REMEDY, WHERE, refused_by_model
from instep.weights.way import RESTART

_RULES = (*megatron.RULES, *parallel.RULES)  # which know what hf does not take
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def family(args: Draft, given: set[str]) -> Iterator[Problem]:
    """Megatron trains the families that instep has a map of weights for; hf does not take all flags of a command."""
    config = known_config(args)
    if args.train_backend != "megatron" or args.debug_rollout_only or not (why := unsupported(config)):
        return
    names = [str(name) for name in config.get("architectures") or ()]
    if config.get("is_encoder_decoder") or not all(name.endswith(_CAUSAL) for name in names):
        return  # hf does not train it either: the check of the checkpoint says so
    with_megatron, with_hf = (
        [(problem.where, problem.what) for rule in _RULES for problem in rule(there, given) if problem.refused]
        for there in (args, args.replace(train_backend="hf"))
    )
    split = "--tensor-model-parallel-size"  # whether hf splits a model, only the model says; FSDP2 shards any
    out = [split] if args.tensor_model_parallel_size > 1 else []
    out += [flag for flag, what in with_hf if (flag, what) not in with_megatron and split not in flag]
    without = f" without {', '.join(dict.fromkeys(out))}" if out else ""
    how = (config.get("quantization_config") or {}).get("quant_method")
    taken = args.command not in ONLINE or args.debug_train_only or args.weight_sync == RESTART
    read = how is None or (how in ("fp8", "gptq", "awq") and taken)
    whole = "" if read else "convert the quantized weights to bfloat16, and give "
    yield Problem(
        f"the megatron train backend {why}", "--hf-checkpoint", f"{whole}--train-backend hf{without}; or {KNOWN}"
    )


def layout(args: Draft, given: set[str]) -> Iterator[Problem]:
    """What the workers would refuse for the model's sake, and no other rule does."""
    if args.train_backend != "megatron" or args.debug_rollout_only or not (shape := shape_in_file(known_config(args))):
        return
    if problems := refused_by_model(args, shape):
        yield Problem(f"{CANNOT}: {'; '.join(problems)}", WHERE, REMEDY)


RULES = (family, layout)
