"""pass@k of rollouts and evaluations."""

from __future__ import annotations

import itertools
import random

import pytest

from instep.controller.round_metrics import evaluation_metrics
from instep.observability.metrics import pass_rates
from instep.types import RolloutFnEvalOutput, Sample


def rewarded(*groups: list[float]) -> list[tuple[Sample, float]]:
    return [
        (Sample(group_index=g, execution_id=f"{g}.{i}"), r)
        for g, group in enumerate(groups)
        for i, r in enumerate(group)
    ]


def by_all_subsets(groups: list[list[float]], k: int) -> float:
    """The share of the subsets of k responses in which one is right, averaged over the prompts."""
    shares = []
    for group in groups:
        subsets = list(itertools.combinations(group, k))
        shares.append(sum(max(subset) >= 1 for subset in subsets) / len(subsets))
    return sum(shares) / len(shares)


@pytest.mark.parametrize("n", [2, 3, 7, 8])
def test_the_estimator_is_the_mean_over_all_subsets_oracle(n: int):
    rng = random.Random(n)
    groups = [[rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0]) for _ in range(n)] for _ in range(6)] + [[0.0] * n, [1.0] * n]
    out = pass_rates(rewarded(*groups))
    sizes = sorted({k for k in (1, 2, 4, 8) if k <= n} | {n})
    assert list(out) == [f"pass@{k}" for k in sizes]
    for k in sizes:
        assert out[f"pass@{k}"] == pytest.approx(by_all_subsets(groups, k), abs=1e-12)


def test_the_fewest_responses_bound_k_and_one_is_no_pass_rate():
    assert list(pass_rates(rewarded([1.0, 0.0], [0.0] * 5))) == ["pass@1", "pass@2"]
    assert pass_rates(rewarded([1.0], [0.0] * 5)) == {} == pass_rates([])


def test_samples_of_one_execution_are_one_response():
    samples = [(Sample(group_index=0, execution_id=name), r) for name, r in (("a", 0.0), ("a", 1.0), ("b", 0.0))]
    assert pass_rates(samples) == {"pass@1": 0.5, "pass@2": 1.0}
    unnamed = [(Sample(group_index=0), r) for r in (0.0, 1.0, 0.0)]
    assert pass_rates(unnamed)["pass@1"] == pytest.approx(1 / 3)


def test_an_evaluation_has_them_by_data_set_where_they_are_asked_for():
    pairs = rewarded([1.0, 0.0], [0.0, 0.0])
    data = {
        "a": {"rewards": [r for _, r in pairs], "truncated": [], "samples": [s for s, _ in pairs]},
        "b": {"rewards": [1.0, 0.0], "truncated": [], "samples": []},
    }
    out = evaluation_metrics(RolloutFnEvalOutput(data), pass_rate=True)
    assert {name: value for name, value in out.items() if "pass@" in name} == {
        "eval/a/pass@1": 0.25,
        "eval/a/pass@2": 0.5,
    }
    assert not any("pass@" in name for name in evaluation_metrics(RolloutFnEvalOutput(data)))
