"""Logging: Weights & Biases, TensorBoard and the samples that are shown."""

from __future__ import annotations

from collections.abc import Iterator

from instep.arguments.concern import Problem, Settings
from instep.arguments.flag import read_flags

LOGGERS = read_flags(__file__)


def wandb(args: Settings, given: set[str]) -> Iterator[Problem]:
    extra = sorted(f.name for f in LOGGERS.flags if f.attribute in given and f.attribute.startswith("wandb_"))
    if extra and not args.use_wandb:
        yield Problem("has no effect without --use-wandb", ", ".join(extra), "give both")


RULES = (wandb,)
