"""`instep plan`, and the check of the memory that every run on GPUs begins with."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from instep.plan.advice import check, side_by_side
from instep.plan.memory import as_json, plan_memory, tables
from instep.system.options import OptionParser

if TYPE_CHECKING:
    from instep.arguments.args import Args

USAGE = """\
usage: instep plan [--json] [--card-profile here|measure|FILE [--mean-response-len N]]
                   [--FLAG ...]

Say where the ranks and engines of `instep train` would go, what they need of each GPU in each phase, which phase is the
tightest, and how long a step takes. It takes the flags of `instep train`, needs none and starts nothing.

  --hf-checkpoint DIR         the model: without it only the places are shown; config.json alone is enough
  --num-gpus-per-node N       GPUs of a node (default 8)
  --gpu-memory-gb N           memory of a GPU in GiB (default 80)
  --rollout-max-prompt-len N, --rollout-max-response-len N    the longest samples, which memory and time follow from
  --card-profile here         predict a step's seconds by phase, from a profile of this machine that is measured in half
                              a minute and kept; measure: anew; FILE: one that was kept elsewhere
  --mean-response-len N       tokens of a response on average; default: as many as it may have
  --json                      one JSON object instead of tables

What cannot fit ends with exit code 2, and with the cheapest change of flags that does fit: each was planned, too. A run
on GPUs makes the same check before it starts anything. docs/plan.md says what is counted, and how well it agrees.

Example
  instep plan --hf-checkpoint Qwen3-4B --train-backend hf --colocate --actor-num-gpus-per-node 1 --precision bf16 \\
    --rollout-max-prompt-len 512 --rollout-max-response-len 2048"""


def own_options(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of `instep plan` itself, and the flags of a run."""
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
        ConfigError: it is wrong, or needs more than a GPU has.
    """
    options, flags = own_options(words)
    from rich.console import Console

    from instep.arguments.parse import parse
    from instep.cluster.engine_plan import describe_engines
    from instep.cluster.placement import describe, make_plan, table

    args = parse(flags, "plan")
    gpus = plan_memory(args)
    placed = make_plan(args)
    if options.json:
        places = [{"who": who, "node": node, "gpus": where} for who, node, where in describe(placed)]
        seconds = _seconds(args, options)[1]
        print(json.dumps({"places": places, "memory": as_json(gpus), "seconds": seconds}, indent=1))
    else:
        for note in (*args.notes, *side_by_side(args, gpus, flags, partial(parse, command="plan"))):
            print(note)
        console = Console()
        console.print(table(placed))
        if args.rollout_backend != "auto" or args.device != "cpu":  # else engines of which there is nothing to show
            for part in itertools.chain(describe_engines(args), _said(args, flags), tables(gpus)):
                print(part) if isinstance(part, str) else console.print(part)
        print(_told(*_seconds(args, options)), end="")
    check(gpus, flags, partial(parse, command="plan"))


def _said(args: Args, words: Sequence[str]) -> list[str]:
    """How large micro-batches are, and that the size of the GPUs is assumed."""
    if args.hf_checkpoint is None or args.device == "cpu":
        return []
    assumed = f"GPUs are taken to have {args.gpu_memory_gb:g} GiB (--gpu-memory-gb)"
    return ([] if _says_memory(words) else [assumed]) + _micro_batches(args)


def _says_memory(words: Sequence[str]) -> bool:
    return any(word.partition("=")[0].replace("_", "-") == "--gpu-memory-gb" for word in words)


def _micro_batches(args: Args) -> list[str]:
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu:
        return [f"micro-batches of up to {args.max_tokens_per_gpu:,} tokens (--max-tokens-per-gpu)"]
    return [f"micro-batches of {args.micro_batch_size} samples (--micro-batch-size)"]


def _seconds(args: Args, options: argparse.Namespace) -> tuple[str, dict[str, float]]:
    """The device whose profile is used, and a step's seconds by phase; none without a profile."""
    if options.card_profile is None:
        return "", {}
    from instep.plan.card import card_of
    from instep.plan.seconds import predict

    card, path = card_of(options.card_profile)
    return f"{card.device} ({path})", predict(args, card, options.mean_response_len)


def _told(device: str, seconds: dict[str, float]) -> str:
    if not device:
        return ""
    if not seconds:
        return f"{device}: no seconds without --hf-checkpoint and --rollout-batch-size\n"
    parts = ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items())
    return f"a step takes about {sum(seconds.values()):.2f} s on {device}: {parts}\n"


def check_launch(args: Args, words: Sequence[str]) -> list[str]:
    """Check the memory of a run on GPUs that is about to start; returns notes.

    Nothing is checked on a CPU, without a trainer or a model to plan with, and where `words` do not say the memory of a
    GPU, with --gpu-memory-gb: a note says so.

    Raises:
        ConfigError: a GPU would have to hold more than `MARGIN` times its memory, or an engine no request.
    """
    if args.device != "cuda" or args.debug_rollout_only or not _says_memory(words):
        return []
    from instep.arguments.parse import parse

    gpus, again = plan_memory(args), partial(parse, command=args.command)
    check(gpus, words, again)
    return side_by_side(args, gpus, words, again)
