"""Data files and their faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from instep.data.dataset import check_file, load_dataset
from instep.data.rows import RowFormat
from instep.errors import ConfigError, DataError
from tests.chat import QWEN2, QWEN3, USER, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


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


LABELLED = RowFormat("prompt", "label")
UNLABELLED = RowFormat("prompt")


# --- files --------------------------------------------------------------------------------------------------------


def test_jsonl(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [*rows(2), "", *rows(1)])
    data = load_dataset(path, LABELLED)
    assert [(r.prompt, r.label, r.metadata) for r in data] == [
        ("question 0", "0", {"i": 0}),
        ("question 1", "1", {"i": 1}),
        ("question 0", "0", {"i": 0}),
    ]
    assert data[2].where.endswith("a.jsonl, line 4") and data.num_too_long == 0 and data.bad_rows.num == 0
    assert check_file(path, LABELLED) == 3


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
    got = load_dataset(f"{path}@[{part}]", LABELLED)
    assert [int(r.label) for r in got] == list(range(10))[start:stop]
    assert check_file(f"{path}@[{part}]", LABELLED) == len(got)


def test_parquet_messages_and_tools_as_text(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    data = [{"prompt": [USER, {"role": "assistant", "content": "2", "step_loss_mask": 0}], "label": 1, "tools": "[{}]"}]
    parquet.write_table(pyarrow.Table.from_pylist(data), tmp_path / "a.parquet")
    (record,) = load_dataset(str(tmp_path / "a.parquet"), LABELLED)
    assert record.messages[0] == USER  # without the other message's keys
    assert record.tools == [{}] and record.metadata == {"tools": [{}]}
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="not a parquet file"):
        load_dataset(str(tmp_path / "b.parquet"), LABELLED)


def test_parquet_rows_are_those_of_the_jsonl_that_they_were_made_from(tmp_path: Path):
    """Where a struct has no field, parquet holds null; a null in a list is an item."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def tool(name: str, **properties: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}

    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [1, None]}}}]
    parts = [{"type": "text", "text": "what?"}, {"type": "text", "text": "x", "note": "y"}]
    given: list[dict[str, Any]] = [
        {
            "prompt": [USER, {"role": "assistant", "content": "", "tool_calls": calls}],
            "label": {"inputs": ["1"]},
            "tools": [tool("add", a={"type": "integer", "minimum": 0}), tool("find", text={"type": "string"})],
            "metadata": {"level": 1},
            "source": {"book": "A"},  # a column of the user's: metadata, too
        },
        {
            "prompt": [{"role": "user", "name": "Ann", "content": "1 + 1?"}],
            "label": {"outputs": ["2"]},
            "metadata": {"from": {"page": 3}},
        },
        {"prompt": [{"role": "user", "content": "x"}], "label": {"inputs": []}, "metadata": {"from": {}}},
    ]
    for some in (given, [{"prompt": [{"role": "user", "content": parts}], "label": 1}]):
        table = pyarrow.Table.from_pylist(some).append_column("picture", [[b"\x89PNG"] * len(some)])  # left out
        parquet.write_table(table, tmp_path / "a.parquet")
        expected = load_dataset(write(tmp_path / "a.jsonl", some), LABELLED)
        for got, one in zip(load_dataset(str(tmp_path / "a.parquet"), LABELLED), expected, strict=True):
            got.where = one.where
            assert got == one
        more = {"source": {"book": "A"}, "level": 1, "tools": given[0]["tools"]}
        assert expected[0].metadata == (more if some is given else {})


