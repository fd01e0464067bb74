"""The order of the prompts of one or several files, with and without weights; and that a restart goes on in it."""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from instep.arguments.parse import parse
from instep.controller.run_state import data_state, restore_data
from instep.data import mixture
from instep.data.ledger import Ledger, LedgeredDataSource
from instep.data.rows import split_files
from instep.data.source import RolloutDataSourceWithBuffer, num_rollouts
from instep.errors import DataError
from tests.command_line import argv, make_folder, refusal
from tests.unit.test_data import write
from tests.unit.test_data_source import labels, source

WEIGHTED = {"prompt_data_weights": [3.0, 1.0, 0.5], "rollout_shuffle": True}


def files(folder: Path, *sizes: int) -> str:
    """Files of so many rows; a label is 100 x the number of the file, and the number of the row."""
    return ",".join(
        write(folder / f"{i}.jsonl", [{"prompt": "q", "label": str(100 * i + row)} for row in range(size)])
        for i, size in enumerate(sizes)
    )


def read(data: RolloutDataSourceWithBuffer, num: int) -> list[int]:
    return labels(data.get_samples(num))


def test_one_file_is_shuffled_as_in_slime(tmp_path: Path):
    got = read(source(files(tmp_path, 50), rollout_shuffle=True), 150)
    for epoch in range(3):
        random.seed(42 + epoch)  # slime/utils/data.py, Dataset.shuffle
        permutation = list(range(50))
        random.shuffle(permutation)
        assert got[50 * epoch : 50 * (epoch + 1)] == permutation


@pytest.mark.parametrize("weights", [None, [1.0, 3.0, 1.0]])
@pytest.mark.parametrize(
    ("num_epoch", "batch", "expected"), [(1, 4, 3), (2, 4, 5), (4, 4, 9), (1, 9, 1), (1, 10, 1), (2, 10, 2), (3, 1, 27)]
)
def test_epochs_are_passes_over_all_files_in_whole_rollouts(
    tmp_path: Path, weights: list[float] | None, num_epoch: int, batch: int, expected: int
):
    path = files(tmp_path, 3, 5, 9).replace("2.jsonl", "2.jsonl@[8:]")  # 9 prompts
    data = source(path, prompt_data_weights=weights)
    args = argparse.Namespace(num_rollout=None, num_epoch=num_epoch, rollout_batch_size=batch)
    assert num_rollouts(args, data) == expected
    if weights is None:
        times = Counter(read(data, expected * batch))
        assert len(times) == 9 and min(times.values()) >= num_epoch


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_many_rows_have_another_order_in_each_epoch(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mixture, "MAX_SHUFFLED", 0)
    order = mixture.Order(size, 7)
    first, second = ([order[size * epoch + i] for i in range(size)] for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(size))
    assert size < 1000 or sum(a == b for a, b in zip(first, second, strict=True)) < 10


def test_files_without_weights_are_one(tmp_path: Path):
    paths = files(tmp_path, 7, 1, 5)
    parts = f"{tmp_path}/0.jsonl@[2:],{tmp_path}/1.jsonl,{tmp_path}/2.jsonl@[-3:]"
    rows = [2, 3, 4, 5, 6, 100, 202, 203, 204]
    data = source(parts)
    assert len(data) == 9 and read(data, 20) == [*rows, *rows, *rows[:2]]
    whole = write(tmp_path / "all.jsonl", [{"prompt": "q", "label": str(row)} for row in rows])
    assert read(source(parts, rollout_shuffle=True), 30) == read(source(whole, rollout_shuffle=True), 30)
    assert len(source(paths)) == 13
    first = source(parts).get_samples(6)[5][0]
    assert first.extra["where"] == f"{tmp_path}/1.jsonl, line 1"


