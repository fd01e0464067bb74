"""Sample: alignment of its columns, round trips, the seeds' spellings; TokenBatch.select."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from instep.types import Sample, Status, TokenBatch, VersionSpan


def test_append_keeps_all_columns_aligned():
    sample = Sample(tokens=[1, 2, 3])
    sample.append_response_tokens([4, 5], [-0.5, -0.25], weight_versions=[VersionSpan("1", 0, 2)])
    assert sample.loss_mask == [1, 1] and sample.prompt_length == 3 and sample.effective_response_length == 2
    sample.append_response_tokens([6, 7], trainable=False)
    sample.append_response_tokens([8], [-1.0], weight_versions=[VersionSpan("1", 0, 1)])
    sample.append_response_tokens(
        [9, 10], [-2.0, -3.0], weight_versions=[VersionSpan("1", 0, 1), VersionSpan("2", 1, 2)]
    )
    assert sample.tokens == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert sample.response_length == 7 and sample.prompt_length == 3
    assert sample.loss_mask == [1, 1, 0, 0, 1, 1, 1]
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, 0.0, -1.0, -2.0, -3.0]
    spans = [(s.version, s.start, s.end) for s in sample.weight_versions]
    assert spans == [("1", 0, 2), ("1", 4, 6), ("2", 6, 7)]
    assert sample.effective_response_length == 5 and Sample(response_length=3).effective_response_length == 3


def test_tokens_of_no_known_version_are_as_old_as_their_group():
    sample = Sample(tokens=[1], begun_version=3)
    sample.append_response_tokens([4, 5], [-1.0, -1.0])
    sample.append_response_tokens([6], trainable=False)
    sample.append_response_tokens([7], [-1.0], weight_versions=[VersionSpan("5", 0, 1)])
    sample.append_response_tokens([8], [-1.0])
    assert [(s.version, s.start, s.end) for s in sample.version_spans] == [("3", 0, 3), ("5", 3, 4), ("3", 4, 5)]
    assert [s.version for s in sample.weight_versions] == ["5"]  # nothing is said that nobody knows
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))).version_spans == sample.version_spans
    sample.begun_version = None
    assert sample.version_spans == sample.weight_versions


def test_a_response_that_begins_with_tool_tokens():
    sample = Sample(tokens=[1])
    sample.append_response_tokens([2, 3], trainable=False)
    sample.append_response_tokens([4], [-1.0])
    assert sample.loss_mask == [0, 0, 1] and sample.rollout_log_probs == [0.0, 0.0, -1.0]
    begun = Sample(tokens=[1, 2, 3], response_length=2)  # without a mask, which means that all of it is trained on
    begun.append_response_tokens([4], trainable=False)
    assert begun.loss_mask == [1, 1, 0]


def test_append_in_slimes_form():
    args, sample = SimpleNamespace(reward_key=None), Sample(tokens=[1], loss_mask=[], response="a")
    mask = sample.loss_mask  # slime's examples keep a second name for it
    said = {"finish_reason": {"type": "stop"}, "weight_version": 3}
    sample.append_response_tokens(
        args, tokens=torch.tensor([2, 3]), log_probs=torch.tensor([-0.5, -0.25]), meta_info=said, text="b"
    )
    sample.append_response_tokens(args, tokens=[4], trainable=False, text="c")
    assert (sample.tokens, sample.response_length, sample.response) == ([1, 2, 3, 4], 3, "abc")
    assert mask is sample.loss_mask and mask == [1, 1, 0] and sample.rollout_log_probs == [-0.5, -0.25, 0.0]
    assert sample.status is Status.COMPLETED and sample.weight_versions == [VersionSpan("3", 0, 2)]
    for reason, status in (
        ("length", Status.TRUNCATED),
        ({"type": "abort"}, Status.ABORTED),
        ("other", Status.ABORTED),
    ):
        sample.append_response_tokens(args, tokens=[], log_probs=[], meta_info={"finish_reason": reason})
        assert sample.status is status and sample.response_length == 3
    sample.append_response_tokens(meta_info={"finish_reason": "stop"}, update_terminal_info=False)
    assert sample.status is Status.ABORTED
    fresh = Sample()
    fresh.append_response_tokens(args, tokens=[], log_probs=[], meta_info={"finish_reason": {"type": "abort"}})
    assert (fresh.rollout_log_probs, fresh.loss_mask, fresh.status) == ([], [], Status.ABORTED)


def test_the_value_of_a_reward_and_slimes_name_of_an_execution():
    plain, keyed = SimpleNamespace(reward_key=None), SimpleNamespace(reward_key="score")
    assert Sample(reward=0.5).get_reward_value(plain) == 0.5
    assert Sample(reward={"score": 2.0, "other": 0}).get_reward_value(keyed) == 2.0
    with pytest.raises(KeyError):
        Sample(reward={"other": 0}).get_reward_value(keyed)
    sample = Sample()
    assert sample.rollout_id is None
    sample.rollout_id = 7
    assert sample.execution_id == sample.rollout_id == "7"


def test_append_without_log_probs_keeps_them_unknown():
    sample = Sample(tokens=[1])
    sample.append_response_tokens([2, 3])
    sample.append_response_tokens([4], trainable=False)
    sample.append_response_tokens([5])
    assert sample.rollout_log_probs is None and sample.loss_mask == [1, 1, 0, 1]


@pytest.mark.parametrize("first", [[-0.5], None])
def test_append_refuses_to_mix_known_and_unknown_log_probs(first: list[float] | None):
    sample = Sample(tokens=[1])
    sample.append_response_tokens([2], first)
    with pytest.raises(ValueError, match="all trainable parts"):
        sample.append_response_tokens([3], None if first else [-0.5])
    assert sample.tokens == [1, 2] and sample.response_length == 1


def test_append_refuses_lengths_that_differ():
    sample = Sample(tokens=[1])
    with pytest.raises(ValueError, match="2 tokens but 1 log-probs"):
        sample.append_response_tokens([2, 3], [-0.5])
    with pytest.raises(ValueError, match="not trainable"):
        sample.append_response_tokens([2], [-0.5], trainable=False)
    sample = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1])
    with pytest.raises(ValueError, match="loss_mask has 1 entries for 2"):
        sample.append_response_tokens([4], [-0.5])


def test_round_trip_through_json_with_unknown_fields():
    sample = Sample(group_index=3, index=12, execution_id="e", tokens=[1], label={"a": 1}, metadata={"k": [1, 2]})
    sample.append_response_tokens([2, 3], [-0.5, -0.25], weight_versions=[VersionSpan("7", 0, 2)])
    sample.reward, sample.status, sample.sampling_params = {"score": 1.0}, Status.TRUNCATED, {"temperature": 0.7}
    sample.extra = {"teacher_log_probs": [0.1, 0.2]}
    data = json.loads(json.dumps(sample.to_dict()))
    assert data["teacher_log_probs"] == [0.1, 0.2] and data["status"] == "truncated"
    again = Sample.from_dict(data)
    assert again == sample
    assert again.weight_versions == [VersionSpan("7", 0, 2)] and again.extra == sample.extra
    assert Sample.from_dict({}) == Sample()


def test_attributes_that_hooks_have_set_come_back_as_attributes():
    sample = Sample(group_index=3, extra={"where": "a.jsonl:1"})
    sample.turns, sample.score = [1, 2], 0.5
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert (again.turns, again.score, again.extra) == ([1, 2], 0.5, {"where": "a.jsonl:1"})
    assert vars(Sample.from_dict(again.to_dict())) == vars(sample)
    assert "hook_attributes" not in Sample().to_dict() and not hasattr(again, "where")


@pytest.mark.parametrize(("flag", "status"), [("truncated", Status.TRUNCATED), ("aborted", Status.ABORTED)])
def test_the_seeds_older_spellings_set_the_status(flag: str, status: Status):
    sample = Sample()
    assert getattr(sample, flag) is False
    setattr(sample, flag, True)
    assert sample.status is status and getattr(sample, flag) is True
    setattr(sample, flag, False)
    assert sample.status is Status.COMPLETED
    sample.status = Sample.Status.FAILED
    setattr(sample, flag, False)  # says nothing about a failure
    assert sample.status is Status.FAILED
    assert Sample.Status("aborted") is Status.ABORTED


def test_select_picks_whole_samples_in_any_order():
    batch = TokenBatch(
        tokens=torch.arange(9),
        total_lengths=torch.tensor([2, 4, 3]),
        response_lengths=torch.tensor([1, 3, 2]),
        token_columns={"loss_mask": torch.arange(6).float()},
        sample_columns={"rewards": torch.tensor([0.1, 0.2, 0.3]), "status": ["a", "b", "c"]},
    )
    picked = batch.select([2, 0])
    assert picked.tokens.tolist() == [6, 7, 8, 0, 1] and picked.num_samples == 2
    assert picked.total_lengths.tolist() == [3, 2] and picked.response_lengths.tolist() == [2, 1]
    assert picked.token_columns["loss_mask"].tolist() == [4, 5, 0]
    assert picked.sample_columns["rewards"].tolist() == pytest.approx([0.3, 0.1])
    assert picked.sample_columns["status"] == ["c", "a"]
    none = batch.select([])
    assert none.num_samples == 0 and none.tokens.numel() == 0 and none.sample_columns["status"] == []
    assert batch.to("cpu").sample_columns["status"] == ["a", "b", "c"]