def test_chat_template(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    path = write(tmp_path / "a.jsonl", [{"prompt": [USER]}, {"prompt": "1 + 1?"}])
    one, two = load_dataset(path, UNLABELLED, apply_chat_template=True, tokenizer=tokenizer)
    expected = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert one.prompt == two.prompt == expected and one.messages == [USER]
    raw, _ = load_dataset(path, UNLABELLED)
    assert raw.prompt == raw.messages == [USER]


@pytest.mark.parametrize("template", [QWEN3], indirect=True)
def test_template_kwargs(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, template: str):
    path = write(tmp_path / "a.jsonl", [{"prompt": [USER]}])
    for kwargs, end in (({}, "assistant\n"), ({"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n")):
        (record,) = load_dataset(
            path,
            UNLABELLED,
            apply_chat_template=True,
            apply_chat_template_kwargs=kwargs,
            tokenizer=tokenizer,
        )
        assert record.prompt.endswith(end)


def test_prompts_over_the_limit_are_left_out_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    texts = ["zq" * n for n in (1, 40, 2, 50)]
    path = write(tmp_path / "a.jsonl", [{"prompt": t} for t in texts])
    data = load_dataset(path, UNLABELLED, tokenizer=tokenizer, max_prompt_len=10)
    assert [r.prompt for r in data] == ["zq", "zqzq"] and data.num_too_long == 2
    longest = len(tokenizer(data[1].prompt, add_special_tokens=False)["input_ids"])
    for limit, kept in ((longest, 2), (longest - 1, 1)):
        assert len(load_dataset(path, UNLABELLED, tokenizer=tokenizer, max_prompt_len=limit)) == kept
    with pytest.raises(DataError, match="all 4 prompts"):
        load_dataset(path, UNLABELLED, tokenizer=tokenizer, max_prompt_len=1)


def test_no_chat_template_is_refused_before_the_file_is_read(tokenizer: PreTrainedTokenizerFast):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    for given in (bare, None):
        with pytest.raises(ConfigError, match="chat template"):
            load_dataset("missing.jsonl", apply_chat_template=True, tokenizer=given)


BAD_ROWS = [
    ('{"prompt": "x", ', "the row is not JSON: Expecting property name enclosed in double quotes at column 16"),
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
    ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "label": 1}, "part that is not text: 'image_"),
    (
        {"prompt": [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "label": 1},
        "the arguments of a tool call of message 1 are text that is no JSON object: '{'",
    ),
    ({"prompt": [{**USER, "step_loss_mask": 2}], "label": 1}, "step_loss_mask of message 0"),
    ({"prompt": "x", "label": 1, "metadata": "m"}, "'metadata' must be an object"),
    ({"prompt": "x", "label": 1, "tools": {"a": 1}}, "'tools' must be a list"),
]


@pytest.mark.parametrize(("row", "what"), BAD_ROWS)
def test_a_bad_row_is_named_or_skipped(tmp_path: Path, row: Any, what: str):
    path = write(tmp_path / "a.jsonl", [*rows(2), row, *rows(1)])
    for read in (load_dataset, check_file):
        with pytest.raises(DataError) as error:
            read(path, LABELLED)
        assert what in error.value.what and error.value.where == f"{path}, line 3" and error.value.remedy
    data = load_dataset(path, LABELLED, skip_bad_rows=True)
    assert len(data) == 3 and [e.where for e in data.bad_rows.errors] == [f"{path}, line 3"]
    assert check_file(path, LABELLED, skip_bad_rows=True) == 3
    only = write(tmp_path / "b.jsonl", [row])
    with pytest.raises(DataError, match="none of the 1 rows"):
        load_dataset(only, LABELLED, skip_bad_rows=True)


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
                read(path, LABELLED)
            assert what in error.value.what, path


def test_rows_that_the_chat_template_refuses(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    path = write(tmp_path / "a.jsonl", [{"prompt": [USER]}, {"prompt": [{"role": "boss", "content": "x"}]}])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'boss' %}{{ raise_exception('no bosses') }}{% endif %}{% endfor %}"
    )
    try:
        with pytest.raises(DataError, match="no bosses") as error:
            load_dataset(path, UNLABELLED, apply_chat_template=True, tokenizer=tokenizer)
        assert error.value.where.endswith("line 2")
        options: dict[str, Any] = {"apply_chat_template": True, "tokenizer": tokenizer, "skip_bad_rows": True}
        assert len(load_dataset(path, UNLABELLED, **options)) == 1
    finally:
        tokenizer.chat_template = QWEN2


def test_checking_a_file_imports_neither_torch_nor_transformers(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", rows(2))
    code = (
        "import sys; from instep.data.dataset import check_file, load_dataset\n"
        "from instep.data.rows import RowFormat; rows = RowFormat('prompt')\n"
        f"print(check_file({path!r}, rows), len(load_dataset({path!r}, rows)))\n"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2 2\nset()\n"), done.stderr
