"""Data files that stay on disk: their records, the index that is kept of them, and the memory that they take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from instep.data import dataset, index
from instep.data.dataset import Dataset, check_file, load_dataset
from instep.data.rows import RowFormat
from instep.errors import DataError, OutputError
from tests.bounds import allowed
from tests.chat import QWEN2, QWEN3, make_tokenizer
from tests.unit.test_data import write
from tests.unit.test_data_source import labels, source

LABELLED = RowFormat("prompt", "label")
BUILDING = "building the index of its rows"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(autouse=True)
def every_file_is_large(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index, "LARGE", {".jsonl": 0, ".parquet": 0})
    monkeypatch.setattr(dataset, "TOKENIZE_AT_ONCE", 7)


def rows(num: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"\u00e9t\u00e9 {'x' * (i % 13)}"}],
            "label": str(i),
            "metadata": {"i": i},
        }
        for i in range(num)
    ]


@pytest.fixture(params=["jsonl", "parquet"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A file of 40 rows; a jsonl with a byte-order mark, both ends of lines, empty lines, and none at the end."""
    path = tmp_path / f"a.{request.param}"
    if request.param == "jsonl":
        lines = [
            json.dumps(row, ensure_ascii=i % 2 == 0) + ("\r\n" if i % 3 else "\n\n") for i, row in enumerate(rows(40))
        ]
        path.write_bytes(b"\xef\xbb\xbf" + "".join(lines).rstrip().encode())
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows(40)), path, row_group_size=11)
    return path


def load(path: Path | str, cache: Path, **options: Any) -> Dataset:
    return load_dataset(str(path), LABELLED, cache_path=str(cache), **options)


