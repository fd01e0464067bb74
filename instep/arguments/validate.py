"""Resolvers complete the arguments of a command line, then rules check them.

A resolver or rule is skipped if it needs a value that could not be read: each mistake is reported once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain

from instep.arguments import (
    asynchronous,
    cluster,
    colocation,
    data,
    debugging,
    evaluation,
    families,
    loggers,
    lora,
    megatron,
    model,
    offline,
    optimizer,
    parallel,
    paths,
    planning,
    reward,
    rollout,
    serving,
)
from instep.arguments.algorithm import critic_rules, distillation
from instep.arguments.algorithm import resolve as algorithm
from instep.arguments.algorithm.rules import COMBINATIONS
from instep.arguments.args import Draft, Unreadable
from instep.arguments.concern import Problem, Resolver
from instep.arguments.engine_rules import api_keys, read_topology, rollout_backend, topology
from instep.arguments.named import name_models
from instep.arguments.parser import Scan
from instep.arguments.roles import read_roles
from instep.neighbours import added

Rules = tuple[Callable[[Draft, set[str]], Iterator[Problem]], ...]

# In this order: each may read what those before it have set.
RESOLVERS: tuple[Resolver, ...] = (
    *model.RESOLVERS,
    *lora.RESOLVERS,
    *serving.RESOLVERS,
    *debugging.RESOLVERS,
    rollout_backend,
    *cluster.RESOLVERS,
    *algorithm.RESOLVERS,
    *distillation.RESOLVERS,
    *data.RESOLVERS,
    *rollout.RESOLVERS,
    *parallel.RESOLVERS,
    *evaluation.RESOLVERS,
    *asynchronous.RESOLVERS,
    *colocation.RESOLVERS,
    *planning.RESOLVERS,
)
# `instep plan` asks only where things go.
PLAN_RULES: Rules = (
    topology,
    critic_rules.size,
    parallel.stages,
    *cluster.PLANNED_RULES,
    *colocation.RULES,
    *planning.RULES,
)
SERVE_RULES: Rules = (
    serving.only_served,
    serving.half_precision,
    *model.SERVED_RULES,
    *paths.RULES,
    topology,
    api_keys,
    *cluster.SERVED_RULES,
)
RULES: Rules = (
    *model.RULES,
    *lora.RULES,
    *paths.RULES,
    serving.only_served,
    serving.half_precision,
    *data.RULES,
    *offline.RULES,
    *COMBINATIONS,
    *rollout.RULES,
    *reward.RULES,
    *distillation.RULES,
    *megatron.RULES,
    *parallel.RULES,
    *families.RULES,
    topology,
    api_keys,
    *cluster.RULES,
    *asynchronous.RULES,
    *colocation.RULES,
    *planning.RULES,
    critic_rules.size,
    critic_rules.critic,
    *optimizer.RULES,
    *evaluation.RULES,
    *loggers.RULES,
    *debugging.RULES,
)


def resolvers() -> Iterator[Resolver]:
    """Those of neighbours, which read flags alone, and `RESOLVERS`."""
    return chain(*added("resolvers"), RESOLVERS)


def complete(args: Draft, scan: Scan) -> list[Problem]:
    """Set every attribute that follows from others or from files; returns what is wrong with the files."""
    given = scan.given
    problems = [
        *_step(scan, "megatron_config", partial(read_roles, args, given)),
        *_step(scan, "vllm_topology", partial(read_topology, args, scan)),
        *_step(scan, "", partial(name_models, args, scan)),
        *_step(
            scan,
            "loss_type eps_clip eps_clip_high use_rollout_logprobs",
            lambda: vars(args).update(algorithm.own_defaults(args, given)),
        ),
    ]
    for resolver in resolvers():
        problems += _step(scan, resolver.__name__, partial(_resolve, args, resolver, scan))
    return problems + _step(scan, "eval_datasets", partial(evaluation.read_datasets, args))


def check(args: Draft, scan: Scan) -> list[Problem]:
    """The problems that the rules of the command find."""
    rules = {"plan": PLAN_RULES, "serve": SERVE_RULES}.get(args.command) or chain(RULES, *added("rules"))
    given = set(scan.given)
    return [problem for rule in rules for problem in _step(scan, "", partial(rule, args, given))]


def _resolve(args: Draft, resolver: Resolver, scan: Scan) -> None:
    setattr(args, resolver.__name__, resolver(args, scan.given))


def _step(scan: Scan, names: str, step: Callable[[], Iterable[Problem] | None]) -> list[Problem]:
    """The problems that a step finds. Where it reads what is unreadable, the attributes `names` become unreadable."""
    problems = list[Problem]()
    try:
        for problem in step() or ():
            problems.append(problem)
    except Unreadable:
        scan.broken.update(names.split())
    return problems
