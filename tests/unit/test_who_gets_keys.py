"""Who gets a key: no other user who was first at a port of ours, and no engine of somebody else's."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import pytest
import requests

from instep.cluster.engine_plan import RouterSpec
from instep.cluster.engine_start import start_gate, start_router
from instep.engines import keys
from instep.engines.engine import Engine
from instep.engines.gate import Gate
from instep.engines.http import get_json
from instep.engines.router import Router
from instep.errors import ConfigError, EngineError, NoAnswerError, RolloutError
from instep.rollout import runtime
from instep.rollout.http import api_key, headers_for, post
from instep.system.hooks import Hook
from instep.system.ports import users_listening
from instep_engine.guard import GENERATE_VARIABLE, KEY_VARIABLE, Guard
from tests.bounds import allowed

KEY = "a-key-of-the-run"


class _Recorder(BaseHTTPRequestHandler):
    seen: list[tuple[str, str | None]]  # path and key of each request
    status, body = 200, b"{}"

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

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
    keys.know(url, KEY, user=os.geteuid())
    yield url, _Recorder.seen
    keys.know(url, "")
    http.shutdown()
    http.server_close()


def as_another_user(url: str) -> None:
    """What listens there is another user's from now on than the server of this process should be."""
    keys.know(url, KEY, user=os.geteuid() + 1)


@pytest.mark.parametrize(
    ("host", "asked", "found"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("::", "127.0.0.1", True),
        ("::1", "::1", True),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("::ffff:0.0.0.0", "127.0.0.1", True),
        ("::1", "127.0.0.1", False),
        ("127.0.0.2", "127.0.0.1", False),
    ],
)
def test_who_listens(host: str, asked: str, found: bool) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one, socket.socket() as asked_for:
        if found:
            one.bind((host, 0))
            port = one.getsockname()[1]
        else:  # another test may listen at the address asked for, at the port that `host` is given: both are bound
            asked_for.bind((asked, 0))
            port = asked_for.getsockname()[1]
            one.bind((host, port))
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_real_user_who_was_first_gets_no_key() -> None:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        taken = socket.create_server(("127.0.0.1", 0))
        theirs.send(str(taken.getsockname()[1]).encode())
        theirs.recv(1)
        os._exit(0)
    try:
        url = f"http://127.0.0.1:{int(ours.recv(10))}"
        keys.know(url, KEY, user=os.geteuid())
        with pytest.raises(ConnectionError, match="user 65534 of this host listens"):
            headers_for(url)
    finally:
        ours.send(b"x")
        os.waitpid(child, 0)
        keys.know(url, "")


def test_another_user_at_the_port_of_a_server_gets_no_key(server: Any) -> None:
    url, seen = server
    assert headers_for(url) == {"Authorization": f"Bearer {KEY}"} and get_json(url + "/a", 5.0) == {}
    assert asyncio.run(post(url + "/b", {})) == {}
    assert [key for _, key in seen] == [f"Bearer {KEY}"] * 2
    as_another_user(url)
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


def test_a_gate_hands_no_key_on_to_another_user(server: Any, tmp_path: Path) -> None:
    url, seen = server
    args: Any = SimpleNamespace(
        command="serve", api_key_file=None, no_api_key=False, allowed_hosts=None, rollout_backend="vllm"
    )
    for user, status in ((os.geteuid(), 200), (os.geteuid() + 1, 503)):
        keys.know(url, keys.run_key(), user=user)
        gate = start_gate(args, RouterSpec("policy", ()), url, tmp_path)
        seen.clear()
        try:
            gate.wait_ready(30.0)
            request = urllib.request.Request(gate.url + "/v1/models", headers=headers_for(gate.url))
            answer = urllib.request.urlopen(request, timeout=20).status
        except urllib.error.HTTPError as error:
            answer = error.code
        finally:
            gate.stop()
        assert answer == status
        assert seen == ([("/v1/models", f"Bearer {keys.run_key()}")] if status == 200 else [])


def test_a_run_stops_where_another_user_was_first(server: Any) -> None:
    """Its engine answers /health, which asks for no key, and then stays the only thing that it was asked."""
    url, seen = server
    as_another_user(url)
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


