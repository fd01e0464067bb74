"""What follows for the algorithm's flags from those that are given."""

from __future__ import annotations

from collections.abc import Collection

from instep.algorithms.catalog import algorithm_of
from instep.arguments.args import Args


def resolve_algorithm(args: Args, given: Collection[str]) -> None:
    """Fill in the defaults that are the algorithm's own, bounds that are not given, and slime's names of ours.

    Args:
        given: the attributes of the flags that the user gave.
    """
    algorithm = algorithm_of(args)
    for name, value in {"loss_type": algorithm.loss.type, **algorithm.defaults}.items():
        if name not in given and not (name == "eps_clip_high" and "eps_clip" in given):
            setattr(args, name, value)
    args.eps_clip_high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    args.tis_lower_bound, args.tis_upper_bound, args.tis_batch_normalize = args.tis_clip_low, args.tis_clip, False
    args.rs_lower_bound = args.tis_clip_low if args.rs_lower_bound is None else args.rs_lower_bound
    args.rs_upper_bound = args.tis_clip if args.rs_upper_bound is None else args.rs_upper_bound
