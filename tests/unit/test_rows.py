"""Values in rows that Python, a tokenizer or a reward cannot take: refused by file, line and key, or skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from instep.data.dataset import check_file, load_dataset
from instep.data.rows import RowFormat
from instep.errors import DataError

LABELLED = RowFormat("prompt", "label")
GOOD = '{"prompt": "1+1", "label": "2"}\n'


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


STRANGE = {
    '{"prompt": "x", "label": ' + "1" * 5000 + "}": "has a whole number of more than 4300 digits at column 26",
    '{"prompt": "x", "label": ' + deep(102) + "}": "nested more than 100 levels deep (in 'label')",
    '{"prompt": "x", "label": 1, "metadata": {"a": ' + deep(600) + "}}": "100 levels deep (in 'metadata')",
    deep(100_000): "nested more than 100 levels deep",
    '{"prompt": "x\\ud800", "label": 1}': "has \\ud800, half of a surrogate pair, not a character (in 'prompt')",
    '{"prompt": "x", "label": "\\udFFF"}': "has \\udfff, half of a surrogate pair",
    '{"prompt": "x", "label": 1, "metadata": {"\\ud800": 1}}': "half of a surrogate pair",
    '{"prompt": "x", "label": 1, "tools": "[{]"}': "'tools' is text that is not JSON: Expecting property name",
    '{"prompt": "x", "label": NaN}': "'label' of the row is nan",
    '{"prompt": "x", "label": 1e999}': "'label' of the row is inf",
    '{"prompt": "x", "label": 1,}': "the row is not JSON: Expecting property name enclosed in double",
}


@pytest.mark.parametrize("row", STRANGE, ids=list(STRANGE.values()))
def test_strange_values_are_named_or_skipped(tmp_path: Path, row: str):
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD + row + "\n")
    for read in (load_dataset, check_file):
        with pytest.raises(DataError) as error:
            read(str(path), LABELLED)
        assert STRANGE[row] in error.value.what and error.value.where == f"{path}, line 2"
        assert "--skip-bad-rows" in error.value.remedy
    data = load_dataset(str(path), LABELLED, skip_bad_rows=True)
    assert len(data) == 1 and [e.where for e in data.bad_rows.errors] == [f"{path}, line 2"]


def test_what_only_looks_strange_is_taken(tmp_path: Path):
    row = {"prompt": "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "label": [[[1] * 200] * 2]}
    whole = '{"prompt": "\\ud83d\\ude00", "label": ' + deep(90) + "}\n"  # a whole pair, and not too deep
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n" + whole + '{"prompt": "x", "label": ' + "1" * 4000 + "}\n")
    assert [r.prompt for r in load_dataset(str(tmp_path / "a.jsonl"), LABELLED)] == ["\U0001f600", "\U0001f600", "x"]


LABELS: list[tuple[str, Any, str]] = [
    ("math", "", "is empty"),
    ("math", " ", "is empty"),
    ("boxed_math", {}, "holds dict"),
    ("math", [], "is an empty list"),
    ("math", ["1", ""], "is empty"),
    ("math", [None], "holds NoneType"),
    ("math", [float("nan")], "holds nan"),
    ("deepscaler", "", "is empty"),
    ("dapo", ["1"], "holds list"),
    ("f1", {"a": 1}, "holds dict"),
    ("gpqa", "", "is empty"),
]


@pytest.mark.parametrize("rule,label,what", LABELS)
def test_a_label_that_no_answer_equals_is_refused(tmp_path: Path, rule: str, label: Any, what: str):
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD + json.dumps({"prompt": "x", "label": label}) + "\n")
    with pytest.raises(DataError) as error:
        check_file(str(path), RowFormat("prompt", "label", grader=rule))
    assert what in error.value.what and "'label'" in error.value.what and error.value.where == f"{path}, line 2"
    assert check_file(str(path), RowFormat("prompt", "label")) == 2  # a reward of the user's may want it
    named = {"prompt": "x", "label": label, "metadata": {"rm_type": "remote_rm"}}
    path.write_text(GOOD + json.dumps(named) + "\n")
    assert check_file(str(path), RowFormat("prompt", "label", grader=rule)) == 2  # the row's own reward takes any


def test_labels_that_graders_take(tmp_path: Path):
    rows = [("math", 3), ("math", ["1", 2.5]), ("f1", ""), ("dapo", True), ("random", {})]
    lines = [{"prompt": "x", "label": label, "metadata": {"rm_type": rule}} for rule, label in rows]
    lines.append({"prompt": "x", "label": [], "metadata": {"rm_type": "gpqa", "correct_letter": "A"}})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert check_file(str(tmp_path / "a.jsonl"), RowFormat("prompt", "label", grader="")) == 6


def test_a_row_names_a_reward_that_there_is_and_has_the_label_it_needs(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "x", "metadata": {"rm_type": "maths"}}) + "\n")
    with pytest.raises(DataError, match="'rm_type' in 'metadata' is no built-in reward: 'maths'"):
        check_file(str(path), RowFormat("prompt", grader=""))
    path.write_text(json.dumps({"prompt": "x", "label": "A", "metadata": {"rm_type": "gpqa", "choices": 3}}) + "\n")
    with pytest.raises(DataError, match="'choices' in 'metadata' is neither a list nor an object: 3"):
        check_file(str(path), RowFormat("prompt", "label", grader=""))
    path.write_text(json.dumps({"prompt": "x", "metadata": {"rm_type": "math"}}) + "\n")
    with pytest.raises(DataError) as error:
        check_file(str(path), RowFormat("prompt", grader=""))
    assert "the reward math needs a label" in error.value.what and "--label-key" in error.value.remedy


def test_parquet_values_that_json_has_not(tmp_path: Path):
    import datetime

    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    unused = pyarrow.array([datetime.datetime(2020, 1, 1)] * 2)
    for label, what in (
        (pyarrow.array([b"1", b"2"]), "'label' holds what JSON cannot"),
        (pyarrow.array([datetime.date(2020, 1, 1)] * 2), "'label' holds what JSON cannot"),
        (pyarrow.array([float("nan"), 1.0]), "'label' of the row is nan"),
        (pyarrow.array([b"\xff", b"\xff"]).cast(pyarrow.string(), safe=False), "'label' holds what JSON cannot"),
    ):
        table = pyarrow.table({"prompt": ["a", "b"], "label": label, "when": unused})
        pyarrow.parquet.write_table(table, path)
        with pytest.raises(DataError) as error:
            check_file(str(path), LABELLED)
        assert what in error.value.what and error.value.where == f"{path}, row 0"
    assert check_file(str(path), RowFormat("prompt")) == 2  # columns that are not read may hold anything


def test_few_tokens_of_many_characters_are_within_the_limit(tmp_path: Path):
    """The beginning of a text with long words tells nothing: the whole text does."""
    raw = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    texts = ["x" * 1_000_000, "a " * 500_000, ("y" * 200_000 + " ") * 11, " " * 100_000 + "a"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    data = load_dataset(str(tmp_path / "a.jsonl"), RowFormat("prompt"), tokenizer=tokenizer, max_prompt_len=10)
    assert [r.prompt for r in data] == [texts[0], texts[3]]
