"""The data source, its buffer and its state."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from instep.data.source import RolloutDataSourceWithBuffer
from instep.errors import CheckpointError, ConfigError, DataError, RolloutError
from instep.types import Sample, Status, VersionSpan
from tests.chat import make_tokenizer
from tests.unit.test_data import rows, write


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def source(path: str, **changes: Any) -> RolloutDataSourceWithBuffer:
    args = {
        "prompt_data": path,
        "prompt_data_weights": None,
        "data_cache_path": None,
        "input_key": "prompt",
        "label_key": "label",
        "metadata_key": "metadata",
        "tool_key": "tools",
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "rollout_max_prompt_len": None,
        "add_bos_token": False,
        "skip_bad_rows": False,
        "trust_remote_code": False,
        "chat_template_text": None,
        "rollout_global_dataset": True,
        "rollout_shuffle": False,
        "rollout_seed": 42,
        "n_samples_per_prompt": 2,
        "buffer_filter_path": None,
        "rm_type": None,
        "custom_rm_path": None,
        "custom_generate_function_path": None,
        "rollout_sample_hook_path": [],
        "rollout_function_path": "instep.rollout.vllm_rollout.generate_rollout",
        "hf_checkpoint": None,
    }
    return RolloutDataSourceWithBuffer(argparse.Namespace(**{**args, **changes}))


def labels(groups: list[list[Sample]]) -> list[int]:
    return [int(g[0].label) for g in groups]


def test_groups_wrap_over_as_many_epochs_as_needed(tmp_path: Path):
    data = source(write(tmp_path / "a.jsonl", rows(3)))
    groups = data.get_samples(8)
    assert labels(groups) == [0, 1, 2, 0, 1, 2, 0, 1] and len(data) == 3
    assert groups[4][1].extra["where"].endswith("a.jsonl, line 2")
    assert [s.group_index for g in groups for s in g] == [i // 2 for i in range(16)]
    assert [s.index for g in groups for s in g] == list(range(16))
    groups[0][0].metadata["i"] = "changed"
    assert groups[0][1].metadata == {"i": 0} and groups[3][0].metadata == {"i": 0}


def test_shuffle_depends_on_seed_and_epoch_only(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", rows(20))
    data = source(path, rollout_shuffle=True)
    one, two = labels(data.get_samples(20)), labels(data.get_samples(20))
    assert sorted(one) == sorted(two) == list(range(20)) and one != two and one != list(range(20))
    again = source(path, rollout_shuffle=True)
    assert labels([g for n in (7, 19, 14) for g in again.get_samples(n)]) == one + two
    assert labels(source(path, rollout_shuffle=True, rollout_seed=43).get_samples(20)) == two  # seed + epoch


def test_state_resumes_exactly_with_the_buffer(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", rows(5))
    data = source(path, rollout_shuffle=True)
    groups = data.get_samples(7)
    groups[2][0].append_response_tokens([5, 6], [-0.5, -1.0], weight_versions=[VersionSpan("3", 0, 2)])
    groups[2][0].status = Status.ABORTED
    groups[2][0].extra["note"] = "kept"
    data.add_samples([groups[2], groups[4]])
    state = json.loads(json.dumps(data.state_dict()))
    cursor = data.cursor()
    groups[2][0].tokens.append(99)  # the state must not see this
    fresh = source(path, rollout_shuffle=True)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    expected, got = data.get_samples(9), fresh.get_samples(9)
    assert got[0][0].tokens == [5, 6] and got[0][0].status is Status.ABORTED
    assert got[0][0].extra == {"note": "kept", "where": expected[0][0].extra["where"]}
    assert got[1] == expected[1] and got[2:] == expected[2:] and got[2][0].group_index == 7
    without = source(path, rollout_shuffle=True)
    without.load_state_dict(cursor)
    assert without.get_samples(7) == expected[2:]


def test_state_does_not_alias_the_samples(tmp_path: Path):
    data = source(write(tmp_path / "a.jsonl", rows(2)))
    data.add_samples(data.get_samples(1))
    state = data.state_dict()
    data.get_samples(1)[0][0].metadata["i"] = "changed"
    assert state["buffer"][0][0]["metadata"] == {"i": 0}
    data.load_state_dict(state)
    data.get_samples(1)[0][0].metadata["i"] = "changed"
    assert state["buffer"][0][0]["metadata"] == {"i": 0}


def test_state_of_other_data_is_refused(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", rows(5))
    with pytest.raises(DataError, match="4 usable prompts, but 5"):
        source(path + "@[:4]").load_state_dict(source(path).state_dict())


def last_first(args: Any, rollout_id: int | None, buffer: list[Any], num_groups: int) -> list[Any]:
    return [buffer.pop() for _ in range(min(num_groups, len(buffer)))]


def too_many(args: Any, rollout_id: int | None, buffer: list[Any], num_groups: int) -> list[Any]:
    return buffer


def test_buffer_comes_first_and_its_filter_is_a_hook(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", rows(9))
    for hook, order in ((None, [0, 1, 2]), (f"{__name__}.last_first", [2, 1, 0])):
        data = source(path, buffer_filter_path=hook)
        data.add_samples(data.get_samples(3))
        assert labels(data.get_samples(2)) == order[:2]
        assert labels(data.get_samples(2)) == [order[2], 3]
    data = source(path, buffer_filter_path=f"{__name__}.too_many")
    data.add_samples(data.get_samples(3))
    with pytest.raises(RolloutError, match="returned a list of 3\n(.*\n)*.*at most 1 groups"):
        data.get_samples(1)


def test_only_whole_groups_are_taken_back(tmp_path: Path):
    data = source(write(tmp_path / "a.jsonl", rows(3)))
    (a, b) = data.get_samples(2)
    for wrong in ([[]], [a[0]], [[a, b]], [[a[0], b[0]]]):
        with pytest.raises(RolloutError):
            data.add_samples(wrong)
    assert data.buffer == []


def test_without_a_data_set(tmp_path: Path):
    data = source("", rollout_global_dataset=False)
    assert len(data) == 0
    with pytest.raises(ConfigError, match="no data set"):
        data.get_samples(1)
    data.add_samples([[Sample(group_index=1, label="5")]])
    assert labels(data.get_samples(1)) == [5]
    data.load_state_dict(data.state_dict())
    with pytest.raises(ConfigError, match="no data to train on"):
        source("")


def test_the_tokenizer_comes_from_the_checkpoint(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    path = write(tmp_path / "a.jsonl", rows(2))
    with pytest.raises(CheckpointError, match="no tokenizer could be loaded"):
        source(path, apply_chat_template=True, hf_checkpoint=str(tmp_path))
    tokenizer.save_pretrained(tmp_path / "hf")
    data = source(path, apply_chat_template=True, rollout_max_prompt_len=100, hf_checkpoint=str(tmp_path / "hf"))
    assert str(data.get_samples(1)[0][0].prompt).endswith("question 0<|im_end|>\n<|im_start|>assistant\n")
