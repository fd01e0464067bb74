"""The advantage of GRPO, GSPO, CISPO, SAPO and DAPO, which differ in the loss or in the data."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from instep.algorithms.advantages.groups import relative_to_group

STD_EPS = 1e-6


def grpo(
    rewards: Tensor, group_index: Sequence[int] | Tensor, execution_ids: Sequence[Hashable | None] | None = None
) -> Tensor:
    """Compute A_i = (r_i - mean(group)) / (std(group) + 1e-6), std unbiased (arXiv:2402.03300, section 4.1.2).

    Arguments, result and errors are those of `groups.relative_to_group`.
    """
    return relative_to_group(
        rewards, group_index, execution_ids, lambda r, own, all_: (r - all_.mean()) / (all_.std() + STD_EPS)
    )
