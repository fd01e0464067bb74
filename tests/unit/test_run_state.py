"""A checkpoint is whole or not there."""

import argparse
import errno
import os

import pytest

from instep.checkpoints.folders import (
    find_checkpoint,
    latest_iteration,
    read_state,
    weights_folder,
)
from instep.checkpoints.hf_export import check_export_folder
from instep.checkpoints.integrity import check_whole, has_digests, write_manifest
from instep.controller.run_state import how_to_go_on
from instep.errors import CheckpointError, ConfigError
from tests.checkpoints import save_checkpoint

STATE = {"rollout_id": 3, "num_steps": 4, "version": 5, "ledger": {}, "evaluations": [], "args": {}}


def write(folder):
    (folder / "weights.bin").write_bytes(b"x" * 100)
    return {}


def test_save_and_find(tmp_path):
    save_checkpoint(tmp_path, 3, write, STATE)
    save_checkpoint(tmp_path, 7, write, {**STATE, "rollout_id": 7})
    folder, iteration = find_checkpoint(tmp_path, None)
    assert iteration == 7 and folder.name == "iter_0000007" and read_state(folder) == {**STATE, "rollout_id": 7}
    assert find_checkpoint(tmp_path, 3)[1] == 3
    assert find_checkpoint(tmp_path / "nowhere", None) is None


