"""`instep plan`, and the memory check at the start of every run on GPUs."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence

from instep.algorithms.catalog import OFFLINE, ONLINE
from instep.arguments.args import Args
from instep.engines.dialect import dialect_of
from instep.errors import ConfigError
from instep.preflight.plan.memory import MARGIN, Gpus, as_json, plan_memory, tables
from instep.preflight.plan.place import GB
from instep.system.options import OptionParser

USAGE = """\
usage: instep plan [train|train-async|sft|dpo] [--json] [--card-profile here|measure|FILE [--mean-response-len N]]
                   [--FLAG ...]

Show where the ranks and engines of a command (default: train) would run, the memory that each GPU needs in each phase,
the tightest phase, and the time of a step. It takes the flags of the command; none is required, and nothing is started.

  --hf-checkpoint DIR         the model (only config.json is needed); without it only the places are shown
  --num-gpus-per-node N       GPUs of a node (default 8)
  --gpu-memory-gb N           memory of a GPU in GiB (default 80)
  --device cpu                without GPUs: plan the memory of a host, and compare it with that of this one
  --rollout-max-prompt-len N, --rollout-max-response-len N    the longest samples; memory and time depend on them
                              (sft: the first limits whole conversations; dpo: prompts)
  --card-profile here         predict a step's seconds by phase, from a profile of this machine (measured in half a
                              minute and saved); measure: measure again; FILE: a profile of another machine
  --mean-response-len N       average tokens of a response (sft: of a conversation); default: the maximum
  --json                      one JSON object instead of tables

If the run cannot fit, the exit code is 2, and the error names flags that save memory. A run on GPUs makes the same
check before it starts anything. docs/plan.md says what is counted, and how accurate it is.

Example
  instep plan --hf-checkpoint Qwen3-4B --train-backend hf --colocate --actor-num-gpus-per-node 1 --precision bf16 \\
    --rollout-max-prompt-len 512 --rollout-max-response-len 2048"""
COMMANDS = (*ONLINE, *OFFLINE)


def own_options(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `instep plan`, and the remaining words: the flags of a run."""
    parser = OptionParser("instep plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--card-profile")
    parser.add_argument("--mean-response-len", type=float)
    return parser.parse_known_args(list(words))


def main(words: list[str]) -> None:
    """Run the command."""
    if "-h" in words or "--help" in words:
        print(USAGE)
    else:
        plan(words)


def plan(words: Sequence[str]) -> None:
    """Print the plan of a command line.

    Raises:
        ConfigError: the command line is wrong, or needs more memory than a GPU has.
    """
    command, words = (f"plan {words[0]}", words[1:]) if words and words[0] in COMMANDS else ("plan", words)
    options, flags = own_options(words)
    from rich.console import Console

    from instep.arguments.config_file import expanded
    from instep.arguments.parse import parse
    from instep.cluster.engine_plan import describe_engines
    from instep.cluster.placement import describe, make_plan, table

    flags = expanded(flags)
    args = parse(flags, command)
    gpus = plan_memory(args)
    placed = make_plan(args)
    device, seconds, step = _seconds(args, options)
    if options.json:
        places = [{"who": who, "node": node, "gpus": where} for who, node, where in describe(placed)]
        found = {"places": places, "memory": as_json(gpus), "seconds": seconds, "step_seconds": step}
        print(json.dumps(found, indent=1))
    else:
        for note in args.notes:
            print(note)
        console = Console()
        console.print(table(placed))
        for part in itertools.chain(describe_engines(args), _assumed(args, flags), tables(gpus)):
            print(part) if isinstance(part, str) else console.print(part)
        if seconds:
            phases = ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items())
            print(f"a step takes about {step:.2f} s on {device}: {phases}")
        elif device:
            print(f"{device}: no seconds without --hf-checkpoint and --rollout-batch-size")
    check(args, gpus)


def _seconds(args: Args, options: argparse.Namespace) -> tuple[str, dict[str, float], float]:
    """Return the device of the profile, a step's seconds by phase, and all of them; empty and 0 without a profile."""
    if options.card_profile is None:
        return "", {}, 0.0
    from instep.preflight.plan.card import card_of
    from instep.preflight.plan.seconds import predict, step_seconds

    card, path = card_of(options.card_profile)
    seconds = predict(args, card, options.mean_response_len)
    return f"{card.device} ({path})", seconds, step_seconds(args, seconds) if seconds else 0.0


