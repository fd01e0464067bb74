import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.assets import make_checkpoint, make_conversations, make_prompts
from tests.e2e import commands
from tests.e2e.commands import children, gone_within

# Loopback only; idle workers, one per CPU of each node, would only slow the tests down, and workers at Ray's nice 15
# starve beside other tests. Ray reads it when imported.
LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with `hf/`, `train.jsonl`, `eval.jsonl` and `sft.jsonl`."""
    root = tmp_path_factory.mktemp("tiny")
    make_checkpoint(root / "hf")
    make_prompts(root / "train.jsonl", 64)
    make_prompts(root / "eval.jsonl", 16, seed=1)
    make_conversations(root / "sft.jsonl", 64)
    return root


@pytest.fixture
def no_plots(monkeypatch):
    """Runs in the tests' own process draw none, as those that are forked (`tests/no_plots.py`)."""
    monkeypatch.setattr("instep.observability.report.PLOTS", {})


@pytest.fixture
def ray_tmp(monkeypatch):
    """A folder for sessions of Ray (its sockets need a short path); it must be empty at the end."""
    with tempfile.TemporaryDirectory(prefix="ray-") as path:
        monkeypatch.setitem(commands.ENVIRONMENT, "RAY_TMPDIR", path)
        yield Path(path)


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray with 3 nodes of 8 CPUs and 8 GPUs, which are numbers only; and its process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOOPBACK.items():
            patch.setenv(name, value)
            patch.setitem(commands.ENVIRONMENT, name, value)
        command = [sys.executable, str(Path(__file__).parent / "ray_nodes.py"), "3", "8", "8"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nodes:
            assert nodes.stdin and nodes.stdout
            address = nodes.stdout.readline().strip()
            assert address.startswith("127.0.0.1:")
            ours = children(nodes.pid)
            yield address, nodes
            nodes.stdin.close()
            nodes.wait(60)
        assert gone_within(ours, 10)


@pytest.fixture(scope="module")
def small(tiny, tmp_path_factory):
    """Like `tiny`, with heads that vLLM has on a CPU."""
    root = tmp_path_factory.mktemp("small")
    make_checkpoint(root / "hf", head_dim=32)
    for name in ("train.jsonl", "eval.jsonl"):
        (root / name).write_text((tiny / name).read_text())
    return root


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A model with room for long responses, with heads that vLLM has on a CPU."""
    folder = tmp_path_factory.mktemp("long")
    make_checkpoint(folder / "hf", max_len=1024, head_dim=32)
    make_prompts(folder / "train.jsonl", 64)
    return folder
