"""Trackio as a sink: what it gets, and servers that are gone, never answer, or stop in the middle of a run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from instep.arguments import loggers
from instep.arguments.parse import parse
from instep.controller.round_metrics import trackio_settings
from instep.observability import trackio_main
from instep.observability.trackio_main import Rows, Server, messages
from instep.system.ports import free_port
from tests import forks
from tests.command_line import argv, make_folder, refusal
from tests.logged_run import make_groups, run

with_trackio = pytest.mark.skipif(
    find_spec("trackio") is None, reason="trackio: not installed (instep install trackio)"
)
OPTIONS = {"project": "p", "run_name": None, "server_url": None}


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Trackio's store on this host."""
    for name in ("TRACKIO_WRITE_TOKEN", "TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    with forks.cold():
        yield tmp_path / "store"


def table(store: Path, columns: str, name: str) -> list[tuple]:
    if not (store / "p.db").exists():
        return []
    with contextlib.closing(sqlite3.connect(store / "p.db")) as base:
        if not base.execute("select 1 from sqlite_master where name = ?", [name]).fetchone():
            return []  # the server has made the file, not yet its tables
        return base.execute(f"select {columns} from {name} order by id").fetchall()


def until(true: Callable[[], object], seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@with_trackio
def test_metrics_samples_and_alarms_are_kept_on_this_host(tmp_path: Path, store: Path) -> None:
    bad = {"train/loss": 0.5, "train/grad_norm": float("nan"), "rollout/reward_mean": 0.25}
    args = {"lr": 0.125, "wandb_key": "s3cret"}
    with run(tmp_path / "run", trackio=OPTIONS, run_id="0123456789", args_dict=args) as log:
        log.log(0, bad)
        log.samples(0, make_groups(), "train", 2)
        log.log(1, {"eval/x/reward_mean": 1.0})
    found = [(step, json.loads(metrics)) for step, metrics in table(store, "step, metrics", "metrics")]
    assert [step for step, _ in found] == [0, 1, 0] and found[1][1] == {"eval/x/reward_mean": 1.0}
    assert found[0][1].items() >= {"train/loss": 0.5, "train/grad_norm": "NaN"}.items()
    ((name, config),) = table(store, "run_name, config", "configs")
    assert name == "run-012345" and json.loads(config)["lr"] == 0.125 and b"s3cret" not in (store / "p.db").read_bytes()
    ((title, text, level, step),) = table(store, "title, text, level, step", "alerts")
    assert (title, level, step) == ("alarm grad_norm_spike", "warn", 0) and text.startswith("train/grad_norm is nan")
    traces = [(json.loads(asked), json.loads(more)) for asked, more in table(store, "messages, metadata", "traces")]
    assert len(traces) >= 2 and [message["role"] for message in traces[0][0]] == ["user", "assistant"]
    assert traces[0][0][1]["content"] == "answer 0" and 0 < traces[0][1]["reward"] < 1
    with run(tmp_path / "run", trackio=OPTIONS, run_id="0123456789", resume_from_step=1) as log:
        log.log(1, {"train/loss": 0.25})
    rows = table(store, "run_name, step", "metrics")  # of the same run, which gets nothing twice
    assert rows == [("run-012345", step) for step in (0, 1, 0, 1)]
    assert (tmp_path / "run/logs/trackio.log").exists()


@contextlib.contextmanager
def silent() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@with_trackio
@pytest.mark.parametrize(("kind", "why"), [("closed", "Connection refused"), ("silent", "timed out")])
def test_a_server_that_does_not_answer_at_the_start_is_told_in_one_line(
    tmp_path: Path, store: Path, kind: str, why: str
) -> None:
    with silent() if kind == "silent" else contextlib.nullcontext(free_port()) as port:
        options = {**OPTIONS, "server_url": f"http://127.0.0.1:{port}/?write_token=s3cret"}
        with run(tmp_path / "run", trackio=options, run_id="0123456789") as log:
            began = time.monotonic()
            for step in range(3):
                log.log(step, {"train/loss": 0.5, "train/grad_norm": 1.0})
            assert time.monotonic() - began < 1
    lines = [line for line in log.progress.console.file.getvalue().splitlines() if "Trackio" in line]
    assert len(lines) == 1 and f"127.0.0.1:{port} does not answer" in lines[0] and why in lines[0]
    assert "s3cret" not in lines[0]
    assert [row[0] for row in table(store, "step", "metrics")] == [0, 1, 2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[int, str, Path]]:
    """A server of Trackio: its process, its address and its store."""
    port, store = free_port(), tmp_path / "of-server"
    env = {"TRACKIO_DIR": str(store), "TRACKIO_WRITE_TOKEN": "s3cret", "HF_HUB_OFFLINE": "1"}
    code = f"import trackio; trackio.show(open_browser=False, block_thread=True, server_port={port})"
    with (tmp_path / "server.log").open("w") as log:
        words = [sys.executable, "-c", code]
        process = subprocess.Popen(words, env={**os.environ, **env}, stdout=log, stderr=log, cwd=tmp_path)
    try:
        until(lambda: answers(port))
        yield process.pid, f"http://127.0.0.1:{port}/?write_token=s3cret", store
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=1).status == 200
    return False


@with_trackio
def test_a_server_that_stops_in_the_middle_gets_what_it_has_missed(
    tmp_path: Path, server: tuple[int, str, Path]
) -> None:
    pid, url, theirs = server
    with run(tmp_path / "run", trackio={**OPTIONS, "server_url": url}, run_id="0123456789") as log:
        printed = log.progress.console.file.getvalue
        log.log(0, {"train/loss": 0.5, "train/grad_norm": 1.0})
        until(lambda: table(theirs, "step", "metrics"))
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        log.log(1, {"train/loss": 0.5, "train/grad_norm": 1.0})
        assert time.monotonic() - began < 1
        until(lambda: "does not answer (timed out): the run goes on" in printed())
        os.kill(pid, signal.SIGCONT)
        until(lambda: "answers again" in printed())
    assert [row[0] for row in table(theirs, "step", "metrics")] == [0, 1]
    assert sum("Trackio" in line for line in printed().splitlines()) == 2 and "s3cret" not in printed()


# Without the package


def test_what_a_server_says_is_told_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is stopped, goes on, and has ended; 404 is an answer."""
    monkeypatch.setattr(trackio_main, "PROBE_SECONDS", 0.5)
    port, lines = free_port(), []
    words = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seen = Server(f"http://127.0.0.1:{port}/?write_token=s3cret", lines.append)

    def look() -> bool:
        seen._looked = -10.0
        return seen.look("and waits")

    try:
        until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        assert look() and lines == []
        process.send_signal(signal.SIGSTOP)
        assert not look() and not look() and len(lines) == 1
        process.send_signal(signal.SIGCONT)
        until(look)
    finally:
        process.kill()
        process.wait()
    assert not look() and not seen.look("and waits")
    name = f"Trackio at http://127.0.0.1:{port}"
    assert lines[0] == f"{name} does not answer (timed out): the run goes on, and waits"
    assert lines[1] == f"{name} answers again, and gets what it has missed"
    assert len(lines) == 3 and "Connection refused" in lines[2]


def test_a_run_goes_on_when_the_process_has_ended(tmp_path: Path) -> None:
    """It cannot open its run: the package is missing, or takes no such name of a project."""
    with run(tmp_path / "run", trackio={**OPTIONS, "project": "a_system"}, run_id="0123456789") as log:
        until(lambda: "Trackio's process has ended, and the run goes on" in log.progress.console.file.getvalue())
        log.log(0, {"train/loss": 0.5})
    assert "Error" in (tmp_path / "run/logs/trackio.log").read_text()


def test_rows_are_read_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n{"st')
    rows = Rows(path, lambda _, row: row)
    rows.offset = 12  # as after a resume: the rows before it were sent
    assert rows.read()[1] == [{"step": 1}] and rows.read()[1] == []
    with path.open("ab") as file:
        file.write(b'ep": 2}\n')
    assert rows.read()[1] == [{"step": 2}]
    row = {"prompt": "1 + 1", "response": "2"}
    assert messages(row) == [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": None}, [("user", "null")]),
        ({"prompt": ["a", 1]}, [("user", '[\n "a",\n 1\n]')]),
        ({"prompt": [{"role": "user", "content": "1 + 1"}, "a"]}, [("user", '[\n {\n  "role": "user",')]),
        ({"prompt": [{"role": "system", "content": "s"}]}, [("system", "s")]),
        ({"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "2"}]}, 2),
        ({"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "2"}], "loss": 0.5}, 1),
        ({"prompt": []}, []),
    ],
)
def test_an_odd_sample_is_sent_as_text_and_an_answer_of_the_data_once(row: dict, said: list | int) -> None:
    *before, answer = messages({**row, "response": "2"})
    assert answer == {"role": "assistant", "content": "2"}
    if isinstance(said, int):
        assert before == row["prompt"][:said]
    else:
        assert [message["role"] for message in before] == [role for role, _ in said]
        assert all(message["content"].startswith(text) for message, (_, text) in zip(before, said, strict=True))


def test_what_trackio_needs_is_checked_with_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run without it is refused before the files of an earlier run are moved."""
    make_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(loggers, "find_spec", lambda name: True)
    flag = "--use-trackio --trackio-server-url"
    assert "is not a URL" in refusal(f"{flag} localhost:7860")
    said = refusal(f"{flag} http://127.0.0.1:7860")
    assert "wants a token" in said and "where:  --trackio-server-url" in said
    url = "http://127.0.0.1:7860/?write_token=t"
    assert parse(argv(f"{flag} {url}")).trackio_server_url == url
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:7860")
    assert parse(argv()).trackio_server_url is None
    said = refusal("--use-trackio")
    assert "wants a token" in said and "where:  TRACKIO_SERVER_URL" in said
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "t")
    assert trackio_settings(parse(argv("--use-trackio")))["server_url"] == "http://127.0.0.1:7860"
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    said = refusal("--use-trackio")
    assert "trackio is not installed" in said and "instep install trackio" in said
