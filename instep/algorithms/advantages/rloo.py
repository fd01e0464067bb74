"""RLOO's advantage: the mean of the other samples is the baseline."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from instep.algorithms.advantages.groups import relative_to_group


def rloo(
    rewards: Tensor, group_index: Sequence[int] | Tensor, execution_ids: Sequence[Hashable | None] | None = None
) -> Tensor:
    """Compute A_i = r_i - mean(r_j, j != i, of the group), unbiased (arXiv:2402.14740).

    A fan-out sample is compared with the other executions. Arguments, result and errors are those of
    `groups.relative_to_group`.
    """
    return relative_to_group(
        rewards, group_index, execution_ids, lambda r, own, all_: r - (all_.sum() - own) / (all_.numel() - 1)
    )
