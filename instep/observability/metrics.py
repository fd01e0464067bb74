"""Metrics of one rollout, from its samples. `docs/metrics.md` lists every metric name."""

from __future__ import annotations

import math
from collections.abc import Sequence

from instep.errors import ConfigError
from instep.types import Group, Sample, Status


def sample_reward(sample: Sample, reward_key: str | None = None) -> float | None:
    """The sample's reward as one number; None if it has none.

    Raises:
        ConfigError: the reward is a dict, and `reward_key` is not given or not in it.
    """
    reward = sample.reward
    if isinstance(reward, dict):
        if reward_key is None or reward_key not in reward:
            raise ConfigError(
                f"the reward is a dict with the keys {sorted(reward)}, but --reward-key is {reward_key!r}",
                where=f"sample {sample.index} of group {sample.group_index}",
                remedy="name one of these keys with --reward-key (evaluation: --eval-reward-key)",
            )
        reward = reward[reward_key]
    return None if reward is None else float(reward)


def rollout_metrics(
    groups: Sequence[Group], *, reward_key: str | None = None, num_dropped_groups: int = 0
) -> dict[str, float]:
    """The `rollout/*` metrics of the groups that are trained on.

    Rewards are raw (before any normalization); `reward_std` is the population's, over all samples. The ratio of groups
    with zero reward spread is over groups of two and more rewarded samples. Whatever cannot be computed (rewards in a
    rollout without any, everything in an empty one) is left out, never made up.
    """
    samples = [s for group in groups for s in group]
    metrics = {"rollout/num_dropped_groups": float(num_dropped_groups)}
    if not samples:
        return metrics
    lengths = [s.response_length for s in samples]
    metrics["rollout/response_length_mean"] = sum(lengths) / len(lengths)
    metrics["rollout/response_length_max"] = float(max(lengths))
    metrics["rollout/truncated_ratio"] = sum(s.status is Status.TRUNCATED for s in samples) / len(samples)
    by_group = [[r for s in g if (r := sample_reward(s, reward_key)) is not None] for g in groups]
    rewards = [r for group in by_group for r in group]
    if rewards:
        mean = math.fsum(rewards) / len(rewards)
        metrics["rollout/reward_mean"] = mean
        metrics["rollout/reward_std"] = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    comparable = [group for group in by_group if len(group) > 1]
    if comparable:
        metrics["rollout/zero_std_groups_ratio"] = sum(min(g) == max(g) for g in comparable) / len(comparable)
    return metrics