def test_a_full_disk_leaves_the_last_good_one(tmp_path):
    save_checkpoint(tmp_path, 1, write, {"rollout_id": 1})

    def fails(folder):
        write(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left") as caught:
        save_checkpoint(tmp_path, 2, fails, {})
    assert "free space" in str(caught.value) and "iteration 1 is complete in" in str(caught.value)
    (tmp_path / "iter_0000001" / "weights.bin").unlink()
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, 2, fails, {})
    assert "there is no complete checkpoint in" in str(caught.value)  # an error promises nothing that is gone
    assert latest_iteration(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def test_saving_again_replaces(tmp_path):
    save_checkpoint(tmp_path, 1, write, {**STATE, "num_steps": 1})
    save_checkpoint(tmp_path, 1, write, {**STATE, "num_steps": 2})
    assert read_state(find_checkpoint(tmp_path, 1)[0])["num_steps"] == 2


def test_wrong_trackers_are_named(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("newest")
    with pytest.raises(CheckpointError, match="'newest' is neither an iteration nor 'release'"):
        find_checkpoint(tmp_path, None)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(CheckpointError, match="there is no checkpoint `release`"):
        find_checkpoint(tmp_path, None)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    with pytest.raises(CheckpointError, match="no checkpoint of iteration 12"):
        find_checkpoint(tmp_path, None)


@pytest.mark.parametrize("inner", [".metadata", "mp_rank_00/model_optim_rng.pt"])
@pytest.mark.parametrize("name", ["iter_0000012", "release"])
def test_a_path_to_one_checkpoint_is_refused_with_the_folder_to_name(tmp_path, name, inner):
    file = tmp_path / name / inner
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(CheckpointError, match=f"{name} is a checkpoint itself") as caught:
        find_checkpoint(tmp_path / name, 3)
    assert str(tmp_path) in caught.value.remedy and ("--ckpt-step" in caught.value.remedy) == (name != "release")
    with pytest.raises(CheckpointError, match="is a checkpoint itself"):
        weights_folder(tmp_path / name, None, "--ref-load")
    check_whole(file.parents[file.parts[::-1].index(name) - 1])


def test_the_folder_release_holds_weights_before_the_first_rollout(tmp_path):
    (tmp_path / "release").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    folder, iteration = find_checkpoint(tmp_path, None)
    assert folder == tmp_path / "release" and iteration + 1 == 0
    assert weights_folder(tmp_path, None, "--ref-load") == folder


def test_a_damaged_checkpoint_is_named_with_the_complete_ones(tmp_path):
    for number in (1, 2, 3):
        save_checkpoint(tmp_path, number, write, {})
    folder, _ = find_checkpoint(tmp_path, None)
    check_whole(folder)
    (folder / "weights.bin").write_bytes(b"x" * 50 + b"y" + b"x" * 49)
    with pytest.raises(CheckpointError, match=r"weights\.bin has different content than was written"):
        check_whole(folder)
    (folder / "weights.bin").write_bytes(b"x" * 99)
    with pytest.raises(CheckpointError, match=r"weights\.bin has 99 bytes instead of 100") as caught:
        check_whole(folder)
    assert "--ckpt-step: 1, 2" in str(caught.value)
    (folder / "weights.bin").unlink()
    with pytest.raises(CheckpointError, match=r"weights\.bin is missing"):
        check_whole(folder)
    (folder / "weights.bin").mkdir()
    with pytest.raises(CheckpointError, match=r"weights\.bin is missing"):
        check_whole(folder)
    (folder / "files.json").write_text('{"weights.bin/part": 1}')
    (folder / "weights.bin").rmdir()
    (folder / "weights.bin").touch()
    with pytest.raises(CheckpointError, match=r"weights\.bin/part is missing"):
        check_whole(folder)
    (folder / "files.json").write_text("{")
    with pytest.raises(CheckpointError, match="list of files cannot be read"):
        check_whole(folder)
    (folder / "files.json").unlink()
    with pytest.raises(CheckpointError, match=r"its list of files is missing; there is run_state\.json"):
        check_whole(folder)
    with pytest.raises(CheckpointError, match=r"it is not complete, \.metadata is missing; there is nothing"):
        check_whole(tmp_path / "iter_0000004")  # deleted under us


def test_checkpoints_of_others(tmp_path):
    """Another framework's has no list of files; an earlier instep's has sizes alone."""
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    (folder / "common.pt").write_bytes(b"c")
    with pytest.raises(CheckpointError, match=r"it is not complete, \.metadata is missing; there is common\.pt"):
        check_whole(folder)
    (folder / ".metadata").write_bytes(b"m")
    check_whole(folder)
    assert has_digests(folder)  # it never promised any
    (folder / "rng_0.pt").write_bytes(b"r")  # instep's own
    with pytest.raises(CheckpointError, match="its list of files is missing"):
        check_whole(folder)
    (folder / "files.json").write_text('{"common.pt": 1, "rng_0.pt": 1}')
    check_whole(folder)
    assert not has_digests(folder)
    (folder / "common.pt").write_bytes(b"cc")
    with pytest.raises(CheckpointError, match="has 2 bytes instead of 1"):
        check_whole(folder)


@pytest.mark.parametrize("content", ["[]", "7", '{"a": "b"}', '{"written_by": "instep"}', '{"a": {}}', "\udc80"])
def test_a_list_of_files_of_garbage_is_named(tmp_path, content):
    save_checkpoint(tmp_path, 1, write, {})
    (tmp_path / "iter_0000001" / "files.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match="its list of files cannot be read"):
        check_whole(tmp_path / "iter_0000001")


def test_a_missing_tracker_does_not_begin_anew(tmp_path):
    for number in (1, 2, 3):
        save_checkpoint(tmp_path, number, write, {})
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert find_checkpoint(tmp_path, None)[1] == 3
    (tmp_path / "iter_0000003" / "weights.bin").unlink()
    assert find_checkpoint(tmp_path, None)[1] == 2
    for number in (1, 2):
        (tmp_path / f"iter_000000{number}" / "weights.bin").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint of instep is there, but iter_0000001, iter_0"):
        find_checkpoint(tmp_path, None)


def test_a_save_replaces_only_what_instep_has_written(tmp_path):
    folder = tmp_path / "iter_0000001"
    save_checkpoint(tmp_path, 1, write, {**STATE, "num_steps": 1})
    (folder / "notes.txt").write_text("mine")
    save_checkpoint(tmp_path, 1, write, {**STATE, "num_steps": 2})
    assert read_state(folder)["num_steps"] == 2
    assert (tmp_path / "iter_0000001.old-1" / "notes.txt").read_text() == "mine"
    save_checkpoint(tmp_path, 1, write, {**STATE, "num_steps": 3})
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000001", "iter_0000001.old-1"]


def test_checkpoints_are_on_the_disk_before_they_are_named(tmp_path, monkeypatch):
    """Every file and folder is flushed before the rename, and the tracker after it."""
    calls, fsync, rename = [], os.fsync, os.rename

    def name_of(fd):
        return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(name_of(fd)), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append(f"-> {os.path.basename(b)}"), rename(a, b)))
    save_checkpoint(tmp_path / "ckpt", 1, write, {})
    at = calls.index("-> iter_0000001")
    assert {"weights.bin", "run_state.json", ".iter_0000001.partial"} <= set(calls[:at])
    assert calls[at + 1] == "ckpt" and calls[-1] == "ckpt"
    assert any("latest_checkpointed_iteration.txt" in call for call in calls[at + 2 : -1])


def test_a_tracker_of_garbage_is_named(tmp_path):
    save_checkpoint(tmp_path, 5, write, {})
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="is neither an iteration") as caught:
        latest_iteration(tmp_path)
    assert "--ckpt-step: 5" in str(caught.value)
    assert find_checkpoint(tmp_path, 5)[1] == 5


