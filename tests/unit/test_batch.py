"""Samples become the flat columns that a trainer gets; those that cannot are named."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from instep.data.batch import build_batch
from instep.errors import RewardError, RolloutError
from instep.types import Sample, Status, VersionSpan


def make_sample(group: int, index: int, num_prompt: int, num_response: int, log_probs: bool = True) -> Sample:
    sample = Sample(group_index=group, index=index, tokens=list(range(num_prompt)), reward=float(index))
    sample.append_response_tokens(
        list(range(10, 10 + num_response)), [-0.1 * (t + 1) for t in range(num_response)] if log_probs else None
    )
    sample.status, sample.sampling_params = Status.COMPLETED, {"temperature": 0.7}
    return sample


def test_build_batch():
    groups = [[make_sample(4, 0, 2, 3), make_sample(4, 1, 2, 1, log_probs=False)], [make_sample(9, 2, 1, 2)]]
    groups[0][0].loss_mask = [1, 0, 1]
    groups[1][0].remove_sample = True
    groups[1][0].sampling_params = {}
    groups[1][0].train_metadata, groups[1][0].extra = {"w": 1}, {"teacher": [1]}
    groups[0][1].execution_id = "mine"
    groups[0][0].weight_versions = [VersionSpan("1", 0, 3)]
    batch = build_batch(groups, default_temperature=0.9)
    assert batch.tokens.tolist() == [0, 1, 10, 11, 12, 0, 1, 10, 0, 10, 11] and batch.tokens.dtype == torch.int64
    assert batch.total_lengths.tolist() == [5, 3, 3] and batch.response_lengths.tolist() == [3, 1, 2]
    assert batch.token_columns["loss_mask"].tolist() == [1, 0, 1, 1, 0, 0]
    engine = batch.token_columns["rollout_log_probs"]
    assert engine.dtype == torch.float32 and engine.isnan().tolist() == [False] * 3 + [True] + [False] * 2
    assert engine[:3].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    columns = batch.sample_columns
    assert columns["temperature"].tolist() == pytest.approx([0.7, 0.7, 0.9])
    assert columns["rewards"].tolist() == [0, 1, 2] and columns["group_index"].tolist() == [4, 4, 9]
    assert columns["index"].tolist() == [0, 1, 2] and columns["status"] == ["completed"] * 3
    assert columns["execution_id"][1] == "mine" and len(set(columns["execution_id"])) == 3
    assert columns["weight_versions"] == [[VersionSpan("1", 0, 3)], [], []]
    assert columns["train_metadata"] == [None, None, {"w": 1}] and columns["extra"][2] == {"teacher": [1]}
    assert batch.select([2]).sample_columns["extra"] == [{"teacher": [1]}]


def test_no_log_probs_no_column_and_no_reward_no_column():
    groups = [[make_sample(0, 0, 1, 2, log_probs=False)]]
    groups[0][0].reward = None
    batch = build_batch(groups, needs_reward=False)
    assert set(batch.token_columns) == {"loss_mask"} and "rewards" not in batch.sample_columns


def test_fan_out_siblings_share_an_execution():
    siblings = [make_sample(0, 0, 1, 2), make_sample(0, 0, 1, 2)]
    for s in siblings:
        s.execution_id = "run"
    assert build_batch([[*siblings, make_sample(0, 1, 1, 1)]]).sample_columns["execution_id"][:2] == ["run", "run"]


FAULTS = [
    ({"response_length": 0}, RolloutError, "response is empty"),
    ({"tokens": [1.5, 2.0, 3.0]}, RolloutError, "tokens hold torch.float32"),
    ({"tokens": [-1, 2, 3]}, RolloutError, "at least -1"),
    ({"tokens": ["a", "b", "c"]}, RolloutError, "not a list of ids"),
    ({"loss_mask": [1, 2]}, RolloutError, "loss_mask holds 2"),
    ({"rollout_log_probs": [-0.1, math.nan]}, RolloutError, r"rollout_log_probs\[1\] is nan"),
    ({"rollout_log_probs": [-0.1, None]}, RolloutError, r"rollout_log_probs\[1\] is None"),
    ({"sampling_params": {"temperature": 0}}, RolloutError, "temperature 0"),
    ({"reward": None}, RewardError, "None is not a finite number"),
    ({"reward": math.nan}, RewardError, "nan is not a finite number"),
    ({"reward": math.inf}, RewardError, "inf"),
    ({"reward": "1.0"}, RewardError, "'1.0'"),
    ({"reward": [1.0]}, RewardError, "not a finite number"),
    ({"reward": {"acc": 1}}, RewardError, "dict with acc"),
]


@pytest.mark.parametrize(("change", "kind", "what"), FAULTS)
def test_a_sample_that_cannot_be_trained_on_is_named(change: dict[str, Any], kind: type, what: str):
    good, bad = make_sample(6, 40, 1, 2), make_sample(6, 41, 1, 2)
    for name, value in change.items():
        setattr(bad, name, value)
    with pytest.raises(kind, match=what) as error:
        build_batch([[good, bad]])
    assert "sample 41" in error.value.where and error.value.remedy


def test_rewards_that_are_dicts_and_masked_unknown_log_probs():
    sample = make_sample(0, 0, 1, 2)
    sample.reward, sample.loss_mask, sample.rollout_log_probs = {"acc": True}, [1, 0], [-0.5, math.nan]
    assert build_batch([[sample]], reward_key="acc").sample_columns["rewards"].tolist() == [1.0]
    with pytest.raises(RewardError, match="acc") as error:
        build_batch([[sample]], reward_key="score")
    assert "'score'" in error.value.remedy


def slow_columns(samples: list[Sample]) -> dict[str, list[float]]:
    """Token by token what the columns hold."""
    out: dict[str, list[float]] = {"tokens": [], "loss_mask": [], "rollout_log_probs": []}
    for s in samples:
        known = s.rollout_log_probs
        for t in range(s.response_length):
            out["loss_mask"].append(0.0 if s.remove_sample else 1.0 if s.loss_mask is None else float(s.loss_mask[t]))
            value = math.nan if known is None else 0.0 if known[t] is None else known[t]
            out["rollout_log_probs"].append(float(np.float32(value)))
        out["tokens"] += map(int, s.tokens)
    return out


def test_oracle_columns_of_samples_of_every_kind():
    """Lists, arrays and numbers of numpy's, tensors, masks of bools, log-probs that are unknown or too large."""
    rng = random.Random(0)
    samples = [make_sample(i // 4, i, rng.randint(1, 9), rng.randint(2, 9), log_probs=i % 5 > 0) for i in range(40)]
    for s in samples:
        s.loss_mask = rng.choice([None, [1] * s.response_length, [rng.randint(0, 1) for _ in range(s.response_length)]])
        s.remove_sample = rng.random() < 0.1
    samples[1].loss_mask, samples[1].rollout_log_probs = np.array([0, 1]), np.array([-0.1, -0.3])
    samples[1].tokens, samples[1].response_length = np.array([4, 2, 3]), 2
    samples[2].tokens = list(np.array(samples[2].tokens))
    samples[3].tokens = torch.tensor(samples[3].tokens)
    samples[4].loss_mask = [True] * samples[4].response_length
    for i, value in ((6, None), (7, math.nan), (8, -math.inf)):
        samples[i].loss_mask, samples[i].remove_sample = [0] + [1] * (samples[i].response_length - 1), False
        samples[i].rollout_log_probs[0] = value
    samples[9].rollout_log_probs[1] = -1e300  # finite, but not in float32
    batch, want = build_batch([samples[i : i + 4] for i in range(0, 40, 4)]), slow_columns(samples)
    assert batch.tokens.tolist() == want["tokens"]
    assert batch.token_columns["loss_mask"].tolist() == want["loss_mask"]
    got = batch.token_columns["rollout_log_probs"].numpy()
    np.testing.assert_array_equal(got, np.array(want["rollout_log_probs"], np.float32))


def test_a_rollout_without_samples_is_refused():
    with pytest.raises(RolloutError):
        build_batch([])