def _assumed(args: Args, words: Sequence[str]) -> list[str]:
    """Return lines about the assumed memory of GPUs and the size of micro-batches."""
    if args.hf_checkpoint is None:
        return []
    assumed = f"GPUs are assumed to have {args.gpu_memory_gb:g} GiB (--gpu-memory-gb)"
    out = [] if args.device == "cpu" or _says_memory(words) else [assumed]
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu:
        return [*out, f"micro-batches of up to {args.max_tokens_per_gpu:,} tokens (--max-tokens-per-gpu)"]
    return [*out, f"{args.micro_batch_size} sample(s) in a micro-batch (--micro-batch-size)"]


def _says_memory(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0].replace("_", "-") == "--gpu-memory-gb" for word in words)


def check_launch(args: Args, words: Sequence[str]) -> None:
    """Check the memory of a run on GPUs that is about to start.

    Nothing is checked on a CPU, without a trainer, without a known model, or if `words` have no --gpu-memory-gb. In the
    last case, a note of the arguments says so.

    Raises:
        ConfigError: as in `check`.
    """
    if args.device == "cuda" and not args.debug_rollout_only and _says_memory(words):
        check(args, plan_memory(args))


def check(args: Args, gpus: Sequence[Gpus]) -> None:
    """Check that the plan fits every kind of GPU.

    Raises:
        ConfigError: a GPU needs more than `MARGIN` times its memory, or the KV cache of an engine holds no request.
    """
    kind = next((kind for kind in gpus if kind.is_refused), None)
    if kind is None:
        return
    if (engine := kind.starved) is not None:
        what = f"{engine.spec.name} has room for {engine.tokens:,} tokens of KV cache, but a request may have "
        what += f"{engine.longest:,}"
    else:
        item = max(kind.items, key=lambda item: item.gpu.get(kind.tightest, 0.0))
        what = f"the {kind.tightest} needs about {kind.most / GB:.0f} GB of a {kind.what} that has "
        what += f"{kind.size / GB:.0f}; the largest part is {item.owner}'s {item.name}, "
        what += f"{item.gpu[kind.tightest] / GB:.0f} GB"
    given = " (--gpu-memory-gb)" if kind.what == "GPU" else ""
    where = f"{kind.names} of {kind.size / 2**30:.0f} GiB{given}, planned before anything starts "
    where += f"(refused above {MARGIN:.0%} of a {kind.what})"
    raise ConfigError(what, where=where, remedy=f"use {_savings(args)}; `instep plan` shows what each saves")


def _savings(args: Args) -> str:
    """Return the unused flags that save memory, the cheapest first. Ranks and engines share the memory of a host."""
    megatron, on_gpus = args.train_backend == "megatron", args.device != "cpu"
    tokens, dialect = (args.max_tokens_per_gpu or 2**15) // 2, dialect_of(args)
    possible = {
        "--offload (without --no-offload-train and --no-offload-rollout)": (
            on_gpus and args.colocate and not (args.offload_train and args.offload_rollout)
        ),
        f"another {dialect.flag(dialect.memory)}": on_gpus and args.command not in OFFLINE,
        f"--use-dynamic-batch-size --max-tokens-per-gpu {tokens} or less": tokens >= 512,
        "--recompute-granularity full": args.recompute_granularity != "full",
        "--optimizer adamw_8bit": args.optimizer != "adamw_8bit",
        "--optimizer-cpu-offload": on_gpus and not args.optimizer_cpu_offload,
        "--use-distributed-optimizer": megatron and args.dp_size > 1 and not args.use_distributed_optimizer,
        "more --tensor-model-parallel-size": on_gpus and args.tensor_model_parallel_size < args.actor_num_gpus_per_node,
        "more --actor-num-gpus-per-node": on_gpus,
        "--lora-rank": not on_gpus and not args.lora_rank,
        "a smaller model": not on_gpus,
    }
    return ", ".join(flags for flags, applies in possible.items() if applies)
