"""The teacher of on-policy distillation on an engine, and hooks for runs that learn only from it."""

from __future__ import annotations

from typing import Any

from instep.arguments.settings import Settings
from instep.engines import keys
from instep.rollout.scorer import ServedScorer
from instep.types import Sample


def served_teacher(args: Settings) -> ServedScorer | None:
    """Return the client of the teacher at `--opd-teacher-url`; None without one, or if the workers hold it."""
    if not (args.use_opd and args.opd_type == "engine"):
        return None
    keys.know(str(args.opd_teacher_url), keys.given_key(args))
    return teacher_at(str(args.opd_teacher_url), args.rollout_timeout)


def teacher_at(url: str, timeout: float) -> ServedScorer:
    where, instead = f"--opd-teacher-url {url}", "load the teacher with --opd-teacher-load"
    return ServedScorer("the teacher", where, url, timeout, instead)


async def no_reward(args: Settings, target: Sample | list[Sample]) -> Any:
    """Return the reward 0 (--custom-rm-path), for a run without any other reward."""
    return 0.0 if isinstance(target, Sample) else [0.0] * len(target)


def no_rewards(args: Settings, samples: list[Sample]) -> tuple[list[Any], list[float]]:
    """Train on 0 instead of the rewards, which are only reported (--custom-reward-post-process-path)."""
    return [s.reward for s in samples], [0.0] * len(samples)