def test_only_an_export_of_instep_is_replaced(tmp_path):
    folder = tmp_path / "hf"
    check_export_folder(folder)  # not there yet
    folder.mkdir()
    check_export_folder(folder)
    (folder / "model.safetensors").write_bytes(b"w")
    with pytest.raises(ConfigError, match=r"more than an export of instep \(model\.safetensors\)"):
        check_export_folder(folder)
    write_manifest(folder, "export")
    check_export_folder(folder)
    (folder / "model.safetensors").write_bytes(b"edited")
    check_export_folder(folder)
    (folder / "runs").mkdir()
    (folder / "runs" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="files.json, model.safetensors, runs"):
        check_export_folder(folder)
    save_checkpoint(tmp_path, 1, write, {})
    with pytest.raises(ConfigError, match="holds more than an export"):
        check_export_folder(tmp_path / "iter_0000001")
    with pytest.raises(ConfigError, match="it is a file"):
        check_export_folder(tmp_path / "latest_checkpointed_iteration.txt")


def test_how_an_interrupted_run_goes_on(tmp_path):
    def said(run_id="ours", **given):
        names = "save load save_interval ckpt_step finetune start_rollout_id".split()
        args = argparse.Namespace(**{**dict.fromkeys(names), "finetune": False, **given})
        return how_to_go_on(args, run_id)

    save = str(tmp_path)
    assert said() == "nothing was saved (no --save): the same command starts again"
    assert said(save=save, load=save, save_interval=5) == (
        f"nothing was saved yet (--save-interval 5): the same command starts again from {save}"
    )
    assert "nothing was saved yet (no --save-interval): " in said(save=save)
    last = save_checkpoint(tmp_path, 3, write, {**STATE, "run_id": "ours"})
    assert said(save=save, load=save) == f"the last checkpoint is {last}: the same command goes on from it"
    assert "nothing was saved yet" in said("another", save=save)  # that checkpoint is of an earlier run
    assert said(save=save, load="other", finetune=True) == (
        f"the last checkpoint is {last}: the same command, with --load {save}, without --finetune, goes on from it"
    )
    save_checkpoint(tmp_path, 4, write, STATE)  # of an instep that gave runs no identity
    assert "the last checkpoint is" in said(None, save=save) and "nothing was saved yet" in said(save=save)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("x")
    assert "'x' is neither an iteration" in said(save=save)


def test_a_negative_iteration_is_none_and_the_release_beside_it_is_named(tmp_path):
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / ".metadata").touch()
    for text, error in (("-1", "'-1' is neither an iteration"), ("12", "no checkpoint of iteration 12")):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
        with pytest.raises(CheckpointError, match=error) as caught:
            find_checkpoint(tmp_path, None)
        assert "release (its number, or `release`)" in caught.value.remedy