def in_memory(path: Path | str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Dataset:
    with monkeypatch.context() as patch:
        patch.setattr(index, "LARGE", {})
        return load_dataset(str(path), LABELLED, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "@[3:17]": {},
    "@[-9:-2]": {"apply_chat_template": True},
    "@[5:]": {"apply_chat_template": True, "max_prompt_len": 37},
    "@[:-1]": {"max_prompt_len": 37},
}


@pytest.mark.parametrize("part", OPTIONS)
def test_records_are_those_of_a_file_in_memory(
    path: Path, part: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    options = {**OPTIONS[part], "tokenizer": tokenizer}
    expected = in_memory(f"{path}{part}", monkeypatch, **options)
    assert isinstance(expected.records, list) and 0 < len(expected)
    assert (expected.num_too_long > 0) is ("max_prompt_len" in options)
    for time in range(2):
        got = load(f"{path}{part}", path.parent / "cache", **options)
        for record in expected:
            record._token_ids = None
        assert list(got) == list(expected) and got[-1] == expected[-1] and got[1:3] == expected[1:3]
        assert (got.digest, got.num_too_long) == (expected.digest, expected.num_too_long)
        with pytest.raises(IndexError):
            got[len(expected)]
        assert (BUILDING in capsys.readouterr().err) is (time == 0)


def test_bad_rows_are_named_and_counted_at_each_start(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(tmp_path / "a.jsonl", [*rows(2), "{", {"label": 1}, *rows(1)])
    for _ in range(2):
        for read in (load, check_file):
            options = {"cache_path": str(tmp_path / "cache")} if read is check_file else {"cache": tmp_path / "cache"}
            with pytest.raises(DataError, match="is not JSON") as error:
                read(path, **options, **({"row_format": LABELLED} if read is check_file else {}))  # type: ignore[operator]
            assert error.value.where == f"{path}, line 3"
    for _ in range(2):
        caplog.clear()
        data = load(path, tmp_path / "cache", skip_bad_rows=True)
        assert [r.label for r in data] == ["0", "1", "0"] and data.bad_rows.num == 2
        assert [e.where for e in data.bad_rows.errors] == [f"{path}, line 3", f"{path}, line 4"]
        assert "skipped 2 bad rows; the first: " in caplog.text and "is not JSON" in caplog.text


def test_an_index_stands_for_one_use_of_one_file(
    path: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
):
    def builds(part: str = "", row_format: RowFormat = LABELLED, **options: Any) -> bool:
        load_dataset(f"{path}{part}", row_format, cache_path=str(cache), tokenizer=tokenizer, **options)
        return BUILDING in capsys.readouterr().err

    cache = tmp_path / "cache"
    other = RowFormat("prompt", "label", grader="math")
    uses: list[dict[str, Any]] = [{}, {"part": "@[:5]"}, {"row_format": other}, {"skip_bad_rows": True}]
    uses += [{"max_prompt_len": 90}, {"max_prompt_len": 91}, {"apply_chat_template": True}]
    assert [builds(**use) for use in uses + uses] == [True] * 7 + [False] * 7
    tokenizer.chat_template = QWEN3
    try:
        assert [builds(**use) for use in uses] == [False] * 4 + [True] * 3
    finally:
        tokenizer.chat_template = QWEN2
    assert len(list(cache.iterdir())) == 10
    os.utime(path, (1, 1))
    assert builds() and len(list(cache.iterdir())) == 1  # those of the file as it was are gone
    (folder,) = cache.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700  # the file may be secret
    for name in ("places", "index"):
        (folder / name).write_bytes(b"")
        assert builds() and not builds()


def test_a_damaged_index_is_built_anew_and_disturbs_no_run_that_reads_it(path: Path, tmp_path: Path, capsys: Any):
    running = load(path, tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    whole = (folder / "index").read_text()
    damaged = [
        b"[]",
        b"{}",
        b"\xff\xfe",
        whole[:-9].encode(),
        whole.replace('"num_rows": 40', '"num_rows": 4').encode(),
    ]
    damaged += [json.dumps({"num_rows": 40, "bad_rows": []}).encode(), b"[" * 5000]
    for text in damaged:
        (folder / "index").write_bytes(text)
        assert check_file(str(path), LABELLED, cache_path=str(tmp_path / "cache")) == 40
        assert [r.label for r in load(path, tmp_path / "cache")] == [str(i) for i in range(40)]
        assert BUILDING in capsys.readouterr().err and (folder / "index").read_text() == whole
        assert [r.label for r in running] == [str(i) for i in range(40)]
    if path.suffix == ".parquet":
        (folder / "rows.jsonl").write_bytes((folder / "rows.jsonl").read_bytes()[:-1])
        assert len(load(path, tmp_path / "cache")) == 40 and BUILDING in capsys.readouterr().err


def test_a_file_that_is_replaced_while_another_process_builds_its_index_is_an_error(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    load(path, tmp_path / "cache")
    found = index._found

    def replaced_meanwhile(folder: Path) -> Any:
        (tmp_path / "new").write_bytes(path.read_bytes())
        (tmp_path / "new").rename(path)
        return found(folder)

    monkeypatch.setattr(index, "_found", replaced_meanwhile)
    with pytest.raises(DataError, match="changed while the run read it"):
        load(path, tmp_path / "cache")


def test_a_check_uses_the_index(path: Path, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dataset, "NUM_ROWS_CHECKED", 10)
    cache = tmp_path / "cache"
    assert check_file(str(path), LABELLED, cache_path=str(cache)) == 10
    load(path, cache, tokenizer=tokenizer, max_prompt_len=37)
    assert check_file(str(path), LABELLED, cache_path=str(cache)) == 40
    assert check_file(str(path), RowFormat("prompt"), cache_path=str(cache)) == 10


def test_a_file_that_changes_under_the_run_is_an_error(tmp_path: Path):
    path = Path(write(tmp_path / "a.jsonl", rows(5)))
    data = load(path, tmp_path / "cache")
    path.rename(tmp_path / "b.jsonl")
    write(path, rows(3))
    assert [r.label for r in data] == list("01234")  # the run has the old one
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match="changed while the run read it") as error:
        data[0]
    assert error.value.where == str(path)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "a.jsonl", rows(2))
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as error:
        load(path, tmp_path / "file")
    assert error.value.where == "--data-cache-path"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert len(load_dataset(path, LABELLED)) == 2 and len(list((tmp_path / "home/instep/data").iterdir())) == 1


def test_the_source_goes_on_where_it_was(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = {"rollout_shuffle": True, "data_cache_path": str(tmp_path / "cache")}
    data = source(str(path), **options)
    got = labels(data.get_samples(55))
    state = json.loads(json.dumps(data.state_dict()))
    again = source(str(path), **options)
    again.load_state_dict(state)
    assert again.get_samples(60) == data.get_samples(60) and sorted(got[:40]) == list(range(40))
    monkeypatch.setattr(index, "LARGE", {})
    again = source(str(path), **options)
    again.load_state_dict(state)  # the content is the same
    assert labels(again.get_samples(60))[:25] == [i for i in labels(source(str(path), **options).get_samples(80))[55:]]


LOADS = """
import resource, sys, time
from instep.data import index
from instep.data.dataset import load_dataset
from instep.data.mixture import Mixture
from instep.data.rows import RowFormat
index.LARGE = {".jsonl": 0, ".parquet": 0}
path, cache = sys.argv[1:]
mebibytes = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
if path.endswith(".parquet"):
    import pyarrow.parquet
before, began = mebibytes(), time.monotonic()
data = Mixture([load_dataset(path, RowFormat("prompt"), cache_path=cache)], None, 42)
counts = data.start()
rows = [data.next(counts).where for _ in range(32)]
seconds = time.monotonic() - began
for _ in range(1000):
    data.next(counts)
print(len(data), seconds, mebibytes() - before, len(set(rows)))
"""


def test_two_processes_build_one_index(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "x" * 100}] * 20_000)
    command = [sys.executable, "-c", LOADS, path, str(tmp_path / "cache")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [out.split()[0] for out, _ in outputs] == ["20000"] * 2, outputs
    assert sum(BUILDING in err for _, err in outputs) == 1


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str):
    path, num, letters = tmp_path / f"a.{kind}", 12_000, os.urandom(1 << 20).hex()
    texts = [letters[37 * i :][:12_000] for i in range(num)]  # 144 MB
    if kind == "jsonl":
        with path.open("w") as file:
            file.writelines(f'{{"prompt": "{text}"}}\n' for text in texts)
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"prompt": texts}), path, use_dictionary=False, compression="none")
        assert parquet.ParquetFile(path).num_row_groups == 1
    assert path.stat().st_size > 140e6
    for time in range(2):
        command = [sys.executable, "-c", LOADS, str(path), str(tmp_path / "cache")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        found, seconds, grown, different = map(float, done.stdout.split())
        assert (found, different) == (num, 32) and grown < 80, grown
        assert (BUILDING in done.stderr) is (time == 0) and (time == 0 or seconds < allowed(5))
    path.unlink()
