"""The metrics of one rollout, from its samples. `docs/metrics.md` lists every metric name."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from instep.types import Group, Sample, Status, reward_of

SOLVED = 1.0  # the least reward of a response that solves its prompt


def is_step(row: Iterable[str]) -> bool:
    """Return whether a row with these names is of a step: a rollout and the training on it."""
    return any(name.startswith(("rollout/", "train/")) for name in row)


def rollout_metrics(groups: Sequence[Group], *, reward_key: str | None = None) -> dict[str, float]:
    """Return the `rollout/*` metrics of the trained groups.

    Rewards are raw (before any normalization); `reward_std` is the population's, over all samples. The ratio of groups
    with zero reward spread counts groups of two or more rewarded samples. Tokens include prompts and responses;
    masked tokens are not trained on. A metric that cannot be computed is left out.
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
    """Return the number of trained tokens of the sample."""
    if sample.remove_sample:
        return 0
    return sample.effective_response_length


def pass_rates(samples: Iterable[tuple[Sample, float]]) -> dict[str, float]:
    """Return `pass@k`: the probability that at least one of k responses to a prompt has a reward of 1 or more.

    It is the mean over the prompts of 1 - C(n - c, k) / C(n, k), which is unbiased; c of n responses solve the prompt
    (Chen et al., arXiv 2107.03374). Samples of one execution count as one response, which solves the prompt if one of
    them does. k is 1, 2, 4, ... and n, the fewest responses of a prompt; the result is empty if n is 1.

    Args:
        samples: samples with their rewards.
    """
    prompts: dict[int | None, dict[str | int, bool]] = defaultdict(dict)
    for number, (sample, reward) in enumerate(samples):
        responses, name = prompts[sample.group_index], sample.execution_id or number
        responses[name] = responses.get(name, False) or reward >= SOLVED
    counts = [(len(responses), sum(responses.values())) for responses in prompts.values()]
    fewest = min((n for n, _ in counts), default=1)
    if fewest < 2:
        return {}
    sizes = sorted({*(1 << i for i in range(fewest.bit_length())), fewest})
    return {
        f"pass@{k}": math.fsum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts) / len(counts)
        for k in sizes
    }
