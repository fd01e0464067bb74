"""Dr. GRPO's advantage: the group's mean as baseline, and no division by its std."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from instep.algorithms.advantages.groups import relative_to_group


def dr_grpo(
    rewards: Tensor, group_index: Sequence[int] | Tensor, execution_ids: Sequence[Hashable | None] | None = None
) -> Tensor:
    """Compute A_i = r_i - mean(group) (arXiv:2503.20783).

    A division by the std would give more weight to questions that are almost always or almost never solved. Arguments,
    result and errors are those of `groups.relative_to_group`.
    """
    return relative_to_group(rewards, group_index, execution_ids, lambda r, own, all_: r - all_.mean())
