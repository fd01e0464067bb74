"""Servers of ours close a request of which half came, and no other one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from instep.engines import bodies
from instep.system.ports import free_port
from tests.atropos import serving

HEAD = b"POST /register HTTP/1.1\r\nHost: localhost\r\n"
HALVES = {
    "nothing": b"",
    "half a head": HEAD,
    "one byte": b"P",
    "half a body": HEAD + b"Content-Length: 10\r\n\r\n{",
    "half a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    "half a compressed body": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 10\r\n\r\n\x1f\x8b",
    "a whole one, and half of the next": b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """`instep env-api`, which waits half a second for the rest of a request."""
    before = bodies.REST_SECONDS, bodies.BODY_SECONDS
    bodies.REST_SECONDS, bodies.BODY_SECONDS = 0.5, 1.0
    free = free_port()
    with serving(free):
        yield free
    bodies.REST_SECONDS, bodies.BODY_SECONDS = before


@pytest.mark.parametrize("half", HALVES)
def test_it_is_closed(port: int, half: str) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as one:
        one.sendall(HALVES[half])
        if half.startswith("a whole one"):
            assert b"200 OK" in one.recv(4096)
            one.sendall(HEAD)
        while one.recv(4096):
            pass  # the timeout of the socket would raise


NO_HTTP = {
    "another version": b"GET / HTTP/9.9\r\n\r\n",
    "a null": b"GET /\0 HTTP/1.1\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a chunk of no length": HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
    "an address that is none": b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a long header": HEAD + b"A: " + b"a" * 20_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("kind", NO_HTTP)
def test_what_is_no_request_fills_no_log(port: int, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as one:
        one.sendall(NO_HTTP[kind])
        assert b" 400 Bad Request" in one.recv(4096)
    assert not caplog.records


def test_many_at_once(port: int) -> None:
    held = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(200)]
    for one in held:
        one.sendall(HEAD)
    for one in held:
        assert one.recv(4096) == b""
        one.close()


def test_a_client_that_waits_between_two_requests_is_not(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as one:
        for _ in range(2):
            one.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in one.recv(4096)
            one.settimeout(1.5)
            with pytest.raises(TimeoutError):
                one.recv(4096)
            one.settimeout(300)


def test_a_large_body_has_its_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MB, of which the half comes after the time for a small one, are read: they may take a second more."""
    monkeypatch.setattr(bodies, "BODY_SECONDS", 300.0)
    monkeypatch.setattr(bodies, "BYTES_PER_SECOND", 4e4)
    body = b'{"a": "' + b"x" * (4 << 20) + b'"}'
    with socket.create_connection(("127.0.0.1", port), timeout=60) as one:
        one.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body[:1000])
        threading.Event().wait(1.0)
        one.sendall(body[1000:])
        answer = one.recv(4096)
        assert b"HTTP/1.1 4" in answer and b"408" not in answer, answer
