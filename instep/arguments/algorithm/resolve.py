"""Defaults of the algorithm's flags: those that the algorithm sets, and bounds that follow from other flags."""

from __future__ import annotations

import os
from typing import Any

from instep.algorithms.catalog import algorithm_of
from instep.arguments.concern import Given, Settings


def own_defaults(args: Settings, given: Given) -> dict[str, Any]:
    """Return the algorithm's defaults for flags that are not given, by attribute."""
    algorithm = algorithm_of(args)
    defaults = {"loss_type": algorithm.loss.type, **algorithm.defaults}
    kept = {*given, "eps_clip_high"} if "eps_clip" in given else given
    return {name: value for name, value in defaults.items() if name not in kept}


def eps_clip_high(args: Settings, given: Given) -> float:
    return args.eps_clip if args.eps_clip_high is None else args.eps_clip_high


def rs_lower_bound(args: Settings, given: Given) -> float:
    return args.tis_clip_low if args.rs_lower_bound is None else args.rs_lower_bound


def rs_upper_bound(args: Settings, given: Given) -> float:
    return args.tis_clip if args.rs_upper_bound is None else args.rs_upper_bound


# ---- names under which slime's examples read these attributes --------------------------------------------------------


def tis_lower_bound(args: Settings, given: Given) -> float:
    return args.tis_clip_low


def tis_upper_bound(args: Settings, given: Given) -> float:
    return args.tis_clip


def tis_batch_normalize(args: Settings, given: Given) -> bool:
    return False


def critic_load(args: Settings, given: Given) -> str | None:
    """Return the path; None if it is `--critic-save` without a checkpoint yet: a run may begin with both flags."""
    path = args.critic_load
    if path is None or args.critic_save is None or os.path.realpath(path) != os.path.realpath(args.critic_save):
        return path
    begun = any(os.path.exists(os.path.join(path, n)) for n in ("config.json", "latest_checkpointed_iteration.txt"))
    return path if begun else None


RESOLVERS = (
    *(critic_load, eps_clip_high, rs_lower_bound, rs_upper_bound),
    *(tis_lower_bound, tis_upper_bound, tis_batch_normalize),
)
