"""The teacher of on-policy distillation that an engine serves, and hooks for runs that learn from it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instep.engines import keys
from instep.rollout.scorer import ServedScorer
from instep.types import Sample

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


class ServedTeacher(ServedScorer):
    """A client of the teacher at `--opd-teacher-url`."""

    def __init__(self, url: str, timeout: float):
        where, instead = f"--opd-teacher-url {url}", "load the teacher with --opd-teacher-load"
        super().__init__("the teacher", where, url, timeout, instead)


def served_teacher(args: Settings) -> ServedTeacher | None:
    """The client of the teacher; None without one, or if the workers hold it."""
    if not (args.use_opd and args.opd_type == "engine"):
        return None
    keys.know(str(args.opd_teacher_url), keys.given_key(args))
    return ServedTeacher(str(args.opd_teacher_url), args.rollout_timeout)


async def no_reward(args: Settings, target: Sample | list[Sample]) -> Any:
    """For --custom-rm-path: the reward 0, for a run without any other."""
    return 0.0 if isinstance(target, Sample) else [0.0] * len(target)


def no_rewards(args: Settings, samples: list[Sample]) -> tuple[list[Any], list[float]]:
    """For --custom-reward-post-process-path: rewards are reported, but training uses 0 instead."""
    return [s.reward for s in samples], [0.0] * len(samples)
