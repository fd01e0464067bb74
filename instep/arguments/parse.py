"""`parse(argv)` makes `Args` from a command line."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from instep.algorithms.catalog import OFFLINE
from instep.arguments.all_flags import own_flags, passed_through
from instep.arguments.args import Args, Draft
from instep.arguments.concern import Problem
from instep.arguments.config_file import dump, expanded
from instep.arguments.engine_flags import given_words
from instep.arguments.extra import of_user
from instep.arguments.named import fetch
from instep.arguments.parser import scan
from instep.arguments.suggest import named_flags
from instep.arguments.validate import check, complete
from instep.engines.kind import AUTO
from instep.errors import ConfigError


def parse(argv: Sequence[str], command: str = "train") -> Args:
    """Return the arguments of `instep <command>`, resolved, checked and frozen.

    Args:
        command: such as `sft`. `plan`, or `plan sft`, asks for the arguments of a command that is only planned.

    Raises:
        ConfigError: one error for all mistakes, before anything heavy is loaded.
        SystemExit: `--dump-config` has written its file.
    """
    planned, asked = command.startswith("plan"), command
    command = command.removeprefix("plan").strip() or "train"
    found = scan(expanded(argv), command)
    own = chain(own_flags(sglang=True).values(), own_flags().values())
    acting = {flag.attribute: flag for flag in own if flag.status == "acts"}
    from_path = {name: flag for name, flag in found.flags.items() if flag.passed_to == "megatron"}
    extra = {flag.attribute: flag for flag in of_user().values()} | from_path
    args = Draft(
        found.broken,
        command=command,
        planned=planned,
        **{name: copy.deepcopy(found.given.get(name, flag.default)) for name, flag in {**extra, **acting}.items()},
        extra_flags=sorted(extra.keys() & found.given.keys()),
        megatron_overrides={
            name: value for name, value in found.given.items() if found.flags[name].name in passed_through()
        },
        vllm_overrides=given_words(found.given, found.flags, "vllm"),
        sglang_overrides=given_words(found.given, found.flags, "sglang"),
        router_overrides=given_words(found.given, found.flags, "sglang-router" if found.sglang else "vllm-router"),
        sglang_flags=[flag.name for flag in found.flags.values() if found.sglang and flag.name.startswith("--sglang-")],
    )
    if found.sglang:
        args.rollout_backend = "sglang"
        if found.given.get("rollout_backend", AUTO) == AUTO and command not in OFFLINE:
            what = "means --rollout-backend sglang; --rollout-backend vllm reads the flags with an equivalent there"
            found.problems.append(Problem(what, ", ".join(args.sglang_flags) or "--sglang-*", refused=False))
    problems = list(dict.fromkeys([*found.problems, *complete(args, found), *check(args, found)]))
    problems = [_located(problem, found.places) for problem in problems]
    if refused := [problem for problem in problems if problem.refused]:
        raise _error(refused, asked, command)
    if args.dump_config is not None:
        dump(args.dump_config, asked, found.uses)
        print(f"{args.dump_config}: the flags of this command line")
        raise SystemExit(0)
    if not planned:
        fetch(args)
    notes = [f"{p.where}: {p.what}{p.remedy and f'; {p.remedy}'}" for p in problems]
    return Args(**{**vars(args), "notes": [*args.notes, *notes]})


def _located(problem: Problem, places: Mapping[str, str]) -> Problem:
    """Return the problem with the file and line of its flag, if the flag is from a file."""
    place = next((places[name] for name in named_flags(problem.where) if places.get(name)), "")
    return replace(problem, where=f"{problem.where} ({place})") if place else problem


def _error(problems: list[Problem], asked: str, command: str) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0].what, where=problems[0].where, remedy=problems[0].remedy)
    lines = [
        f"  {i}. {p.where}: {p.what}" + (f"\n     -> {p.remedy}" if p.remedy else "") for i, p in enumerate(problems, 1)
    ]
    return ConfigError(
        f"{len(problems)} things are wrong in this command line\n" + "\n".join(lines),
        where=f"instep {asked}",
        remedy=f"correct all of them; `instep {command} --help` explains the flags",
    )
