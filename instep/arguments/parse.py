"""`parse(argv)` makes `Args` from a command line."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from instep.arguments.all_flags import own_flags, passed_through
from instep.arguments.args import Args, Draft
from instep.arguments.concern import Problem
from instep.arguments.engine_flags import given_words
from instep.arguments.extra import of_user
from instep.arguments.named import fetch
from instep.arguments.parser import scan
from instep.arguments.validate import check, complete
from instep.errors import ConfigError


def parse(argv: Sequence[str], command: str = "train") -> Args:
    """Return the arguments of `instep <command>`, resolved, checked and frozen.

    Raises:
        ConfigError: one error for all mistakes, before anything heavy is loaded.
    """
    found = scan(argv, command)
    acting = {flag.attribute: flag for flag in own_flags().values() if flag.status == "acts"}
    from_path = {name: flag for name, flag in found.flags.items() if flag.passed_to == "megatron"}
    extra = {flag.attribute: flag for flag in of_user().values()} | from_path
    args = Draft(
        found.broken,
        command=command,
        **{name: copy.deepcopy(found.given.get(name, flag.default)) for name, flag in {**extra, **acting}.items()},
        extra_flags=sorted(extra.keys() & found.given.keys()),
        megatron_overrides={
            name: value for name, value in found.given.items() if found.flags[name].name in passed_through()
        },
        vllm_overrides=given_words(found.given, found.flags, "vllm"),
        router_overrides=given_words(found.given, found.flags, "vllm-router"),
    )
    problems = list(dict.fromkeys([*found.problems, *complete(args, found), *check(args, found)]))
    if refused := [problem for problem in problems if problem.refused]:
        raise _error(refused, command)
    if command != "plan":
        fetch(args)
    notes = [f"{p.where}: {p.what}{p.remedy and f'; {p.remedy}'}" for p in problems]
    return Args(**{**vars(args), "notes": [*args.notes, *notes]})


def _error(problems: list[Problem], command: str) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0].what, where=problems[0].where, remedy=problems[0].remedy)
    lines = [
        f"  {i}. {p.where}: {p.what}" + (f"\n     -> {p.remedy}" if p.remedy else "") for i, p in enumerate(problems, 1)
    ]
    return ConfigError(
        f"{len(problems)} things are wrong in this command line\n" + "\n".join(lines),
        where=f"instep {command}",
        remedy=f"correct all of them; `instep {'train' if command == 'plan' else command} --help` explains the flags",
    )
