"""Complete the arguments of a command line with resolvers, then check them with rules.

A resolver or rule is skipped if it needs an invalid value. So each mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain

from instep.arguments import (
    asynchronous,
    backends,
    cluster,
    colocation,
    commands,
    data,
    debugging,
    engine,
    evaluation,
    loggers,
    lora,
    megatron,
    model,
    optimizer,
    parallel,
    paths,
    planning,
    reward,
    rollout,
)
from instep.arguments.algorithm import critic_rules, distillation
from instep.arguments.algorithm import rules as algorithm
from instep.arguments.algorithm.combination import needing
from instep.arguments.all_flags import groups
from instep.arguments.args import Draft, Unreadable
from instep.arguments.concern import Problem, Resolver
from instep.arguments.named import name_models
from instep.arguments.parser import Scan
from instep.arguments.roles import read_roles
from instep.errors import ConfigError
from instep.system.hooks.neighbours import added

# The order matters: a resolver may read what earlier ones have set. Each module has RESOLVERS, RULES, or both.
CONCERNS = (
    *(model, lora, paths, debugging, engine, cluster, data, commands, algorithm, rollout, reward),
    *(distillation, megatron, parallel, backends, evaluation, asynchronous, colocation, planning, optimizer, loggers),
)
# `instep plan` checks only what the plan depends on.
PLAN_RULES = (
    *(commands.elsewhere, commands.sampling, engine.topology, critic_rules.size, parallel.stages),
    *(*cluster.PLANNED_RULES, *colocation.RULES, *planning.RULES),
)
SERVE_RULES = (commands.elsewhere, *model.SERVED_RULES, *paths.RULES, *engine.RULES, *cluster.SERVED_RULES)


def resolvers() -> Iterator[Resolver]:
    """Yield the resolvers of neighbours, which read only flags, then those of all concerns."""
    return chain(*added("resolvers"), *(getattr(concern, "RESOLVERS", ()) for concern in CONCERNS))


def complete(args: Draft, scan: Scan) -> list[Problem]:
    """Set each attribute that follows from others or from files. Return what is wrong with the files."""
    given = scan.given
    problems = [
        *_step(scan, "megatron_config", partial(read_roles, args, given)),
        *_step(scan, "vllm_topology", partial(engine.read_topology, args)),
        *_step(scan, "", partial(name_models, args, scan)),
        *_step(
            scan,
            "loss_type eps_clip eps_clip_high use_rollout_logprobs",
            lambda: vars(args).update(algorithm.own_defaults(args, given)),
        ),
    ]
    for resolver in resolvers():
        problems += _step(scan, resolver.__name__, partial(_resolve, args, resolver, scan))
    return problems + _step(scan, "", partial(evaluation.read_datasets, args))


def check(args: Draft, scan: Scan) -> list[Problem]:
    """Return the problems that the rules of the command find."""
    of_concerns = chain(*(getattr(concern, "RULES", ()) for concern in CONCERNS), *added("rules"), needing(groups()))
    rules = PLAN_RULES if args.planned else SERVE_RULES if args.command == "serve" else of_concerns
    given = set(scan.given)
    return [problem for rule in rules for problem in _step(scan, "", partial(rule, args, given))]


def _resolve(args: Draft, resolver: Resolver, scan: Scan) -> None:
    setattr(args, resolver.__name__, resolver(args, scan.given))


def _step(scan: Scan, names: str, step: Callable[[], Iterable[Problem] | None]) -> list[Problem]:
    """Return the problems that a step yields, or raises as a ConfigError.

    After a refused problem, or if the step reads an invalid value, the attributes `names` become invalid, too.
    """
    problems = list[Problem]()
    try:
        for problem in step() or ():
            problems.append(problem)
    except ConfigError as error:
        problems.append(Problem(error.what, error.where, error.remedy))
    except Unreadable:
        scan.broken.update(names.split())
    if any(problem.refused for problem in problems):
        scan.broken.update(names.split())
    return problems
