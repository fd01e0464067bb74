"""Folders of killed runs are swept and listed; those of living ones, and anybody else's, are left alone."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from instep.preflight.doctor.installation import leftover_folders
from instep.system.processes import FolderLock
from instep.system.scratch import LOCK, Scratch, boot_id, left, sweep

HOLD = """
import sys, time
from instep.system.scratch import Scratch
scratch = Scratch("instep-golden-", sys.argv[1])
(scratch.path / "model").write_text("weights")
print(scratch.path, flush=True)
time.sleep(60)
"""
SWEEP = "import sys, pathlib; from instep.system.scratch import sweep; sweep(pathlib.Path(sys.argv[1]))"


@pytest.fixture
def holder(tmp_path):
    """Another process with a folder in `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    process.folder = type(tmp_path)(process.stdout.readline().strip())
    yield process
    process.kill()
    process.wait(10)


def test_a_folder_lives_as_long_as_its_owner(tmp_path, holder):
    assert holder.folder.stat().st_mode & 0o777 == 0o700
    sweep(tmp_path)
    assert left(tmp_path) == [] and leftover_folders([tmp_path]).status == "ok"
    assert (holder.folder / "model").exists()
    holder.kill()
    holder.wait(10)
    assert left(tmp_path) == [holder.folder] and (holder.folder / "model").exists()
    check = leftover_folders([tmp_path])
    assert check.status == "warn" and check.remedy.endswith(f"rm -r {holder.folder}")
    with Scratch("instep-run-", tmp_path):  # the next start
        assert not holder.folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_another_pid_namespace_sees_the_owner(tmp_path, holder):
    """There the owner's process number means nothing."""
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for users here")
    subprocess.run([*alone, sys.executable, "-c", SWEEP, tmp_path], check=True, timeout=60)
    assert (holder.folder / "model").exists()


@pytest.mark.parametrize(
    ("lock", "stays"),
    [
        ("process 7 on another-host 1234-5678", True),
        ("process 7 on another-host", True),  # as earlier versions write it
        ("process 7 on", True),
        ("", True),  # its owner has not written it yet, or was killed before
        (f"process 7 on a-container {boot_id()}", False),
        (f"process 7 on {socket.gethostname()} 1234-5678", False),  # before this host was started anew
        (f"process 7 on {socket.gethostname()}", False),
    ],
)
def test_a_folder_of_another_host_stays(tmp_path, lock, stays):
    """On a file system that hosts share its lock may be free here while its owner lives there."""
    folder = tmp_path / "instep-run-1"
    folder.mkdir()
    (folder / LOCK).write_text(lock)
    assert left(tmp_path) == ([] if stays else [folder])
    sweep(tmp_path)
    assert folder.exists() == stays


def test_what_is_not_ours_stays(tmp_path):
    checkout, run_dir, link = tmp_path / "instep-checkout", tmp_path / "instep-run-1", tmp_path / "instep-link"
    checkout.mkdir()
    FolderLock(run_dir, "--run-dir").release()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).touch()
    link.symlink_to(elsewhere)
    (tmp_path / "instep-file").touch()
    before = sorted(os.listdir(tmp_path))
    assert left(tmp_path) == []
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before and (elsewhere / LOCK).exists()


def test_the_beginning_of_an_export_that_was_killed_is_found(tmp_path):
    scratch = Scratch(".instep-export-", tmp_path)
    assert left(tmp_path) == []
    os.close(scratch._fd)  # as its process ends
    assert left(tmp_path) == [scratch.path]
    other = Scratch(".instep-export-", tmp_path)  # the next export there
    assert not scratch.path.exists()
    other.remove()
