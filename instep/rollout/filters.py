"""Dynamic-sampling filters: functions `fn(args, group) -> DynamicFilterOutput | bool`, called after the rewards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from instep.arguments.settings import HookSettings
from instep.rollout.outputs import flatten
from instep.system.hooks import Hook
from instep.types import Group, as_number, reward_of


@dataclass
class DynamicFilterOutput:
    """Whether a group is trained on, and if not, a short name of the reason.

    Attributes:
        keep_when_insufficient: a rejected group is still trained on if the rollout would otherwise have to begin more
            groups.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def check_reward_nonzero_std(args: HookSettings, group: Any) -> DynamicFilterOutput:
    """Keep groups whose executions differ in reward; others have zero advantage (DAPO, arXiv:2503.14476, section 3.2).

    Fan-out siblings count as one execution, with the mean of their rewards.
    """
    by_execution: dict[Any, list[float]] = {}
    for position, sample in enumerate(flatten(group)):
        by_execution.setdefault(sample.execution_id or position, []).append(reward_of(sample, args.reward_key))
    means = [mean(values) for values in by_execution.values()]  # exact: three times 0.1 is as much as once
    keep = max(means) > min(means)
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{means[0]:.1f}")


def check_reward_nonzero_std_with_fallback(args: HookSettings, group: Any) -> DynamicFilterOutput:
    """Like `check_reward_nonzero_std`, but drop a group only if enough others are finished or under way."""
    return replace(check_reward_nonzero_std(args, group), keep_when_insufficient=True)


async def verdict_of(hook: Hook, args: HookSettings, group: Group, where: str = "") -> DynamicFilterOutput:
    """Ask a filter about a group.

    Args:
        where: the name of the group in errors; default: its number.

    Raises:
        RolloutError: the filter raised, or returned neither true or false nor an object with `keep` and `reason`.
    """
    where = where or f"group {group[0].group_index}"
    output, name = await hook.acall(args, group, where=where), hook.path.rpartition(".")[2]
    if isinstance(output, bool) or (type(output) not in (int, float) and as_number(output) in (0, 1)):  # a tensor's
        return DynamicFilterOutput(bool(output), None if output else name)
    try:
        return DynamicFilterOutput(
            bool(output.keep), output.reason or name, bool(getattr(output, "keep_when_insufficient", False))
        )
    except AttributeError:
        raise hook.wrong(output, "a bool, or an object with .keep, .reason", where) from None
