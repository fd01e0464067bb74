"""Debugging: runs without trainer or engines, dumps and their replay, alarms, the trial of hooks."""

from __future__ import annotations

import os
from collections.abc import Iterator

from instep.algorithms.catalog import OFFLINE
from instep.arguments.concern import Given, Problem, Settings, flag_name
from instep.arguments.flag import read_flags

_NEED_A_TRAINER = ("save", "save_hf", "load", "ref_load", "save_debug_train_data")

DEBUGGING = read_flags(__file__)


# ---- what follows from the flags -------------------------------------------------------------------------------------


def save_debug_rollout_data(args: Settings, given: Given) -> str | None:
    return args.save_debug_rollout_data or _inside(args.dump_details, "rollout_data/{rollout_id}.pt")


def save_debug_train_data(args: Settings, given: Given) -> str | None:
    name = "train_data/{rollout_id}_{rank}.pt"
    return args.save_debug_train_data or (None if args.debug_rollout_only else _inside(args.dump_details, name))


def debug_rollout_only(args: Settings, given: Given) -> bool:
    """Return True also for `instep serve`: it has no trainer, so the plan must not reserve GPUs for one."""
    return args.debug_rollout_only or args.command == "serve"


def debug_train_only(args: Settings, given: Given) -> bool:
    """Return True also for a replay: it needs no engine."""
    return args.debug_train_only or args.load_debug_rollout_data is not None


def _inside(folder: str | None, name: str) -> str | None:
    """Return the template of a dump inside the folder of `--dump-details`. Braces of the folder's name are escaped."""
    return None if folder is None else os.path.join(folder.replace("{", "{{").replace("}", "}}"), name)


RESOLVERS = (debug_rollout_only, save_debug_rollout_data, save_debug_train_data, debug_train_only)

# ---- rules -----------------------------------------------------------------------------------------------------------


def parts(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that only one of trainer and engine is left out, and that no given flag needs it."""
    if args.debug_rollout_only and args.debug_train_only:
        other = "--load-debug-rollout-data" if args.load_debug_rollout_data else "--debug-train-only"
        yield Problem("nothing would be left to run", f"--debug-rollout-only and {other}", "give one of the two")
    elif args.debug_rollout_only:
        what = "--debug-rollout-only has no trainer; the engine serves --hf-checkpoint"
        for name in _NEED_A_TRAINER:
            if name in given:
                yield Problem(what, flag_name(name), "leave it out")
    own_rollout = "rollout_function_path" in given or args.command in OFFLINE
    if args.debug_train_only and args.load_debug_rollout_data is None and not own_rollout:
        what = "the default rollout function needs an engine"
        remedy = "replay rollouts with --load-debug-rollout-data, or give a --rollout-function-path without engines"
        yield Problem(what, "--debug-train-only", remedy)


def dumps(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check the names of the files that rollouts are written to and replayed from."""
    fields = {"rollout_id": args.start_rollout_id or 0}
    yield from _template(args, "--save-debug-rollout-data", args.save_debug_rollout_data, fields)
    yield from _template(args, "--save-debug-train-data", args.save_debug_train_data, {**fields, "rank": 0})
    problems = list(_template(args, "--load-debug-rollout-data", args.load_debug_rollout_data, fields))
    yield from problems
    if args.load_debug_rollout_data is not None and not problems and args.load is None and args.num_rollout != 0:
        first = args.load_debug_rollout_data.format(**fields)
        if not os.path.isfile(first):
            yield Problem(f"no file {first}", "--load-debug-rollout-data", "name what --save-debug-rollout-data wrote")


def _template(args: Settings, flag: str, path: str | None, fields: dict[str, int]) -> Iterator[Problem]:
    if path is None:
        return
    try:
        here, other = path.format(**fields), path.format(**{**fields, "rollout_id": -1})
    except (KeyError, IndexError, ValueError, AttributeError):
        known = " and ".join(f"{{{name}}}" for name in fields)
        yield Problem(f"'{path}' has another field than {known}", flag, "write it like DIR/{rollout_id}.pt")
        return
    if here == other and args.num_rollout != 1:
        yield Problem(f"'{path}' is one file for all rollouts", flag, "write it like DIR/{rollout_id}.pt")


def profile(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that `--profile` has rollouts to record."""
    start, end = args.profile_step_start, args.profile_step_end
    if not args.profile:
        for name in ("profile_step_start", "profile_step_end", "profile_ranks"):
            if name in given:
                yield Problem("has no effect without --profile", flag_name(name), "give both", refused=False)
    elif end <= start:
        yield Problem(f"ends before rollout {start}, the first that it records", "--profile-step-end", "raise it")
    elif args.num_rollout is not None and start >= args.num_rollout:
        what = f"the first rollout to record is {start}, but the last of the run is {args.num_rollout - 1}"
        yield Problem(what, "--profile", "lower --profile-step-start (numbers count from 0)")


RULES = (parts, dumps, profile)
