"""What a save leaves in place whenever it ends, who reads the files of a checkpoint, and whose run a folder holds."""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from instep.arguments.args import Args
from instep.arguments.parse import parse
from instep.checkpoints import integrity
from instep.checkpoints.folders import (
    checkpoints_read,
    find_checkpoint,
    finish_renames,
    has_optimizer,
    read_state,
)
from instep.checkpoints.integrity import check_whole, digests_of_rank, linked_digests
from instep.controller.controller import Controller
from instep.controller.run_state import Beginning, beginning
from instep.controller.trainer import Trainer
from instep.errors import CheckpointError, ConfigError
from instep.system.processes import FolderLock
from tests.checkpoints import save_checkpoint
from tests.command_line import argv, make_folder
from tests.logged_run import run

STATE: dict[str, Any] = {"rollout_id": 3, "num_steps": 4, "version": 5, "ledger": {}, "evaluations": [], "args": {}}


def write(folder: Path) -> dict[str, str]:
    (folder / "weights.bin").write_bytes(b"x" * 100)
    return {}


def save(root: Path, iteration: int, run_id: str, **more: Any) -> Path:
    return save_checkpoint(root, iteration, write, {**STATE, "rollout_id": iteration, "run_id": run_id}, **more)


# ---- the first save of a run where another one has saved -------------------------------------------------------------


@pytest.fixture
def earlier(tmp_path) -> Path:
    """The checkpoints 3 and 5 of an earlier run."""
    for iteration in (3, 5):
        save(tmp_path / "ckpt", iteration, "earlier")
    return tmp_path / "ckpt"


@pytest.mark.parametrize("iteration", [1, 5])
def test_a_first_save_moves_the_earlier_ones_when_it_is_in_place(earlier, iteration):
    moved: list[Path] = []

    def checks(folder: Path) -> dict[str, str]:
        assert read_state(find_checkpoint(earlier, None)[0])["run_id"] == "earlier" and not moved
        return write(folder)

    save_checkpoint(earlier, iteration, checks, {**STATE, "run_id": "new"}, moved.append)
    assert moved == [earlier / "old-1"]
    assert sorted(p.name for p in earlier.iterdir()) == [
        f"iter_000000{iteration}",
        "latest_checkpointed_iteration.txt",
        "old-1",
    ]
    assert read_state(find_checkpoint(earlier, None)[0])["run_id"] == "new"
    assert find_checkpoint(earlier / "old-1", None)[1] == 5
    for number in (3, 5):
        check_whole(earlier / "old-1" / f"iter_000000{number}")
        assert read_state(earlier / "old-1" / f"iter_000000{number}")["run_id"] == "earlier"
    save(earlier, iteration + 1, "new")
    assert find_checkpoint(earlier, iteration)[0].is_dir()  # its own ones stay


def test_a_first_save_that_fails_leaves_the_earlier_ones(earlier):
    def fails(folder: Path) -> dict[str, str]:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(earlier, 1, fails, STATE, lambda place: None)
    assert find_checkpoint(earlier, None)[1] == 5 and not (earlier / "old-1").exists()


