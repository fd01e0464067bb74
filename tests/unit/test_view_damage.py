"""`instep view` of damaged and of large files: what it leaves out, and what else it shows as usual."""

from __future__ import annotations

import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.observability.run_folder import state_of
from instep.observability.view.runs import Runs
from instep.observability.view.server import ViewServer
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
