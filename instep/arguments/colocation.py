"""What trainer and engines free for each other when they take turns on the same GPUs (`--colocate`)."""

from __future__ import annotations

from collections.abc import Iterator

from instep.algorithms.catalog import ONLINE
from instep.arguments.concern import Given, Problem, Settings, flag_name
from instep.weights.way import RESTART, SINGLE_COPY

_NO_TURNS = {
    SINGLE_COPY: "trainer and engine compute with the same weights, so neither can free them",
    RESTART: "an engine that a sync restarts is awake",
}


_NAMES = ("offload_train", "offload_rollout")
OFFLOAD = {"offload", *_NAMES, *(f"no_{name}" for name in _NAMES)}
_KEEP = "a sleeping engine keeps no responses"


def shares_gpus(args: Settings) -> bool:
    """Return whether engines that this run starts and syncs use the trainer's GPUs."""
    both = args.command in ONLINE and not args.debug_train_only and not args.debug_rollout_only
    return bool(both and args.colocate and not args.rollout_external_engine_addrs)


def can_take_turns(args: Settings) -> bool:
    """Return whether trainer and engines share GPUs, and no other flag forbids that they take turns."""
    allowed = args.command != "train-async" and args.weight_sync not in _NO_TURNS and args.pause_mode != "keep"
    return allowed and args.device != "cpu" and shares_gpus(args)


def wanted(args: Settings, given: Given, name: str) -> bool:
    """Return what the flag or `--offload` says; by default, whether they can take turns."""
    if args.command == "train-async":
        return False
    asked = shares_gpus(args) and (name in given or args.offload)
    return f"no_{name}" not in given and (asked or can_take_turns(args))


def turns(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check the offload flags: trainer and engines must share GPUs, and no other process may read the freed memory."""
    if args.command not in ONLINE:
        return
    for name in _NAMES:
        if {name, f"no_{name}"} <= given:
            yield Problem(f"contradicts {flag_name(name)}", flag_name(f"no_{name}"), "give one of the two")
    asked = [flag_name(name) for name in ("offload", *_NAMES) if name in given]
    if asked and not shares_gpus(args):
        what = "has no effect where trainer and engines do not share GPUs (--colocate)"
        yield Problem(what, " and ".join(asked), refused=False)
    elif (args.offload_train or args.offload_rollout) and args.weight_sync in _NO_TURNS:
        where = " and ".join(flag_name(name) for name in _NAMES if getattr(args, name))
        what = _NO_TURNS[args.weight_sync]
        yield Problem(
            what, f"{where} with --weight-sync {args.weight_sync}", "leave it out, or use another --weight-sync"
        )
    elif args.pause_mode == "keep" and args.offload_rollout:
        remedy = "use --pause-mode abort or wait, or leave it out"
        yield Problem(_KEEP, "--offload-rollout with --pause-mode keep", remedy)
    elif args.pause_mode == "keep" and "pause_mode" in given and shares_gpus(args) and args.device == "cuda":
        if "no_offload_rollout" not in given:
            yield Problem(f"{_KEEP}, so engines keep their GPU memory", "--pause-mode keep", refused=False)


RULES = (turns,)
