"""MaxRL's advantage: with more samples, its policy gradient converges to maximum likelihood of success."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from instep.algorithms.advantages.groups import relative_to_group


def max_rl(
    rewards: Tensor, group_index: Sequence[int] | Tensor, execution_ids: Sequence[Hashable | None] | None = None
) -> Tensor:
    """Compute A_i = (r_i - mean(group)) / mean(group), 0 if the mean is 0 (arXiv:2602.02710).

    For rewards of 0 and 1 with K successes of N this is N/K - 1 for a success and -1 for a failure: the mean of the
    score function over the successes minus its mean over all samples, a control variate. Arguments, result and errors
    are those of `groups.relative_to_group`.

    Raises:
        ValueError: also for a negative reward: then the mean is not a success rate.
    """
    if bool((rewards < 0).any()):
        row = int((rewards < 0).nonzero()[0])
        raise ValueError(f"the reward {rewards[row].item():g} (group {int(group_index[row])}) is below 0; max_rl needs "
                         "rewards of success, from 0 to 1")  # fmt: skip

    def formula(r: Tensor, own: Tensor, all_: Tensor) -> Tensor:
        mean = all_.mean()
        return (r - mean) / mean if mean > 0 else torch.zeros_like(r)

    return relative_to_group(rewards, group_index, execution_ids, formula)