def killed_at(root: Path, iteration: int, call: int) -> bool:
    """Save in a process that ends at its `call`-th change of a name; whether it came so far."""
    if (pid := os.fork()) == 0:
        left = [call]

        def counted(change: Any) -> Any:
            def instead(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
                return change(*args, **kwargs)

            return instead

        for name in ("rename", "replace", "mkdir", "unlink"):
            setattr(os, name, counted(getattr(os, name)))
        shutil.rmtree = counted(shutil.rmtree)
        save(root, iteration, "new", earlier=lambda place: None)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("iteration", [1, 5])
def test_a_first_save_that_is_killed_at_any_change_leaves_a_checkpoint_in_place(earlier, iteration, tmp_path):
    for call in range(100):
        root = shutil.copytree(earlier, tmp_path / f"{call}")
        killed = killed_at(root, iteration, call)
        finish_renames(root)
        folder, _ = find_checkpoint(root, None)
        check_whole(folder)
        assert read_state(folder)["run_id"] in (("earlier", "new") if killed else ("new",))
        assert not list(root.glob(".iter_*.partial"))
        there = [p.parent.name for p in root.rglob("run_state.json") if read_state(p.parent)["run_id"] == "earlier"]
        assert {name.strip(".").removesuffix(".old") for name in there} == {"iter_0000003", "iter_0000005"}
        if not killed:
            break
    assert 10 < call < 50


# ---- who reads the files ---------------------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The names of the files that digests were made of."""
    names: list[str] = []
    digest = integrity._digest

    def counting(path: Path, *args: Any) -> str:
        names.append(path.name)
        return digest(path, *args)

    monkeypatch.setattr(integrity, "_digest", counting)
    return names


def test_each_rank_reads_what_it_has_written_and_links_are_read_once(tmp_path, read):
    def write_ranks(folder: Path) -> dict[str, str]:
        digests = {}
        for place, inner in ((folder, ""), (folder / "critic", "critic/")):
            place.mkdir(exist_ok=True)
            for rank in (0, 1, 11):
                (place / f"__{rank}_0.distcp").write_bytes(inner.encode() + bytes([rank]) * 99)
                (place / f"rng_{rank}.pt").write_bytes(bytes([rank]))
            (place / ".metadata").write_bytes(b"m")
            for rank in (0, 1, 11):
                own = digests_of_rank(place, rank)
                assert own.keys() == {f"__{rank}_0.distcp", f"rng_{rank}.pt"}
                digests |= {inner + name: digest for name, digest in own.items()}
        assert len(read) == 12
        return digests

    whole = save_checkpoint(tmp_path / "a", 1, write_ranks, STATE)
    assert sorted(read[12:]) == [".metadata", ".metadata", "run_state.json"]

    def link(folder: Path) -> dict[str, str]:
        shutil.copytree(whole / "critic", folder / "critic", copy_function=os.link)
        (folder / "critic" / "rng_1.pt").unlink()
        (folder / "critic" / "rng_1.pt").write_bytes(b"copied")  # to another disk, say
        return linked_digests(folder, whole)

    read.clear()
    critic = save_checkpoint(tmp_path / "b", 1, link, None)
    assert read == ["rng_1.pt"]
    read.clear()
    check_whole(whole, critic)
    assert len(read) == 16  # 15 and the copy: no link twice
    (critic / "critic" / "__1_0.distcp").write_bytes(b"critic/" + bytes(99))
    with pytest.raises(CheckpointError, match=r"critic/__1_0\.distcp has different content"):
        check_whole(whole, critic)


def test_files_that_other_hosts_have_written_are_waited_for_and_not_left_out(tmp_path, monkeypatch):
    def elsewhere(folder: Path) -> dict[str, str]:
        (folder / "critic").mkdir()
        threading.Timer(0.5, (folder / "critic" / "__1_0.distcp").write_bytes, [b"x"]).start()
        return {"critic/__1_0.distcp": "told"}

    folder = save_checkpoint(tmp_path, 1, elsewhere, STATE)
    assert integrity._read_manifest(folder)[1]["critic/__1_0.distcp"] == (1, "told")
    monkeypatch.setattr(integrity, "SEEN_SECONDS", 0.3)
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(
            tmp_path, 2, lambda folder: {**write(folder), "__1_0.distcp": "told", "rng_1.pt": "told"}, STATE
        )
    assert "__1_0.distcp, rng_1.pt (of 2 such files) are written, and not in the folder" in error.value.what
    assert "iteration 1 is complete" in error.value.remedy and find_checkpoint(tmp_path, None) == (folder, 1)


def test_a_user_is_told_while_a_resume_compares(tmp_path, monkeypatch):
    folder = save(tmp_path, 1, "")
    told: list[str] = []
    check_whole(folder, tell=told.append)
    assert told == []
    monkeypatch.setattr(integrity, "TELL_SECONDS", 0.01)
    digest = integrity._digest
    monkeypatch.setattr(integrity, "_digest", lambda *args: time.sleep(0.2) or digest(*args))
    check_whole(folder, tell=told.append)
    assert told and told[0].startswith("comparing 0.00 GB of checkpoints with their digests: ")


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    folder = save(tmp_path, 1, "")

    def fails(path: Path, *args: Any) -> str:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(integrity, "_digest", fails)
    with pytest.raises(CheckpointError, match=r"(weights\.bin|run_state\.json) cannot be read: Input/output error"):
        check_whole(folder)


def test_files_are_read_when_the_folders_are_locked(tmp_path, read):
    root = tmp_path / "ckpt"
    folder = save(root, 1, "")
    (folder / "weights.bin").write_bytes(b"y" * 100)
    read.clear()
    names = "ref_load use_opd critic_load critic_save".split()
    args = argparse.Namespace(**dict.fromkeys(names), load=str(root), save=str(root), ckpt_step=None, run_dir=str(root))
    check_whole(*checkpoints_read(args), digests=False)
    lock = FolderLock(root, "--save")
    with pytest.raises(ConfigError, match="another run is at work"):
        Controller(args, title="")
    assert read == []
    lock.release()
    with pytest.raises(CheckpointError, match="different content"):
        check_whole(folder)


# ---- whose run a folder holds ----------------------------------------------------------------------------------------


def begins(root: Path, run_dir: Path, **more: Any) -> Any:
    given = {"ckpt_step": None, "finetune": False, "start_rollout_id": None, "deterministic_mode": False, **more}
    return beginning(Args(load=str(root), run_dir=str(run_dir), command="train", **given))


def saved(root: Path, run_id: str | None, run_dir: Path) -> Path:
    args = {"run_dir": str(run_dir), "command": "train"}
    state = {**STATE, "args": args} | ({} if run_id is None else {"run_id": run_id})
    return save_checkpoint(root, 3, write, state)


def test_a_resume_does_not_go_on_in_the_folder_of_another_run(tmp_path):
    """Run A, then run B with the same --run-dir, then A again."""
    run_dir, (a, b) = tmp_path / "run", (tmp_path / "a", tmp_path / "b")
    for root, run_id in ((a, "A"), (b, "B")):
        with run(run_dir, run_id=run_id) as log:
            log.log(0, {"train/loss": 1.0})
        saved(root, run_id, run_dir)
    assert begins(b, run_dir).run_id == "B"
    with pytest.raises(
        ConfigError, match="holds the files of another run than the one that .*iter_0000003 belongs"
    ) as e:
        begins(a, run_dir)
    assert e.value.where == "--run-dir" and f"it was {run_dir / 'old-1'}" in e.value.remedy
    assert begins(a, run_dir / "old-1").run_id == "A" and begins(a, tmp_path / "new").run_id == "A"
    fresh = begins(a, run_dir, finetune=True)
    assert fresh.state is None and fresh.run_id not in (None, "A", "B")


def test_a_run_that_an_earlier_instep_began_goes_on_and_has_no_identity(tmp_path):
    run_dir = tmp_path / "run"
    saved(tmp_path / "a", None, run_dir)
    with run(run_dir):
        pass
    assert begins(tmp_path / "a", run_dir).run_id is None
    with run(run_dir, run_id="B"):
        pass
    with pytest.raises(ConfigError, match="another run"):
        begins(tmp_path / "a", run_dir)


@pytest.mark.parametrize(
    ("state", "more", "optimizer"), [(STATE, "", True), (STATE, "--no-load-optim", False), (None, "", False)]
)
def test_a_checkpoint_of_another_framework_gives_its_weights_alone(tmp_path, monkeypatch, state, more, optimizer):
    make_folder(tmp_path, monkeypatch)
    loads: list[Any] = []
    ranks = SimpleNamespace(
        role="actor",
        num_ranks=1,
        start=lambda *words, **more: lambda: [SimpleNamespace(dp_rank=0, dp_size=1)],
        call=lambda *words, **more: [loads.append(words) or ""],
    )
    cluster: Any = SimpleNamespace(workers=ranks, critic=SimpleNamespace(num_ranks=0), setup_requests={"actor": []})
    folder = tmp_path / "iter_0000003"
    Trainer(
        parse(argv(f"--load . {more}")),
        cluster,
        Beginning(folder, state, [], 4, "A"),
        num_rollout=5,
        scratch=tmp_path,
        tell=print,
    )
    assert loads == [("load", folder, optimizer), ("remark",)]


def test_a_foreign_checkpoint_goes_on_with_its_optimizer_where_it_has_one(tmp_path):
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")

    def index(*keys: str) -> None:
        tensors: Any = dict.fromkeys(keys, BytesStorageMetadata())
        (folder / ".metadata").write_bytes(pickle.dumps(Metadata(tensors)))

    def begin(**more: Any) -> Any:
        return begins(tmp_path, tmp_path / "run", **{"no_load_optim": False, **more})

    index("decoder.final_layernorm.weight", "rng_state/shard_0_1")
    assert begin().rollout_id == 11 and not begin().foreign_optimizer
    assert "takes its weights alone, and reads its data from the start" in begin().notes[-1]
    index("decoder.final_layernorm.weight", "optimizer.state.exp_avg.decoder.final_layernorm.weight")
    assert begin().foreign_optimizer and "weights and its optimizer's state" in begin().notes[-1]
    assert not begin(no_load_optim=True).foreign_optimizer and not begin(finetune=True).foreign_optimizer
    folder.rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert begin().rollout_id == 0 and not begin().foreign_optimizer


def test_the_optimizer_of_the_format_torch_is_found(tmp_path):
    folder = tmp_path / "iter_0000010" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"model": {}}, folder / "model_optim_rng.pt")
    assert not has_optimizer(folder.parent)
    torch.save({"model": {}, "optimizer": {}}, folder / "model_optim_rng.pt")
    assert has_optimizer(folder.parent)
    torch.save({"model": {}}, folder / "model_optim_rng.pt")
    (folder / "distrib_optim.pt").touch()
    assert has_optimizer(folder.parent)
