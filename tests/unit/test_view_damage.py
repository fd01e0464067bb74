"""`instep view` of damaged and of large files: what it leaves out, and what else it shows as usual."""

from __future__ import annotations

import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instep.observability.run_folder import state_of
from instep.observability.view.runs import RunFiles, Runs
from instep.observability.view.server import ViewServer
from instep.observability.view.tail import Tail
from tests.logged_run import unfinished_run
from tests.unit.test_view import get


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return unfinished_run(tmp_path / "one")


@pytest.fixture
def server(tmp_path: Path, folder: Path) -> Iterator[ViewServer]:
    both = [folder, unfinished_run(tmp_path / "two")]
    with ViewServer(Runs(lambda: both), port=0) as serving:
        threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield serving
        serving.shutdown()


def test_a_request_that_is_no_url_gets_an_answer(server: ViewServer, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port)) as asking:
        asking.sendall(b"GET http://[/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert asking.recv(1000).startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(("127.0.0.1", server.server_port)) as gone:  # it leaves without reading
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        gone.sendall(f"GET /{server.token}/api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert get(server, f"/{server.token}/api/runs")[0].status == 200
    assert capsys.readouterr().err == ""


def test_of_a_large_log_the_end_alone_is_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["process"]["pid"] = 1 << 30  # no such process
    (folder / "logs").mkdir(exist_ok=True)
    with (folder / "logs" / "engine-0.log").open("wb") as log:
        log.truncate(200 << 20)
        log.seek(0, 2)
        log.write(b"\n" + "\n".join(f"line {i}" for i in range(30)).encode())
    tracemalloc.start()
    state = state_of(folder, config, None)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert state.name == "killed" and state.text.endswith("\n".join(f"line {i}" for i in range(18, 30)))
    assert most < 1 << 20


def asked(server: ViewServer, name: str) -> tuple[int, Any]:
    answer, content = get(server, f"/{server.token}/api/{name}")
    return answer.status, json.loads(content) if answer.status == 200 else content


@pytest.mark.parametrize(
    ("file", "content", "why", "status"),
    [
        ("summary.json", '{"status": "fin', "summary.json is damaged", 400),
        ("summary.json", "[1]", "summary.json is damaged", 400),
        ("config.json", '{"args": [1], "versions": {}}', "attribute", 200),
        ("config.json", '{"args": {}, "versions": {}, "process": 5}', "attribute", 400),
    ],
)
def test_a_run_that_is_unreadable_says_so_and_the_others_are_shown(
    server: ViewServer, folder: Path, file: str, content: str, why: str, status: int
) -> None:
    (folder / file).write_text(content)
    bad, good = asked(server, "runs")[1]["runs"]
    assert bad["state"] == "unreadable" and why in bad["state_text"]
    assert bad.keys() == good.keys() and good["state"] == "running" and good["num_steps"] == 6
    assert asked(server, "timeline?runs=0")[0] == status and asked(server, "timeline?runs=1")[0] == 200


def test_damaged_rows_alone_are_left_out(server: ViewServer, folder: Path) -> None:
    bad = {
        "timeline.jsonl": [
            {"phase": "train", "began": "x"}, {"phase": "train"}, {"requests": [[1.0]]}, {"requests": 5},
            {"rollout_id": None, "time": 1.0, "processes": []}, {"rollout_id": 1, "time": 1.0, "processes": [5]},
        ],
        "samples.jsonl": [{"rollout_id": "x"}, {"weight_versions": 5}, {"group_index": []}, {"gap_max": {}}],
        "metrics.jsonl": [{"step": []}, {"train/loss": 1.0}, {"step": 5, "train/loss": 10**400}],
    }  # fmt: skip
    for name, rows in bad.items():
        first, rest = (folder / name).read_text().split("\n", 1)
        (folder / name).write_text("\n".join([first, *map(json.dumps, rows), rest]))
    mine, other = asked(server, "curves?runs=0,1")[1]
    assert mine == other and mine
    assert [p["rollouts"] for p in asked(server, "processes?runs=0")[1][0]] == [[*range(6)]] * 2
    (time,) = asked(server, "timeline?runs=0&steps=100")[1]
    assert [rollout for rollout, _ in time["steps"]] == [*range(6)] and len(time["phases"]) == 13
    (samples,) = asked(server, "samples?runs=0")[1]
    assert samples["total"] == 48
    mine, other = asked(server, "runs")[1]["runs"]
    assert (mine["num_damaged"], other["num_damaged"]) == (13, 0) and mine["num_steps"] == 6
    assert mine["figures"] == other["figures"] and mine["alarms"] == other["alarms"]


def test_rows_of_metrics_take_little_memory(folder: Path) -> None:
    row = {f"train/metric_{i}": i / 7 for i in range(150)}
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": 6 + i, **row, "train/loss": None}) + "\n" for i in range(1000))
    files = RunFiles(folder)
    tracemalloc.start()
    about = files.about()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert about["num_steps"] == 1006 and 1000 * 150 * 8 < kept < 1000 * 150 * 8 * 1.3
    (_, x, y, *_), *_ = files.curves()["panels"]["loss"]["left"]
    assert (x, y) == ([*range(6)], [1.0] * 6)  # null is no point


def test_many_runs_are_read_bit_by_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = folder, unfinished_run(folder.parent / "two")
    runs = Runs(lambda: [older, newer])
    monkeypatch.setattr("instep.observability.view.runs.READ_SECONDS", 0.0)
    first = runs.about()
    assert [(run["num_steps"], run["reading"]) for run in first] == [(1, True)] * 2
    monkeypatch.setattr("instep.observability.view.runs.READ_SECONDS", 20.0)
    assert [(run["name"], run["num_steps"], run["reading"]) for run in runs.about()] == [
        ("one", 6, False), ("two", 6, False)
    ]  # fmt: skip


def test_a_file_that_a_resume_replaces_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, new = tmp_path / "metrics.jsonl", tmp_path / "new"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    new.write_text('{"step": 7}\n{"step": 8}\n')
    tail, opened = Tail(path, lambda offset, row: row["step"]), Path.open

    def replacing(self: Path, *args: Any) -> Any:
        file = opened(self, *args)
        if new.exists():
            new.replace(path)
        return file

    monkeypatch.setattr(Path, "open", replacing)
    assert tail.read() == (False, [0, 1]) and tail.read() == (True, [7, 8])
