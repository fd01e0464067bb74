"""Who gets a key: no other user who was first at a port of ours, and no engine of somebody else's."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from instep.cluster.engine_plan import RouterSpec
from instep.cluster.engine_start import start_router
from instep.engines import keys
from instep.engines.engine import Engine
from instep.engines.gate import Gate
from instep.engines.http import get_json
from instep.engines.router import Router
from instep.errors import EngineError, NoAnswerError
from instep.ports import users_listening
from instep.rollout import runtime
from instep.rollout.http import api_key, headers_for, post

KEY = "a-key-of-the-run"


class _Recorder(BaseHTTPRequestHandler):
    seen: list[tuple[str, str | None]]  # path and key of each request

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """The URL of a server that was started for this process, and what it is asked."""
    _Recorder.seen = []
    http = ThreadingHTTPServer(("127.0.0.1", 0), _Recorder)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{http.server_port}"
    keys.know(url, KEY, started_here=True)
    yield url, _Recorder.seen
    keys.know(url, "")
    http.shutdown()
    http.server_close()


def as_another_user(monkeypatch: Any) -> None:
    """What listens already is another user's from now on."""
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)


@pytest.mark.parametrize(
    ("host", "asked", "found"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("::", "127.0.0.1", True),
        ("::1", "::1", True),
        ("::1", "127.0.0.1", False),
        ("127.0.0.2", "127.0.0.1", False),
    ],
)
def test_who_listens(host: str, asked: str, found: bool) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.bind((host, 0))
        port = one.getsockname()[1]
        assert users_listening(port, asked) == set()  # bound, and nobody gets a connection yet
        one.listen()
        assert users_listening(port, asked) == ({os.geteuid()} if found else set())
    assert users_listening(port, asked) == set()


def test_who_listens_among_many_is_found() -> None:
    """The kernel answers in several pieces."""
    many = [socket.create_server(("127.0.0.1", 0)) for _ in range(600)]
    try:
        assert all(users_listening(one.getsockname()[1], "127.0.0.1") == {os.geteuid()} for one in many[::50])
    finally:
        for one in many:
            one.close()


def test_another_user_at_the_port_of_a_server_gets_no_key(server: Any, monkeypatch: Any) -> None:
    url, seen = server
    assert headers_for(url) == {"Authorization": f"Bearer {KEY}"} and get_json(url + "/a", 5.0) == {}
    assert asyncio.run(post(url + "/b", {})) == {}
    assert [key for _, key in seen] == [f"Bearer {KEY}"] * 2
    as_another_user(monkeypatch)
    seen.clear()
    for address in (url, url.replace("127.0.0.1", "localhost")):
        for ask in (api_key, headers_for, lambda url: get_json(url, 5.0)):
            with pytest.raises(ConnectionError, match=r"user \d+ of this host listens at 127.0.0.1:\d+, where"):
                ask(address)
        for run in (asyncio.run, runtime.run):  # the session of a hook's own loop, and the shared one
            with pytest.raises(NoAnswerError, match="of this host listens"):
                run(post(address + "/c", {}, max_retries=0))
    assert seen == []
    runtime.shutdown()
    keys.know(url, KEY)  # of somebody else's server, which may run as another user
    assert api_key(url) == KEY and get_json(url, 5.0) == {}


def test_a_run_stops_where_another_user_was_first(server: Any, monkeypatch: Any) -> None:
    """Its engine answers /health, which asks for no key, and then stays the only thing that it was asked."""
    url, seen = server
    as_another_user(monkeypatch)
    process: Any = type("Alive", (), {"alive": lambda _: True, "fault": lambda _: None})()
    engine, router = Engine("engine 0", url, process), Router(url)
    for server_of_ours in (engine, router, Gate(url, process)):
        with pytest.raises(EngineError, match="has lost its port: user") as caught:
            server_of_ours.wait_ready(5.0)
        assert "end that program" in caught.value.remedy
    assert [path for path, _ in seen] == ["/health"] and not any(key for _, key in seen)


@pytest.mark.router
@pytest.mark.parametrize("theirs", ["", "a-key-of-theirs"])
def test_engines_of_somebody_else_get_no_key_of_the_run(server: Any, theirs: str, tmp_path: Path) -> None:
    """The router passes the key of a request on to them."""
    url, seen = server
    keys.know(url, theirs)
    args: Any = SimpleNamespace(api_key_file=None)
    if theirs:
        (tmp_path / "key").write_text(theirs)
        (tmp_path / "key").chmod(0o600)
        args.api_key_file = str(tmp_path / "key")
    router = start_router(args, RouterSpec("policy", ()), [], tmp_path)
    try:
        router.wait_ready(60.0)
        router.set_members([url])
        assert asyncio.run(post(router.url + "/v1/completions", {"prompt": "x", "model": "m"})) == {}
    finally:
        router.stop()
    sent = {key for path, key in seen if path == "/v1/completions"}
    assert len(sent) == 1 and f"Bearer {keys.run_key()}" not in sent
    assert not theirs or sent == {f"Bearer {theirs}"}