@pytest.mark.parametrize("shuffle", [False, True])
def test_weights_are_shares_of_the_prompts(tmp_path: Path, shuffle: bool):
    data = source(files(tmp_path, 40, 10, 10), prompt_data_weights=[3.0, 1.0, 0.5], rollout_shuffle=shuffle)
    assert len(data) == 60
    got = read(data, 900)
    for num in range(1, 901):
        for i, share in enumerate((3 / 4.5, 1 / 4.5, 0.5 / 4.5)):
            assert abs(sum(label // 100 == i for label in got[:num]) - share * num) < 1
    orders = set()
    for i, size in enumerate((40, 10, 10)):
        own = [label - 100 * i for label in got if label // 100 == i]
        passes = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
        assert all(sorted(one) == list(range(size)) for one in passes)
        assert (passes == [list(range(size))] * len(passes)) is not shuffle
        orders.add(tuple(passes[0]))
    assert len(orders) == (3 if shuffle else 2)  # files of one size have orders of their own


@pytest.mark.parametrize("changes", [{}, {"rollout_shuffle": True}, WEIGHTED, {**WEIGHTED, "rollout_shuffle": False}])
@pytest.mark.parametrize("scatter", [False, True])
def test_a_restart_goes_on_in_the_same_order(
    tmp_path: Path, changes: dict[str, Any], scatter: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(mixture, "MAX_SHUFFLED", 0 if scatter else 1 << 20)
    paths = files(tmp_path, 11, 5, 3)
    undisturbed = source(paths, **changes).get_samples(100)
    data = source(paths, **changes)
    for start in range(0, 100, 10):
        assert data.get_samples(10) == undisturbed[start : start + 10]
        state = json.loads(json.dumps(data.state_dict()))
        data = source(paths, **changes)
        data.load_state_dict(state)


def test_groups_that_were_outstanding_are_read_again(tmp_path: Path):
    paths = files(tmp_path, 11, 5, 3)
    data = LedgeredDataSource(source(paths, **WEIGHTED), Ledger())
    first, later = data.of_round(0).get_samples(8), data.of_round(1).get_samples(4)
    data.ledger.consume(first[:5])
    state = json.loads(json.dumps(data_state(data, 0)))
    after = data.get_samples(20)
    again = LedgeredDataSource(source(paths, **WEIGHTED), Ledger())
    restore_data(again, state, 0, tmp_path)
    assert again.get_samples(27) == [*first[5:], *later, *after]


def test_a_changed_file_is_refused_by_name(tmp_path: Path):
    paths = files(tmp_path, 4, 5)
    state = source(paths).state_dict()
    path = tmp_path / "1.jsonl"
    text = path.read_text()
    os.utime(path, (1, 1))
    source(paths).load_state_dict(state)  # only its time has changed
    path.write_text(text.rstrip("\n"))
    source(paths).load_state_dict(state)  # nor is a last line without its end another row
    for changed, what in (
        (text.replace('"103"', '"999"'), "the 5 usable prompts differ from those when the state was saved"),
        (text + text.splitlines()[0] + "\n", "the data set has 6 usable prompts, but 5"),
        ("\n".join(reversed(text.splitlines())), "differ from those"),
    ):
        path.write_text(changed)
        with pytest.raises(DataError, match=what) as error:
            source(paths).load_state_dict(state)
        assert error.value.where == str(path)


# --- flags --------------------------------------------------------------------------------------------------------


def test_files_are_named_with_commas_between():
    assert split_files("a.jsonl") == ["a.jsonl"]
    assert split_files("a.jsonl,c.parquet@[1:2],e.jsonl@[:-3],f.parquet") == [
        *("a.jsonl", "c.parquet@[1:2]", "e.jsonl@[:-3]", "f.parquet"),
    ]


def test_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_folder(tmp_path, monkeypatch)
    Path("more.jsonl").write_text(Path("data.jsonl").read_text())
    args = parse(argv("--prompt-data data.jsonl,more.jsonl@[0:1] --prompt-data-weights 3 1"))
    assert args.prompt_data == "data.jsonl,more.jsonl@[0:1]" and args.prompt_data_weights == [3.0, 1.0]
    for words, what in (
        ("--prompt-data data.jsonl,nowhere.jsonl", "no file nowhere.jsonl"),
        ("--prompt-data data.jsonl,more.jsonl --prompt-data-weights 1", "gives 1 numbers for 2 files"),
        ("--prompt-data-weights 1 2", "gives 2 numbers for 1 files"),
        ("--prompt-data-weights 0", "must be above 0"),
        ("--save-debug-rollout-data more.jsonl --prompt-data data.jsonl,more.jsonl", "which is --prompt-data"),
    ):
        assert what in refusal(words), words
