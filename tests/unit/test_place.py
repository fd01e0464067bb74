"""An engine reads weights from a folder of its own user's run only, and follows no link."""

import os
import stat
from pathlib import Path

import pytest

from instep_engine.bucket import read_bucket
from instep_engine.manifest import BucketManifest, TensorRecord, WeightMismatch, digest
from instep_engine.place import NoPlace, check_checkpoint, open_bucket


def place(tmp_path, name="instep-sync-1", mode=0o700):
    folder = tmp_path / name
    folder.mkdir()
    folder.chmod(mode)
    (folder / "b.bin").write_bytes(b"12345678")
    return folder / "b.bin"


def test_a_bucket_of_a_run_is_read(tmp_path):
    path = place(tmp_path)
    record = TensorRecord("w", (2,), "float32", 0, 8, digest(b"12345678"))
    tensors = read_bucket(BucketManifest(str(path), "1", "n", (record,)))
    path.unlink()
    assert bytes(tensors["w"].numpy().tobytes()) == b"12345678"  # what was read stays readable


def make_secret(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"12345678")
    return secret


@pytest.mark.parametrize("kind", ["outside", "folder link", "file link", "hard link", "open", "fifo", "up", "relative"])
def test_no_other_file_is_read(tmp_path, monkeypatch, kind):
    secret = make_secret(tmp_path)
    path = place(tmp_path, "instep-sync-2" if kind != "open" else "instep-sync-3", 0o755 if kind == "open" else 0o700)
    if kind == "outside":
        path = secret
    elif kind == "folder link":
        (tmp_path / "instep-sync-link").symlink_to(path.parent)
        path = tmp_path / "instep-sync-link" / "b.bin"
    elif kind in ("file link", "hard link", "fifo"):
        path.unlink()
        {"file link": path.symlink_to, "hard link": path.hardlink_to, "fifo": lambda _: os.mkfifo(path)}[kind](secret)
    elif kind == "up":
        path = path.parent / ".." / "secret"
    elif kind == "relative":
        monkeypatch.chdir(tmp_path)
        path = Path("instep-sync-2/b.bin")
    with pytest.raises((NoPlace, OSError)):
        os.close(open_bucket(str(path)))
    for guess in (b"12345678", b"00000000"):  # right or wrong: the answer is the same
        record = TensorRecord("w", (2,), "float32", 0, 8, digest(guess))
        with pytest.raises(WeightMismatch, match="cannot be read"):
            read_bucket(BucketManifest(str(path), "1", "n", (record,)))


def seen_as(monkeypatch, *, uid=None, folder_uid=None, mode=None):
    """Let a file system show other owners and modes than the real ones."""
    for name in ("fstat", "lstat"):
        real = getattr(os, name)

        def look(target, real=real):
            fields = list(real(target))
            is_folder = stat.S_ISDIR(fields[0])
            shown = folder_uid if is_folder and folder_uid is not None else uid
            fields[4] = fields[4] if shown is None else shown
            fields[0] = fields[0] if mode is None else stat.S_IFMT(fields[0]) | mode
            return os.stat_result(fields)

        monkeypatch.setattr(os, name, look)


FILE_SYSTEMS = {
    "root is nobody": {"uid": 65534},
    "one owner": {"uid": 12345, "mode": 0o777},
    "one mode": {"mode": 0o755},
}


@pytest.mark.parametrize("shown", FILE_SYSTEMS.values(), ids=FILE_SYSTEMS)
def test_a_file_system_may_have_owners_and_modes_of_its_own(tmp_path, monkeypatch, shown):
    path = place(tmp_path)
    golden = tmp_path / "instep-golden-1" / "hf"
    golden.mkdir(parents=True)
    golden.parent.chmod(0o700)
    (golden / "model.safetensors").write_bytes(b"1")
    link = path.with_name("link")
    link.symlink_to(make_secret(tmp_path))
    hard = path.with_name("hard")
    hard.hardlink_to(tmp_path / "secret")
    before = sorted(os.listdir(path.parent))
    seen_as(monkeypatch, **shown)
    os.close(open_bucket(str(path)))
    check_checkpoint(str(golden))
    for other in (link, hard):
        with pytest.raises((NoPlace, OSError)):
            open_bucket(str(other))
    assert sorted(os.listdir(path.parent)) == before


@pytest.mark.parametrize("shown", [{"folder_uid": 12345}, {"uid": 54321, "folder_uid": 12345, "mode": 0o777}])
def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch, shown):
    path = place(tmp_path)
    seen_as(monkeypatch, **shown)
    with pytest.raises(NoPlace, match=f"belongs to user 12345 and has mode .*; the engine runs as user {os.geteuid()}"):
        open_bucket(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
def test_a_folder_that_is_another_users_is_refused(tmp_path):
    for mode in (0o700, 0o777):
        path = place(tmp_path, f"instep-sync-{mode}", mode)
        os.chown(path.parent, 12345, 12345)
        with pytest.raises(NoPlace, match="belongs to user 12345"):
            open_bucket(str(path))
        assert os.listdir(path.parent) == ["b.bin"]


def test_a_checkpoint_lies_in_a_golden_folder(tmp_path):
    folder = tmp_path / "instep-golden-1"
    folder.mkdir(mode=0o700)
    (folder / "hf").mkdir()
    (folder / "hf" / "model.safetensors").write_bytes(b"1")
    check_checkpoint(str(folder / "hf"))
    (folder / "hf" / "config.json").symlink_to(make_secret(tmp_path))
    (folder / "link").symlink_to(tmp_path)
    for path in (folder / "hf", folder / "link", folder / "..", tmp_path / "hf"):
        with pytest.raises(NoPlace):
            check_checkpoint(str(path))
    with pytest.raises(FileNotFoundError):
        check_checkpoint(str(folder / "nothing"))
