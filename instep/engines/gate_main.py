"""`python -m instep.engines.gate_main --port N --to URL`: a public port with generation and no other route.

It passes requests on to a router or an engine with the run's key, which its clients do not have. `guard.py` describes
how it gets this key, and the key for clients.
"""

import argparse
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from instep.engines import keys
from instep.engines.bodies import AS_THEY_COME, body_of
from instep.engines.http import checked_socket
from instep.engines.kind import kind_of
from instep.engines.router import Router
from instep.system.processes import follow_parent
from instep_engine import sglang_form, vllm_form
from instep_engine.guard import ATROPOS_ROUTES, GENERATION_ROUTES, KEY_VARIABLE, OPEN_ROUTES, Guard

BEGUN = "begun"
ROUTES = (GENERATION_ROUTES - ATROPOS_ROUTES) | OPEN_ROUTES
MAX_BODY = 256 << 20  # bytes, the same as for an engine
LIMITS = aiohttp.ClientTimeout(total=None, sock_connect=10.0)  # no limit for a response
# Headers of one connection (RFC 9110, 7.6.1), and those that the next one sets itself.
_OF_CONNECTION = frozenset("connection keep-alive te trailer transfer-encoding upgrade proxy-connection".split())
_NOT_SENT = _OF_CONNECTION | {"host", "origin", "authorization", "content-length", "content-encoding"}


class Gate:
    def __init__(self, to: str, user: int | None, router: type[Router]):
        self.to, self.guard, self.router = to, Guard.from_environment(), router
        self.key = os.environ[KEY_VARIABLE]
        keys.know(to, self.key, user=user)

    async def session(self, app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, socket_factory=checked_socket)
        async with aiohttp.ClientSession(connector=connector) as self.http:
            yield

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path not in ROUTES:
            return _error(404, f"there is no {request.path} here, only {' '.join(sorted(ROUTES))}")
        address = request.transport.get_extra_info("sockname")[0] if request.transport is not None else ""
        if (refusal := self.guard.refusal(request.path, request.headers, address)) is not None:
            return _error(*refusal)
        return await forward(self.http, request, self.to, self.key, self.router)


async def forward(
    http: aiohttp.ClientSession, request: web.Request, to: str, key: str, router: type[Router]
) -> web.StreamResponse:
    """Pass a request on to the server `to`, a `router` or its engine, with its key, and return the answer."""
    headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _NOT_SENT]
    headers.append(("Authorization", f"Bearer {key}"))
    query = request.rel_url.raw_query_string
    url = URL(to + request.path + (f"?{query}" if query else ""), encoded=True)  # the path that was checked
    body = await body_of(request, MAX_BODY)
    if request.path == sglang_form.PATH and (router is not Router or b'"prompt"' in body):
        try:
            body, more = _known_to(router, body)
        except ValueError as error:
            return _error(400, str(error))
        headers += [(sglang_form.HEADER, header) for header in more]
    options: Any = {"headers": headers, "timeout": LIMITS, "auto_decompress": False}
    try:
        async with http.request(request.method, url, data=body or None, **options) as answer:
            return await pass_on(request, answer)
    except aiohttp.ClientError as error:
        if BEGUN in request:  # the client has a part, and must notice that the rest is missing
            if request.transport is not None:
                request.transport.close()
            raise
        return _error(503, f"no engine answers: {error}")
    except UnicodeEncodeError:
        return _error(400, "a header is not text")


def _known_to(router: type[Router], body: bytes) -> tuple[bytes, list[str]]:
    """Return a `/generate` request in a form of which `router` drops nothing, and its header if it needs one."""
    given = json.loads(body)
    if router is Router and vllm_form.is_asked(given):
        asked, header = vllm_form.for_router(given)
        return json.dumps(asked).encode(), [header]
    packed = router.packed(sglang_form.PATH, given)
    return (body if packed is given else json.dumps(packed).encode()), []


async def pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pass the answer on piece by piece, as it comes."""
    headers = [(name, value) for name, value in answer.headers.items() if name.lower() not in _OF_CONNECTION]
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    request[BEGUN] = True
    async for piece in answer.content.iter_any():
        await response.write(piece)
    await response.write_eof()
    return response


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "gate", "code": status}}, status=status)


def main() -> None:
    follow_parent()
    parser = argparse.ArgumentParser(prog="python -m instep.engines.gate_main", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--to", required=True, help="http://HOST:PORT of a router or an engine")
    parser.add_argument("--backend", required=True, help="the kind of the engines")
    parser.add_argument("--user", type=int, help="the user that runs it on this host: no other user gets the key")
    args = parser.parse_args()
    gate = Gate(args.to, args.user, kind_of(args.backend).router)
    app = web.Application(client_max_size=MAX_BODY, handler_args=AS_THEY_COME)
    app.cleanup_ctx.append(gate.session)
    app.router.add_route("*", "/{route:.*}", gate.handle)
    web.run_app(app, host=args.host, port=args.port, print=None, access_log=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
