"""Data files and their faults, the data source and its state, chat masks, batches, hooks."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from instep.data.batch import build_batch
from instep.data.chat import response_length, tokenize_conversation
from instep.data.dataset import check_file, load_dataset
from instep.data.source import RolloutDataSourceWithBuffer
from instep.errors import CheckpointError, ConfigError, DataError, RewardError, RolloutError
from instep.hooks import load_function
from instep.types import Sample, Status, VersionSpan

QWEN2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3: reasoning is shown in the turns after the last user message only.
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set answer = m.content.split('</think>')[-1].strip() %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ answer }}{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ c.name }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "1 + 1?"}
TALK = [
    USER,
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "and + 2?"},
    {"role": "assistant", "content": "It is 4."},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(["It is 4.\n\nuser and assistant system <think>\n\n</think>\n\n1 + 1?"] * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = QWEN2
    return fast


@pytest.fixture
def template(tokenizer: PreTrainedTokenizerFast, request: pytest.FixtureRequest):
    tokenizer.chat_template = request.param
    yield request.param
    tokenizer.chat_template = QWEN2


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def rows(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "label": str(i), "metadata": {"i": i}} for i in range(n)]


KEYS: dict[str, Any] = {"input_key": "prompt", "label_key": "label"}


# --- files --------------------------------------------------------------------------------------------------------


def test_jsonl(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [*rows(2), "", *rows(1)])
    data = load_dataset(path, **KEYS)
    assert [(r.prompt, r.label, r.metadata) for r in data] == [
        ("question 0", "0", {"i": 0}),
        ("question 1", "1", {"i": 1}),
        ("question 0", "0", {"i": 0}),
    ]
    assert data[2].where.endswith("a.jsonl, line 4") and data.num_too_long == 0 and data.bad_rows == []
    assert check_file(path, **KEYS) == 3


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("part", ["0:3", "2:", ":-4", "-3:", "-5:-2", ":", "8:100"])
def test_slices(tmp_path: Path, part: str, kind: str):
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write(path, rows(10))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(rows(10)), path, row_group_size=3)
    start, stop = (int(x) if x else None for x in part.split(":"))
    got = load_dataset(f"{path}@[{part}]", **KEYS)
    assert [int(r.label) for r in got] == list(range(10))[start:stop]
    assert check_file(f"{path}@[{part}]", **KEYS) == len(got)


def test_parquet_messages_and_tools_as_text(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    data = [{"prompt": [USER, {"role": "assistant", "content": "2", "step_loss_mask": 0}], "label": 1, "tools": "[{}]"}]
    parquet.write_table(pyarrow.Table.from_pylist(data), tmp_path / "a.parquet")
    (record,) = load_dataset(str(tmp_path / "a.parquet"), **KEYS)
    assert record.messages[0] == USER  # without the other message's keys
    assert record.tools == [{}] and record.metadata == {"tools": [{}]}
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="not a parquet file"):
        load_dataset(str(tmp_path / "b.parquet"), **KEYS)


def test_chat_template_and_token_ids(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    path = write(tmp_path / "a.jsonl", [{"prompt": [USER]}, {"prompt": "1 + 1?"}])
    one, two = load_dataset(path, input_key="prompt", apply_chat_template=True, tokenizer=tokenizer)
    expected = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert one.prompt == two.prompt == expected and one.messages == [USER]
    assert tokenizer.decode(one.token_ids(tokenizer)) == expected
    assert one.token_ids(tokenizer) is one.token_ids(tokenizer)
    raw, _ = load_dataset(path, input_key="prompt")
    assert raw.prompt == raw.messages == [USER] and raw.token_ids(tokenizer) == one.token_ids(tokenizer)


@pytest.mark.parametrize("template", [QWEN3], indirect=True)
def test_template_kwargs(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, template: str):
    path = write(tmp_path / "a.jsonl", [{"prompt": [USER]}])
    for kwargs, end in (({}, "assistant\n"), ({"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n")):
        (record,) = load_dataset(
            path,
            input_key="prompt",
            apply_chat_template=True,
            apply_chat_template_kwargs=kwargs,
            tokenizer=tokenizer,
        )
        assert record.prompt.endswith(end)


def test_prompts_over_the_limit_are_left_out_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    texts = ["zq" * n for n in (1, 40, 2, 50)]
    path = write(tmp_path / "a.jsonl", [{"prompt": t} for t in texts])
    data = load_dataset(path, input_key="prompt", tokenizer=tokenizer, max_prompt_len=10)
    assert [r.prompt for r in data] == ["zq", "zqzq"] and data.num_too_long == 2
    longest = len(data[1].token_ids(tokenizer))
    for limit, kept in ((longest, 2), (longest - 1, 1)):
        assert len(load_dataset(path, input_key="prompt", tokenizer=tokenizer, max_prompt_len=limit)) == kept
    with pytest.raises(DataError, match="all 4 prompts"):
        load_dataset(path, input_key="prompt", tokenizer=tokenizer, max_prompt_len=1)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        load_dataset(path, input_key="prompt", max_prompt_len=1)


def test_no_chat_template_is_refused_before_the_file_is_read(tokenizer: PreTrainedTokenizerFast):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    for given in (bare, None):
        with pytest.raises(ConfigError, match="chat template"):
            load_dataset("missing.jsonl", apply_chat_template=True, tokenizer=given)


BAD_ROWS = [
    ('{"prompt": "x", ', "not a JSON object"),
    ("[1, 2]", "must be a JSON object, not list"),
    ({"label": "1"}, "has no 'prompt'"),
    ({"prompt": "x"}, "has no 'label'"),
    ({"prompt": "x", "label": None}, "'label' of the row is null"),
    ({"prompt": "", "label": 1}, "is empty"),
    ({"prompt": 3, "label": 1}, "text or a list of messages"),
    ({"prompt": [], "label": 1}, "text or a list of messages"),
    ({"prompt": ["hi"], "label": 1}, "message 0 must be an object"),
    ({"prompt": [USER, {"content": "x"}], "label": 1}, "message 1 has no role"),
    ({"prompt": [{"role": "user"}], "label": 1}, "message 0 (user) has no content"),
    ({"prompt": [{"role": "user", "content": 3}], "label": 1}, "content of message 0"),
    ({"prompt": [{**USER, "step_loss_mask": 2}], "label": 1}, "step_loss_mask of message 0"),
    ({"prompt": "x", "label": 1, "metadata": "m"}, "'metadata' must be an object"),
    ({"prompt": "x", "label": 1, "tools": {"a": 1}}, "'tools' must be a list"),
]


@pytest.mark.parametrize(("row", "what"), BAD_ROWS)
def test_a_bad_row_is_named_or_skipped(tmp_path: Path, row: Any, what: str):
    path = write(tmp_path / "a.jsonl", [*rows(2), row, *rows(1)])
    for read in (load_dataset, check_file):
        with pytest.raises(DataError) as error:
            read(path, **KEYS)
        assert what in error.value.what and error.value.where == f"{path}, line 3" and error.value.remedy
    data = load_dataset(path, **KEYS, skip_bad_rows=True)
    assert len(data) == 3 and [e.where for e in data.bad_rows] == [f"{path}, line 3"]
    assert check_file(path, **KEYS, skip_bad_rows=True) == 3
    only = write(tmp_path / "b.jsonl", [row])
    with pytest.raises(DataError, match="none of the 1 rows"):
        load_dataset(only, **KEYS, skip_bad_rows=True)


def test_unusable_files(tmp_path: Path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "ok", "label": 1}\n{"prompt": "\xe9", "label": 1}\n')
    cases = [
        ("missing.jsonl", DataError, "not found"),
        (str(tmp_path), ConfigError, ".jsonl or .parquet"),
        (write(tmp_path / "a.csv", []), ConfigError, "'.csv'"),
        (write(tmp_path / "a.jsonl", []), DataError, "no rows"),
        (write(tmp_path / "a.jsonl", [""]), DataError, "no rows"),
        (write(tmp_path / "b.jsonl", rows(2)) + "@[5:]", DataError, "the slice holds no row"),
        (str(tmp_path / "b.jsonl@[1]"), ConfigError, "slice"),
        (str(tmp_path / "b.jsonl@[-:2]"), ConfigError, "slice"),
        (str(tmp_path / "latin.jsonl"), DataError, "not UTF-8"),
    ]
    (tmp_path / "folder.jsonl").mkdir()
    cases.append((str(tmp_path / "folder.jsonl"), DataError, "folder"))
    for path, kind, what in cases:
        for read in (load_dataset, check_file):
            with pytest.raises(kind) as error:
                read(path, **KEYS)
            assert what in error.value.what, path


def test_rows_that_the_chat_template_refuses(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    path = write(tmp_path / "a.jsonl", [{"prompt": [USER]}, {"prompt": [{"role": "boss", "content": "x"}]}])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'boss' %}{{ raise_exception('no bosses') }}{% endif %}{% endfor %}"
    )
    try:
        with pytest.raises(DataError, match="no bosses") as error:
            load_dataset(path, input_key="prompt", apply_chat_template=True, tokenizer=tokenizer)
        assert error.value.where.endswith("line 2")
        options: dict[str, Any] = {"apply_chat_template": True, "tokenizer": tokenizer, "skip_bad_rows": True}
        assert len(load_dataset(path, input_key="prompt", **options)) == 1
    finally:
        tokenizer.chat_template = QWEN2


def test_checking_a_file_imports_neither_torch_nor_transformers(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", rows(2))
    code = (
        "import sys; from instep.data.dataset import check_file, load_dataset\n"
        f"assert check_file({path!r}, input_key='prompt') == 2 == len(load_dataset({path!r}, input_key='prompt'))\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- the data source ----------------------------------------------------------------------------------------------


def source(path: str, **changes: Any) -> RolloutDataSourceWithBuffer:
    args = {
        "prompt_data": path,
        **KEYS,
        "metadata_key": "metadata",
        "tool_key": "tools",
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "rollout_max_prompt_len": None,
        "skip_bad_rows": False,
        "rollout_global_dataset": True,
        "rollout_shuffle": False,
        "rollout_seed": 42,
        "n_samples_per_prompt": 2,
        "buffer_filter_path": None,
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
    file = tmp_path / "state.json"
    data.save(file)
    cursor = data.cursor()
    groups[2][0].tokens.append(99)  # the state must not see this
    fresh = source(path, rollout_shuffle=True)
    fresh.load(file)
    assert fresh.state_dict() == json.loads(file.read_text())
    expected, got = data.get_samples(9), fresh.get_samples(9)
    assert got[0][0].tokens == [5, 6] and got[0][0].status is Status.ABORTED
    assert got[0][0].extra == {"note": "kept", "where": expected[0][0].extra["where"]}
    assert got[1] == expected[1] and got[2:] == expected[2:] and got[2][0].group_index == 7
    without = source(path, rollout_shuffle=True)
    without.load_state_dict(cursor)
    assert without.get_samples(7) == expected[2:]
    assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl", "state.json"}


def test_state_does_not_alias_the_samples(tmp_path: Path):
    data = source(write(tmp_path / "a.jsonl", rows(2)))
    data.add_samples(data.get_samples(1))
    state = data.state_dict()
    data.get_samples(1)[0][0].metadata["i"] = "changed"
    assert state["buffer"][0][0]["metadata"] == {"i": 0}
    data.load_state_dict(state)
    data.get_samples(1)[0][0].metadata["i"] = "changed"
    assert state["buffer"][0][0]["metadata"] == {"i": 0}


def test_state_of_other_data_or_a_broken_file_is_refused(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", rows(5))
    data = source(path)
    data.save(tmp_path / "state.json")
    with pytest.raises(DataError, match="4 usable prompts, but 5"):
        source(path + "@[:4]").load(tmp_path / "state.json")
    with pytest.raises(CheckpointError, match="cannot read"):
        data.load(tmp_path / "missing.json")
    (tmp_path / "state.json").write_text('{"epoch": 0')
    with pytest.raises(CheckpointError, match="not a saved data source"):
        data.load(tmp_path / "state.json")
    group = data.get_samples(1)[0]
    group[0].metadata["x"] = object()
    data.add_samples([group])
    with pytest.raises(CheckpointError, match="cannot be saved"):
        data.save(tmp_path / "other.json")
    with pytest.raises(CheckpointError, match="cannot write"):
        source(path).save(tmp_path / "no" / "folder.json")
    assert not (tmp_path / "other.json").exists() and not list(tmp_path.glob(".*"))


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
    with pytest.raises(RolloutError, match="list of 3 for 1 groups"):
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


# --- chat ---------------------------------------------------------------------------------------------------------


def trained(tokenizer: PreTrainedTokenizerFast, ids: list[int], mask: list[int]) -> list[str]:
    """The text of each run of trained tokens."""
    assert len(ids) == len(mask) and set(mask) <= {0, 1}
    runs: list[list[int]] = []
    for i, (token, m) in enumerate(zip(ids, mask, strict=True)):
        if m:
            if i == 0 or not mask[i - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: list[Any], **kwargs: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_qwen2_masks_assistant_turns_through_their_end_token(tokenizer: PreTrainedTokenizerFast):
    ids, mask = tokenize_conversation(TALK, tokenizer)
    assert trained(tokenizer, ids, mask) == ["It is 2.<|im_end|>", "It is 4.<|im_end|>"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    before = prompt_ids(tokenizer, TALK[:3])
    assert ids[: len(before)] == before and mask[len(before)] == 1 and mask[len(before) - 1] == 0
    assert response_length(mask) == len(ids) - len(prompt_ids(tokenizer, TALK[:1]))


@pytest.mark.parametrize(
    "content", ["\n\nhi", " hi", "hi\n", "hi \n\n ", "<|im_end|>", "h\u00e9 \u4e2d\U0001f600", "\ue001"]
)
def test_awkward_contents_still_follow_the_prompts_own_tokens(tokenizer: PreTrainedTokenizerFast, content: str):
    messages = [USER, {"role": "assistant", "content": content}]
    ids, mask = tokenize_conversation(messages, tokenizer)
    before = prompt_ids(tokenizer, [USER])
    assert ids[: len(before)] == before and mask[: len(before)] == [0] * len(before)
    assert trained(tokenizer, ids, mask) == [content + "<|im_end|>"]


def test_step_loss_mask_zeroes_a_turn(tokenizer: PreTrainedTokenizerFast):
    talk = [dict(m) for m in TALK]
    talk[1]["step_loss_mask"] = 0
    ids, mask = tokenize_conversation(talk, tokenizer)
    assert trained(tokenizer, ids, mask) == ["It is 4.<|im_end|>"]
    assert ids == tokenize_conversation(TALK, tokenizer)[0]
    talk[3]["step_loss_mask"] = 0
    for messages in (talk, [USER]):
        with pytest.raises(DataError, match="no assistant turn to train on"):
            tokenize_conversation(messages, tokenizer, where="a.jsonl, line 3")


@pytest.mark.parametrize("template", [QWEN3], indirect=True)
def test_qwen3_drops_old_reasoning_and_trains_the_turns_as_rendered(tokenizer: PreTrainedTokenizerFast, template: str):
    talk = [dict(m) for m in TALK]
    talk[1]["content"] = "<think>\nold\n</think>\n\nIt is 2."
    talk[3]["content"] = "<think>\nnew\n</think>\n\nIt is 4."
    ids, mask = tokenize_conversation(talk, tokenizer, loss_mask_type="qwen3")
    assert trained(tokenizer, ids, mask) == ["It is 2.<|im_end|>", "<think>\nnew\n</think>\n\nIt is 4.<|im_end|>"]
    assert "old" not in tokenizer.decode(ids)
    before = prompt_ids(tokenizer, talk[:3])
    assert ids[: len(before)] == before and mask[len(before)] == 1
    ids, mask = tokenize_conversation(TALK, tokenizer, template_kwargs={"enable_thinking": False})
    assert trained(tokenizer, ids, mask) == ["It is 2.<|im_end|>", "It is 4.<|im_end|>"]
    before = prompt_ids(tokenizer, TALK[:3], enable_thinking=False)
    assert ids[: len(before)] == before and mask[len(before)] == 1


@pytest.mark.parametrize("template", [QWEN3], indirect=True)
def test_tool_calls_are_trained_and_tool_answers_are_not(tokenizer: PreTrainedTokenizerFast, template: str):
    talk = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": "bye"},
    ]
    ids, mask = tokenize_conversation(talk, tokenizer)
    assert trained(tokenizer, ids, mask) == [
        "\n<tool_call>add</tool_call><|im_end|>",
        "2<|im_end|>",
        "<think>\n\n</think>\n\nbye<|im_end|>",
    ]


def test_templates_that_tell_nothing_are_refused(tokenizer: PreTrainedTokenizerFast):
    tokenizer.chat_template = "{% for m in messages|reverse %}{{ m.content|length }}{% endfor %}"
    try:
        with pytest.raises(DataError, match="hides where message 1"):
            tokenize_conversation(TALK, tokenizer)
        tokenizer.chat_template = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
        with pytest.raises(DataError, match="no trainable token"):
            tokenize_conversation([USER, {"role": "assistant", "content": "a"}], tokenizer)
    finally:
        tokenizer.chat_template = QWEN2
    with pytest.raises(ConfigError, match="llama9"):
        tokenize_conversation(TALK, tokenizer, loss_mask_type="llama9")


# --- batches ------------------------------------------------------------------------------------------------------


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
    ids = build_batch([[siblings, make_sample(0, 1, 1, 1)]]).sample_columns["execution_id"]
    assert ids[0] == ids[1] != ids[2]
    for s in siblings:
        s.execution_id = "run"
    assert build_batch([[*siblings, make_sample(0, 1, 1, 1)]]).sample_columns["execution_id"][:2] == ["run", "run"]


FAULTS = [
    ({"response_length": 0}, RolloutError, "response is empty"),
    ({"tokens": [10, 11]}, RolloutError, "the prompt is missing"),
    ({"tokens": [1.5, 2.0, 3.0]}, RolloutError, "tokens hold torch.float32"),
    ({"tokens": [-1, 2, 3]}, RolloutError, "at least -1"),
    ({"tokens": ["a", "b", "c"]}, RolloutError, "no list of ids"),
    ({"loss_mask": [1]}, RolloutError, "loss_mask has 1 entries for 2"),
    ({"loss_mask": [1, 2]}, RolloutError, "loss_mask holds 2"),
    ({"rollout_log_probs": [-0.1]}, RolloutError, "rollout_log_probs has 1 entries for 2"),
    ({"rollout_log_probs": [-0.1, math.nan]}, RolloutError, r"rollout_log_probs\[1\] is nan"),
    ({"rollout_log_probs": [-0.1, None]}, RolloutError, r"rollout_log_probs\[1\] is None"),
    ({"sampling_params": {"temperature": 0}}, RolloutError, "temperature 0"),
    ({"group_index": None}, RolloutError, "group_index"),
    ({"reward": None}, RewardError, "no reward"),
    ({"reward": math.nan}, RewardError, "nan, no finite number"),
    ({"reward": math.inf}, RewardError, "inf"),
    ({"reward": "1.0"}, RewardError, "'1.0'"),
    ({"reward": [1.0]}, RewardError, "no finite number"),
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


@pytest.mark.parametrize("groups", [[], [[]], [make_sample(0, 0, 1, 1)], [[{"tokens": [1]}]]])
def test_rollouts_of_a_wrong_shape_are_refused(groups: Any):
    with pytest.raises(RolloutError):
        build_batch(groups)


# --- hooks --------------------------------------------------------------------------------------------------------


def test_load_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_hooks_ok.py").write_text("VALUE = 3\ndef f(): return 4\n")
    (tmp_path / "my_hooks_dep.py").write_text("import not_installed_dep\n")
    (tmp_path / "my_hooks_raise.py").write_text("1 / 0\n")
    assert load_function("my_hooks_ok.f")() == 4 and load_function("my_hooks_ok.f") is load_function("my_hooks_ok.f")
    for path, what in (
        ("my_hooks_ok.g", "has no 'g'"),
        ("my_hooks_ok.VALUE", "is a int, not a function"),
        ("my_hooks_none.f", "'my_hooks_none' not found"),
        ("my_hooks_ok.sub.f", "not found"),
        ("my_hooks_dep.f", "imports 'not_installed_dep'"),
        ("my_hooks_raise.f", "ZeroDivisionError"),
        ("my_hooks_ok.py:f", "no dotted path"),
        ("f", "no dotted path"),
    ):
        with pytest.raises(ConfigError) as error:
            load_function(path)
        assert what in error.value.what and error.value.remedy, path
