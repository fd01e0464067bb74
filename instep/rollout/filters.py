"""Dynamic-sampling filters: functions `fn(args, group) -> FilterOutput | bool` that are called after the rewards."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

from instep.hooks import Hook
from instep.rollout.outputs import flatten
from instep.types import Group, reward_of

if TYPE_CHECKING:
    from instep.arguments.settings import HookSettings


@dataclass
class FilterOutput:
    """Whether a group is trained on, and if not, a short name of the reason."""

    keep: bool
    reason: str | None = None


def check_reward_nonzero_std(args: HookSettings, group: Any) -> FilterOutput:
    """Keep groups whose executions differ in reward; others have zero advantage (DAPO, arXiv:2503.14476, section 3.2).

    Fan-out siblings count as one execution, with the mean of their rewards.
    """
    by_execution: dict[Any, list[float]] = {}
    for position, sample in enumerate(flatten(group)):
        by_execution.setdefault(sample.execution_id or position, []).append(reward_of(sample, args.reward_key))
    means = [mean(values) for values in by_execution.values()]  # exact: three times 0.1 is as much as once
    keep = max(means) > min(means)
    return FilterOutput(keep, None if keep else f"zero_std_{means[0]:.1f}")


async def verdict_of(hook: Hook, args: HookSettings, group: Group, where: str = "") -> FilterOutput:
    """Ask a filter about a group.

    Args:
        where: the name of the group in errors; default: its number.

    Raises:
        RolloutError: it raised, or returned neither a bool nor an object with `keep` and `reason`.
    """
    where = where or f"group {group[0].group_index}"
    output, name = await hook.acall(args, group, where=where), hook.path.rpartition(".")[2]
    if isinstance(output, bool):
        return FilterOutput(output, None if output else name)
    try:
        return FilterOutput(bool(output.keep), output.reason or name)
    except AttributeError:
        raise hook.wrong(output, "a bool, or an object with .keep, .reason", where) from None
