"""The command line: `parse(argv) -> Args`. Nothing here imports torch or transformers."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from instep.arguments.all_flags import own_flags, passed_through
from instep.arguments.args import RUNTIME_ATTRIBUTES, Args, EvalDataset, HookArgs
from instep.arguments.engine_flags import given_words
from instep.arguments.engine_rules import read_topology
from instep.arguments.parser import Problem, scan
from instep.arguments.roles import read_roles
from instep.arguments.validate import derive, validate
from instep.errors import ConfigError

__all__ = ["RUNTIME_ATTRIBUTES", "Args", "EvalDataset", "HookArgs", "parse"]


def parse(argv: Sequence[str], command: str = "train") -> Args:
    """The arguments of `instep <command>`, resolved and checked.

    Raises:
        ConfigError: one for everything that is wrong, before anything heavy is loaded.
    """
    found = scan(argv)
    own = own_flags()
    args = Args(command=command)
    for flag in own.values():
        if flag.status == "acts":
            value = found.given.get(flag.attribute, flag.default)
            setattr(args, flag.attribute, copy.deepcopy(value))
    args.megatron_overrides = {
        name: value for name, value in found.given.items() if found.flags[name].name in passed_through()
    }
    args.vllm_overrides = given_words(found.given, found.flags, "vllm")
    args.router_overrides = given_words(found.given, found.flags, "vllm-router")
    problems = [*found.problems, *read_roles(args, found.given), *read_topology(args, found)]
    derive(args, found.given)
    problems += validate(args, found)
    if problems:
        raise _error(problems, command)
    return args


def _error(problems: list[Problem], command: str) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0].what, where=problems[0].where, remedy=problems[0].remedy)
    lines = [
        f"  {i}. {p.where}: {p.what}" + (f"\n     -> {p.remedy}" if p.remedy else "") for i, p in enumerate(problems, 1)
    ]
    return ConfigError(
        f"{len(problems)} things are wrong with this command line\n" + "\n".join(lines),
        where=f"instep {command}",
        remedy=f"mend all of them; `instep {command} --help` explains the flags",
    )
