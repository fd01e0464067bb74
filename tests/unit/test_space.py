"""Free space is looked at before anything starts; the files of a run are watched while it goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from instep.arguments.parse import parse
from instep.controller.space import check_space, num_saves, what_is_saved
from instep.errors import CheckpointError, OutputError
from tests.command_line import argv, make_folder
from tests.logged_run import make_groups, run

LAYERS = {"a": [10, 20], "b": [30], "c": []}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    folder = make_folder(tmp_path, monkeypatch)
    weights(folder, LAYERS)
    return folder


def weights(folder: Path, shapes: dict[str, list[int]]) -> None:
    """A file of weights that has its header alone."""
    tensors = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    (folder / "model" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def arguments(extra: str):
    return parse(argv(extra))


@pytest.mark.parametrize(
    "extra, expected",
    [
        ("--save out", {"--save": 14}),
        ("--save out --precision fp32", {"--save": 12}),
        ("--save out --precision fp32 --no-save-optim", {"--save": 4}),
        ("--save out --no-save-optim", {"--save": 2}),
        ("--save out --train-backend hf", {"--save": 12}),
        ("--save out --train-backend hf --no-save-optim --save-hf hf", {"--save": 4, "--save-hf": 2}),
        ("--save-hf hf --precision fp32", {"--save-hf": 4}),
        ("--save out --advantage-estimator ppo", {"--save": 28}),
        ("--critic-save out --advantage-estimator ppo", {"--critic-save": 14}),
        ("--save out --save-hf hf --train-backend hf --lora-rank 8", {"--save": 0, "--save-hf": 2}),
        ("--save-hf hf --train-backend hf --lora-rank 8 --save-hf-as adapter", {"--save-hf": 0}),
        ("", {}),
    ],
)
def test_bytes_per_weight(extra, expected):
    args = arguments(extra if "--precision" in extra else f"{extra} --precision bf16")
    assert {saved.flag: saved.num_bytes / 231 for saved in what_is_saved(args)} == expected


def test_a_save_that_cannot_fit_is_refused_with_its_bytes(folder):
    weights(folder, {"a": [10**9, 10**6]})
    with pytest.raises(CheckpointError) as caught:
        check_space(arguments("--save out/ckpt --save-hf out/hf --precision fp32"), 1)
    text = str(caught.value)
    assert f"{16 * 10**15:,} bytes" in text and "--save and --save-hf" in text and str(folder) in text
    assert check_space(arguments(""), 1) == []


def test_nothing_is_refused_where_nothing_is_saved_or_the_disk_does_not_tell(folder, monkeypatch):
    weights(folder, {"a": [10**9, 10**6]})
    args = arguments("--save out --precision fp32")
    assert check_space(args, 0) == []  # nothing is left to train
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (0, 0, 0))  # FUSE, some file systems of networks
    assert check_space(args, 3) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (1 << 40, 1 << 40, 0))
    with pytest.raises(CheckpointError, match="0 bytes. are free"):
        check_space(args, 3)


@pytest.mark.parametrize(
    ("num_rollout", "start", "interval", "saves"), [(4, 4, None, 0), (4, 6, 2, 0), (4, 0, None, 1), (9, 4, 2, 3)]
)
def test_the_saves_that_are_left(num_rollout, start, interval, saves):
    """None of a run that has nothing left to train."""
    run = SimpleNamespace(num_rollout=num_rollout, start_rollout_id=start, args=SimpleNamespace(save_interval=interval))
    assert num_saves(run.args, run.num_rollout - run.start_rollout_id) == saves


def test_too_many_saves_are_told_before_they_are_made(folder):
    size = 12 * 231
    saves = 2 * shutil.disk_usage(folder).free // size
    args = arguments("--save out --precision fp32")
    assert check_space(args, 3) == []
    (line,) = check_space(args, saves)
    assert f"{saves} saves would need" in line and f"({saves * size:,} bytes)" in line
    assert check_space(arguments("--save-hf out --precision fp32"), saves) == []  # each replaces the last one
    assert len(check_space(arguments("--save-hf out-{rollout_id} --precision fp32"), 6 * saves)) == 1


@pytest.mark.parametrize("lose", [shutil.rmtree, lambda path: path.rename(path.with_name("elsewhere"))])
def test_a_run_folder_that_is_lost_is_noticed_at_the_next_row(tmp_path, lose):
    with pytest.raises(OutputError, match=r"metrics\.jsonl was moved, removed or replaced") as caught:
        with run(tmp_path / "run") as log:
            log.log(0, {"train/loss": 0.5})
            lose(tmp_path / "run")
            log.log(1, {"train/loss": 0.5})
    assert "if a checkpoint is still there" in str(caught.value)


def test_a_file_of_a_run_that_was_replaced_is_noticed(tmp_path):
    with pytest.raises(OutputError, match=r"samples\.jsonl was moved, removed or replaced"):
        with run(tmp_path / "run") as log:
            log.samples(0, make_groups(), "train", 1)
            shutil.copy(tmp_path / "run" / "samples.jsonl", tmp_path / "copy")
            (tmp_path / "copy").rename(tmp_path / "run" / "samples.jsonl")
            log.samples(1, make_groups(), "train", 1)
