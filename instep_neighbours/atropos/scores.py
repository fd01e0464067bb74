"""Advantages as in Atropos' trainer, for two hooks of a run with its environments.

`--custom-reward-post-process-path instep_neighbours.atropos.normalized_scores` compares scores like that trainer.
`--custom-advantage-function-path instep_neighbours.atropos.advantages` does, too, and uses the advantages of tokens if
a group has them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from instep.types import Sample, reward_of
from instep_neighbours.atropos.groups import EXTRA

if TYPE_CHECKING:
    from instep.arguments.settings import HookSettings

MIN_STD = 1e-8


def normalized_scores(args: HookSettings, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Return the scores, and (score - mean) / max(std, 1e-8) within each group, with the std of the population.

    As in Atropos' example_trainer, a group of one keeps its score. Samples with `set_advantage_to_zero` count in mean
    and std.
    """
    scores = [reward_of(sample) for sample in samples]
    members: dict[int | None, list[int]] = {}
    for i, sample in enumerate(samples):
        members.setdefault(sample.group_index, []).append(i)
    out = list(scores)
    for group in members.values():
        if len(group) > 1:
            mean = math.fsum(scores[i] for i in group) / len(group)
            std = math.sqrt(math.fsum((scores[i] - mean) ** 2 for i in group) / len(group))
            for i in group:
                out[i] = (scores[i] - mean) / max(std, MIN_STD)
    for i, sample in enumerate(samples):
        if sample.extra.get(EXTRA, {}).get("zero"):
            out[i] = 0.0
    return scores, out


def advantages(args: HookSettings, rollout_data: dict[str, Any]) -> None:
    """Set `rollout_data["advantages"]`: those of a group's tokens if it has them, otherwise its normalized scores."""
    import torch

    samples, lengths = rollout_data["samples"], rollout_data["response_lengths"]
    values = normalized_scores(args, samples)[1]
    rows = []
    for sample, value, length in zip(samples, values, lengths, strict=True):
        given = None if sample.extra.get(EXTRA, {}).get("zero") else sample.extra.get(EXTRA, {}).get("advantages")
        rows.append(torch.full((length,), value) if given is None else torch.tensor(given, dtype=torch.float32))
    rollout_data["advantages"] = rows
