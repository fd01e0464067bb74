"""Which debugging flags go together."""

from __future__ import annotations

import os
from collections.abc import Iterator

from instep.algorithms.catalog import OFFLINE
from instep.arguments.args import Args
from instep.arguments.parser import Problem

_NEED_A_TRAINER = ("save", "save_hf", "load", "ref_load", "save_debug_train_data")


def derive_debug(args: Args) -> None:
    """--dump-details stands for two dumps; a replay needs no engine."""
    if args.dump_details is not None:
        args.save_debug_rollout_data = args.save_debug_rollout_data or _inside(args, "rollout_data/{rollout_id}.pt")
        if not args.debug_rollout_only:
            train_data = _inside(args, "train_data/{rollout_id}_{rank}.pt")
            args.save_debug_train_data = args.save_debug_train_data or train_data
    args.debug_train_only = args.debug_train_only or args.load_debug_rollout_data is not None
    if args.debug_train_only:
        args.rollout_num_gpus = 0


def _inside(args: Args, name: str) -> str:
    folder = args.dump_details.replace("{", "{{").replace("}", "}}")
    return os.path.join(folder, name)


def debugging(args: Args, given: set[str]) -> Iterator[Problem]:
    """The rule over all of them."""
    if args.debug_rollout_only and args.debug_train_only:
        other = "--load-debug-rollout-data" if args.load_debug_rollout_data else "--debug-train-only"
        yield Problem("nothing would be left to run", f"--debug-rollout-only and {other}", "give one of the two")
    elif args.debug_rollout_only:
        for name in _NEED_A_TRAINER:
            if name in given:
                yield Problem(
                    "there is no trainer with --debug-rollout-only, the engine serves --hf-checkpoint",
                    "--" + name.replace("_", "-"),
                    "leave it out",
                )
    own_rollout = "rollout_function_path" in given or args.command in OFFLINE
    if args.debug_train_only and args.load_debug_rollout_data is None and not own_rollout:
        yield Problem(
            "the default rollout function needs an engine",
            "--debug-train-only",
            "replay rollouts with --load-debug-rollout-data, or name a --rollout-function-path that needs none",
        )
    if args.load_debug_rollout_data_subsample is not None and args.load_debug_rollout_data is None:
        yield Problem(
            "has no effect without --load-debug-rollout-data", "--load-debug-rollout-data-subsample", "give both"
        )
    fields = {"rollout_id": args.start_rollout_id or 0}
    yield from _template(args, "--save-debug-rollout-data", args.save_debug_rollout_data, fields)
    yield from _template(args, "--save-debug-train-data", args.save_debug_train_data, {**fields, "rank": 0})
    problems = list(_template(args, "--load-debug-rollout-data", args.load_debug_rollout_data, fields))
    yield from problems
    if args.load_debug_rollout_data is not None and not problems and args.load is None and args.num_rollout != 0:
        first = args.load_debug_rollout_data.format(**fields)
        if not os.path.isfile(first):
            yield Problem(f"no file {first}", "--load-debug-rollout-data", "name what --save-debug-rollout-data wrote")


def _template(args: Args, flag: str, path: str | None, fields: dict[str, int]) -> Iterator[Problem]:
    if path is None:
        return
    try:
        here, other = path.format(**fields), path.format(**{**fields, "rollout_id": -1})
    except (KeyError, IndexError, ValueError, AttributeError):
        known = " and ".join(f"{{{name}}}" for name in fields)
        yield Problem(f"'{path}' holds another field than {known}", flag, "DIR/{rollout_id}.pt")
        return
    if here == other and args.num_rollout != 1:
        yield Problem(f"'{path}' is one file for all rollouts", flag, "DIR/{rollout_id}.pt")
