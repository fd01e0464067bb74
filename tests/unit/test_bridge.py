"""`vllm_bridge_config.json`: where it is looked for, and what is not believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import instep.weights.bridge
from instep.errors import ConfigError
from instep.weights.bridge import NAME, shared_folder
from instep_engine.place import SYNC, process_mark


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user, with none of the files where they are looked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.setattr(instep.weights.bridge, "DEFAULT", tmp_path / "default")
    return tmp_path


def server(folder: Path, name: str, **own: str) -> Path:
    """What a server has written into the folder, and the folder of its memory."""
    memory = folder / f"{SYNC}{name}"
    memory.mkdir(parents=True, mode=0o700)
    (memory / "memory-0.json").write_text(json.dumps({"nonce": name}))
    about = {"folder": str(memory), "nonce": name, "process": process_mark(os.getpid()), **own}
    (folder / NAME).write_text(json.dumps({"model": name, "instep": about}))
    (folder / NAME).chmod(0o600)
    return memory


def test_it_is_looked_for_in_the_order_of_the_seed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"(?s)no {NAME} in .*default.*--vllm-config-path"):
        shared_folder(None)
    expected = server(folder / "default", "default")
    assert shared_folder(None) == expected
    expected = server(folder, "here")
    assert shared_folder(None) == expected
    monkeypatch.setenv("LOGDIR", str(folder / "logs"))
    assert shared_folder(None) == expected
    assert shared_folder(None) != server(folder / "logs", "logs") == shared_folder(None)
    assert server(folder / "given", "given") == shared_folder(str(folder / "given" / NAME))


@pytest.mark.parametrize(
    "own,what",
    [
        ({"nonce": "old"}, "it is stale: its server now shares other memory"),
        ({"process": "boot 1 2"}, "it is stale: the server that wrote it has ended"),
        ({"process": ""}, "it is stale: the server that wrote it has ended"),
    ],
)
def test_a_stale_file_is_named(folder: Path, own: dict[str, str], what: str) -> None:
    server(folder, "here", **own)
    with pytest.raises(ConfigError, match=what) as caught:
        shared_folder(None)
    assert NAME in str(caught.value.where) and caught.value.remedy


def test_a_process_that_has_ended_does_not_live(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        mark = process_mark(process.pid)
        server(folder, "here", process=mark)
        assert shared_folder(None).name == f"{SYNC}here"
        process.kill()
    with pytest.raises(ConfigError, match="has ended"):
        shared_folder(None)


@pytest.mark.parametrize(
    "text,what", [("{", "cannot be read"), ("[]", "not a file of instep's"), ("{}", "not a file of")]
)
def test_another_file_is_not_believed(folder: Path, text: str, what: str) -> None:
    (folder / NAME).write_text(text)
    (folder / NAME).chmod(0o600)
    with pytest.raises(ConfigError, match=what):
        shared_folder(None)


def test_a_file_that_others_may_have_written_is_not_read(folder: Path) -> None:
    server(folder, "here")
    (folder / NAME).chmod(0o644)
    with pytest.raises(ConfigError, match="has mode 0644.*another user"):
        shared_folder(None)
    (folder / "link").symlink_to(folder / NAME)
    with pytest.raises(ConfigError, match="cannot be read"):
        shared_folder(str(folder / "link"))
