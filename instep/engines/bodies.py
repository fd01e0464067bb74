"""Bodies of requests to our own servers, whose aiohttp leaves them as they come (`AS_THEY_COME`)."""

from __future__ import annotations

import zlib
from typing import Any

from aiohttp import web

AS_THEY_COME: dict[str, Any] = {"auto_decompress": False}  # its own faults there are no answer, but a traceback


async def body_of(request: web.Request, limit: int) -> bytes:
    """The body, decompressed to at most `limit` bytes. Raises web.HTTPException: of what cannot be."""
    body, coding = await request.read(), request.headers.get("Content-Encoding", "").strip().lower()
    if not body or coding in ("", "identity"):
        return body
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise web.HTTPUnsupportedMediaType(text=f"Content-Encoding {coding[:40]!r}: gzip and deflate are read here")
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
