"""The teacher of on-policy distillation where it is served by an engine, and rewards where it is enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instep.rollout.scorer import ServedScorer
from instep.types import Sample

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


class ServedTeacher(ServedScorer):
    """The one at `--opd-teacher-url`."""

    def __init__(self, url: str, timeout: float):
        where, instead = f"--opd-teacher-url {url}", "load the teacher with --opd-teacher-load"
        super().__init__("the teacher", where, url, timeout, instead)


def served_teacher(args: Settings) -> ServedTeacher | None:
    """That of on-policy distillation, unless it is a model in the workers, or there is none."""
    if not (args.use_opd and args.opd_type == "engine"):
        return None
    return ServedTeacher(str(args.opd_teacher_url), args.rollout_timeout)


async def no_reward(args: Settings, target: Sample | list[Sample]) -> Any:
    """The reward of a run that has none but the teacher: 0."""
    return 0.0 if isinstance(target, Sample) else [0.0] * len(target)


def no_rewards(args: Settings, samples: list[Sample]) -> tuple[list[Any], list[float]]:
    """For --custom-reward-post-process-path: rewards are reported, but only the teacher is learnt from."""
    return [s.reward for s in samples], [0.0] * len(samples)
