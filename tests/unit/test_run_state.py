"""A checkpoint is whole or not there."""

import argparse
import errno

import pytest

from instep.checkpoints.folders import find_checkpoint, latest_iteration, read_state, save_checkpoint
from instep.checkpoints.integrity import check_whole
from instep.controller.run_state import how_to_go_on
from instep.errors import CheckpointError


def write(folder):
    (folder / "weights.bin").write_bytes(b"x" * 100)


def test_save_and_find(tmp_path):
    save_checkpoint(tmp_path, 3, write, {"rollout_id": 3})
    save_checkpoint(tmp_path, 7, write, {"rollout_id": 7})
    folder, iteration = find_checkpoint(tmp_path, None)
    assert iteration == 7 and folder.name == "iter_0000007" and read_state(folder) == {"rollout_id": 7}
    assert find_checkpoint(tmp_path, 3)[1] == 3
    assert find_checkpoint(tmp_path / "nowhere", None) is None


def test_a_full_disk_leaves_the_last_good_one(tmp_path):
    save_checkpoint(tmp_path, 1, write, {"rollout_id": 1})

    def fails(folder):
        write(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left") as caught:
        save_checkpoint(tmp_path, 2, fails, {})
    assert "free space" in str(caught.value)
    assert latest_iteration(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def test_saving_again_replaces(tmp_path):
    save_checkpoint(tmp_path, 1, write, {"n": 1})
    save_checkpoint(tmp_path, 1, write, {"n": 2})
    assert read_state(find_checkpoint(tmp_path, 1)[0]) == {"n": 2}


def test_wrong_trackers_are_named(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(CheckpointError, match="'release' is no iteration"):
        find_checkpoint(tmp_path, None)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    with pytest.raises(CheckpointError, match="no checkpoint of iteration 12"):
        find_checkpoint(tmp_path, None)


def test_a_damaged_checkpoint_is_named_with_the_complete_ones(tmp_path):
    for number in (1, 2, 3):
        save_checkpoint(tmp_path, number, write, {})
    folder, _ = find_checkpoint(tmp_path, None)
    check_whole(folder)
    (folder / "weights.bin").write_bytes(b"x" * 99)
    with pytest.raises(CheckpointError, match=r"weights\.bin has 99 bytes instead of 100") as caught:
        check_whole(folder)
    assert "--ckpt-step: 1, 2" in str(caught.value)
    (folder / "weights.bin").unlink()
    with pytest.raises(CheckpointError, match=r"weights\.bin is missing"):
        check_whole(folder)
    (folder / "files.json").write_text("{")
    with pytest.raises(CheckpointError, match="list of files cannot be read"):
        check_whole(folder)
    (folder / "files.json").unlink()
    check_whole(folder)  # as another framework writes it


def test_a_tracker_of_garbage_is_named(tmp_path):
    save_checkpoint(tmp_path, 5, write, {})
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="is no iteration") as caught:
        latest_iteration(tmp_path)
    assert "--ckpt-step: 5" in str(caught.value)
    assert find_checkpoint(tmp_path, 5)[1] == 5


def test_how_an_interrupted_run_goes_on(tmp_path):
    def said(**given):
        names = "save load save_interval ckpt_step finetune start_rollout_id".split()
        return how_to_go_on(argparse.Namespace(**{**dict.fromkeys(names), "finetune": False, **given}))

    save = str(tmp_path)
    assert said() == "nothing was saved (no --save): the same command begins anew"
    assert said(save=save, load=save, save_interval=5) == (
        f"nothing was saved yet (--save-interval 5): the same command begins anew from {save}"
    )
    assert "nothing was saved yet (no --save-interval): " in said(save=save)
    last = save_checkpoint(tmp_path, 3, write, {"rollout_id": 3})
    assert said(save=save, load=save) == f"the last checkpoint is {last}: the same command goes on from it"
    assert said(save=save, load="other", finetune=True) == (
        f"the last checkpoint is {last}: the same command, with --load {save}, without --finetune, goes on from it"
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("x")
    assert "'x' is no iteration" in said(save=save)