def test_a_router_of_somebody_else_gets_no_key_that_opens_control_routes() -> None:
    args: Any = SimpleNamespace(command="train", vllm_router_ip="10.0.0.7", api_key_file=None, no_api_key=False)
    args.allowed_hosts = None
    environment = keys.server_environment(args)  # of the run's engines behind it
    guard = Guard(environment[KEY_VARIABLE], environment[GENERATE_VARIABLE])
    headers = {name.lower(): value for name, value in keys.bearer(keys.client_key(args)).items()}
    assert guard.refusal("/v1/completions", headers, "127.0.0.1") is None
    refused = guard.refusal("/update_weights", headers, "127.0.0.1")
    assert refused is not None and refused[0] == 403


VALIDATOR = """
import urllib.error, urllib.request, psutil
from instep.engines.router_main import serve_validator
from instep.system.ports import users_listening
server = serve_validator("secret")
url = f"http://127.0.0.1:{server.server_port}/"
for key in ("secret", "x"):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        print(urllib.request.urlopen(request, timeout=20).status)
    except urllib.error.HTTPError as error:
        print(error.code)
(child,) = psutil.Process().children()
child.kill()
child.wait(20)
print(len(users_listening(server.server_port, "127.0.0.1")))
"""


def test_nobody_else_can_take_the_port_at_which_the_router_asks_for_keys() -> None:
    """He would say that his own key is valid."""
    done = subprocess.run([sys.executable, "-c", VALIDATOR], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["200", "401", "1"], done.stderr


# ---- who is refused is told why, at once


@pytest.mark.parametrize(
    ("status", "body", "what", "remedy"),
    [
        (403, b'{"error": {"message": "Host: a.example is foreign"}}', "Host: a.example is", "INSTEP_ALLOWED_HOSTS"),
        (401, b"", "asks for a key, and none was sent", "--api-key-file"),
    ],
)
def test_a_server_that_refuses_us_is_not_waited_for(
    server: Any, monkeypatch: Any, status: int, body: bytes, what: str, remedy: str
) -> None:
    url, _ = server
    keys.know(url, "")
    monkeypatch.setattr(_Recorder, "status", status)
    monkeypatch.setattr(_Recorder, "body", body)
    began = time.monotonic()
    asks: list[Callable[[], Any]] = [partial(one.wait_ready, 60.0) for one in (Engine("engine 0", url), Router(url))]
    for ask in (*asks, lambda: get_json(url, 5.0), lambda: asyncio.run(post(url, {}))):
        with pytest.raises(ConfigError, match=what) as caught:
            ask()
        assert remedy in caught.value.remedy
    assert time.monotonic() - began < allowed(30)


async def with_aiohttp(url: str) -> Any:
    async with aiohttp.ClientSession() as http, http.post(url, json={}, raise_for_status=True) as answer:
        return await answer.json()


async def with_aiohttp_unchecked(url: str) -> Any:
    async with aiohttp.ClientSession() as http, http.post(url, json={}) as answer:
        return (await answer.json())["choices"]


async def with_httpx(url: str) -> Any:
    async with httpx.AsyncClient() as http:
        return (await http.post(url, json={})).raise_for_status()


async def with_openai(url: str) -> Any:
    import openai

    client = openai.AsyncOpenAI(base_url=url, api_key="EMPTY", max_retries=0)
    return await client.completions.create(model="m", prompt="x")


def with_requests(url: str) -> Any:
    requests.post(url, json={}, timeout=5).raise_for_status()


def with_urllib(url: str) -> Any:
    return urllib.request.urlopen(url, timeout=5)


@pytest.mark.parametrize(
    "hook", [with_aiohttp, with_aiohttp_unchecked, with_httpx, with_openai, with_requests, with_urllib]
)
def test_a_hook_without_the_key_is_told_what_to_add(server: Any, monkeypatch: Any, hook: Any) -> None:
    monkeypatch.setattr(_Recorder, "status", 401)
    monkeypatch.setattr(_Recorder, "body", b"")  # vllm-router says nothing
    with pytest.raises(RolloutError) as caught:
        asyncio.run(Hook("--custom-generate-function-path", f"{__name__}.{hook.__name__}").acall(server[0]))
    for way_out in ("instep.rollout.http.post", "api_key(url)", "--no-api-key", "docs/security.md"):
        assert way_out in caught.value.remedy


def test_other_errors_of_a_hook_keep_their_remedy() -> None:
    hook = Hook("--custom-rm-path", f"{__name__}.with_urllib")
    for error in (
        ValueError("401"),
        KeyError(401),
        RuntimeError("row 401 of 1401: no label"),
        OSError("404 Not found"),
    ):
        with pytest.raises(RolloutError) as caught, hook.guard():
            raise error
        assert "api_key" not in caught.value.remedy
