"""The metrics of one rollout, from its samples. `docs/metrics.md` lists every metric name."""

from __future__ import annotations

import math
from collections.abc import Sequence

from instep.types import Group, Sample, Status, reward_of


def rollout_metrics(groups: Sequence[Group], *, reward_key: str | None = None) -> dict[str, float]:
    """Return the `rollout/*` metrics of the groups that are trained on.

    Rewards are raw (before any normalization); `reward_std` is the population's, over all samples. The ratio of groups
    with zero reward spread counts groups of two or more rewarded samples. Tokens are those of prompts and responses;
    masked are those that are not trained on. A metric that cannot be computed is left out.
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
    if num_tokens := sum(len(s.tokens) for s in samples):
        metrics["rollout/num_tokens"] = float(num_tokens)
        metrics["rollout/masked_ratio"] = 1 - sum(map(num_trained, samples)) / num_tokens
    by_group = [[reward_of(s, reward_key) for s in g if s.reward is not None] for g in groups]
    rewards = [r for group in by_group for r in group]
    if rewards:
        mean = math.fsum(rewards) / len(rewards)
        metrics["rollout/reward_mean"] = mean
        metrics |= {"rollout/reward_min": min(rewards), "rollout/reward_max": max(rewards)}
        metrics["rollout/reward_std"] = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    comparable = [group for group in by_group if len(group) > 1]
    if comparable:
        metrics["rollout/zero_std_groups_ratio"] = sum(min(g) == max(g) for g in comparable) / len(comparable)
    return metrics


def num_trained(sample: Sample) -> int:
    """Return how many tokens of the sample are trained on."""
    if sample.remove_sample:
        return 0
    return sample.response_length if sample.loss_mask is None else sum(map(bool, sample.loss_mask))
