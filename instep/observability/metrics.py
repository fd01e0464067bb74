"""The metrics of one rollout, from its samples. `docs/metrics.md` lists every metric name."""

from __future__ import annotations

import math
from collections.abc import Sequence

from instep.types import Group, Status, reward_of


def rollout_metrics(groups: Sequence[Group], *, reward_key: str | None = None) -> dict[str, float]:
    """Return the `rollout/*` metrics of the groups that are trained on.

    Rewards are raw (before any normalization); `reward_std` is the population's, over all samples. The ratio of groups
    with zero reward spread counts groups of two or more rewarded samples. A metric that cannot be computed is left out.
    """
    samples = [s for group in groups for s in group]
    if not samples:
        return {}
    lengths = [s.response_length for s in samples]
    metrics = {
        "rollout/response_length_mean": sum(lengths) / len(lengths),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/truncated_ratio": sum(s.status is Status.TRUNCATED for s in samples) / len(samples),
    }
    by_group = [[reward_of(s, reward_key) for s in g if s.reward is not None] for g in groups]
    rewards = [r for group in by_group for r in group]
    if rewards:
        mean = math.fsum(rewards) / len(rewards)
        metrics["rollout/reward_mean"] = mean
        metrics["rollout/reward_std"] = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    comparable = [group for group in by_group if len(group) > 1]
    if comparable:
        metrics["rollout/zero_std_groups_ratio"] = sum(min(g) == max(g) for g in comparable) / len(comparable)
    return metrics
