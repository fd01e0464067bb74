"""The names of slime's `slime.rollout.rm_hub`, for users' functions."""

from __future__ import annotations

from typing import Any

from instep.arguments.settings import HookSettings
from instep.rollout.rewards.dispatch import compute_reward
from instep.rollout.rm_hub.math_utils import grade_answer_verl
from instep.types import Group, Sample

__all__ = ["async_rm", "batched_async_rm", "grade_answer_verl"]


async def async_rm(args: HookSettings, sample: Sample) -> Any:
    """Return the reward of a sample by --custom-rm-path or --rm-type. Raises: as `compute_reward`."""
    return await compute_reward(args, sample)


async def batched_async_rm(args: HookSettings, samples: Group) -> list[Any]:
    """Return the rewards of samples; a function of --custom-rm-path gets all at once. Raises: as `compute_reward`."""
    rewards: list[Any] = await compute_reward(args, samples) if samples else []
    return rewards
