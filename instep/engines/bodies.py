"""Requests to our own servers: unchanged bodies (`AS_THEY_COME`), and bounds for half-sent requests.

aiohttp waits for the rest of a request as long as its connection lives. Importing this module limits that in all
servers of the process. They close the connection after `REST_SECONDS` (its head), or after these and the time for its
body (`BYTES_PER_SECOND`). They also suppress aiohttp's traceback for each malformed request: other users could fill a
disk with these.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

from aiohttp import web, web_server
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

REST_SECONDS = 20.0  # from the first byte of a request, or the start of its connection, to the end of its head
BYTES_PER_SECOND = 4e6  # minimum speed of a body
BODY_SECONDS = 300.0  # at most
AS_THEY_COME: dict[str, Any] = {"auto_decompress": False}  # aiohttp answers a bad body with a traceback


class _Impatient(RequestHandler):
    """A connection that closes if the head of a request stays incomplete."""

    __slots__ = ("_rest",)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._rest: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._wait_for_rest()

    def _wait_for_rest(self) -> None:
        if self._rest is None:
            self._rest = self._loop.call_later(REST_SECONDS, self.force_close)

    def _forget(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def data_received(self, data: bytes) -> None:
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._forget()
        elif self._waiter is not None and not self._waiter.done():  # no request is under way
            self._wait_for_rest()

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        if not isinstance(kwargs.get("exc_info"), HttpProcessingError):  # the client's fault; the answer names it
            super().log_exception(*args, **kwargs)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget()
        super().connection_lost(exc)


web_server.RequestHandler = _Impatient  # type: ignore[misc]


async def read_of(request: web.Request) -> bytes:
    """Return the body as it comes. Raises web.HTTPRequestTimeout: it does not come."""
    length = request.content_length
    seconds = BODY_SECONDS if length is None else min(BODY_SECONDS, REST_SECONDS + length / BYTES_PER_SECOND)
    if not request.body_exists:
        return b""
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        request.protocol.force_close()  # aiohttp would wait for the rest, only to discard it
        raise web.HTTPRequestTimeout(text=f"the body did not come within {seconds:.0f} s") from None


async def body_of(request: web.Request, limit: int) -> bytes:
    """Return the body, decompressed to at most `limit` bytes. Raises web.HTTPException: it cannot be decompressed."""
    body, coding = await read_of(request), request.headers.get("Content-Encoding", "").strip().lower()
    if not body or coding in ("", "identity"):
        return body
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise web.HTTPUnsupportedMediaType(text=f"Content-Encoding {coding[:40]!r}: use gzip or deflate")
    inflate = zlib.decompressobj(wbits=47)  # of gzip or zlib
    try:
        out = inflate.decompress(body, limit)
    except zlib.error:
        raise web.HTTPBadRequest(text=f"Invalid {coding} payload") from None
    if inflate.unconsumed_tail:
        raise web.HTTPRequestEntityTooLarge(limit, len(out))
    if not inflate.eof:
        raise web.HTTPBadRequest(text=f"Invalid {coding} payload")
    return out
