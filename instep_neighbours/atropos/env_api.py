"""`instep env-api`: the API between Atropos' environments and a trainer, with the routes of Atropos' own server.

The internals differ from that server. Ready batches leave in the order in which they were made. A batch stays if its
trainer closes the connection. Groups that no trainer could take are refused on arrival. Memory is limited. An
environment that registered with an earlier server at this address can continue.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from instep.engines.bodies import AS_THEY_COME, body_of
from instep.errors import ConfigError
from instep.system.options import OptionParser
from instep.system.ports import port_is_free
from instep_engine.guard import EVERYONE, Guard
from instep_neighbours.atropos.env_state import BadRequest, Full, State

MAX_BODY = 1 << 30  # bytes of a request, decompressed
# Routes that a method of `State` answers; it has the same name, with `_` for `-`.
GETS = ("environments", "info", "status", "status-env", "wandb_info")
POSTS = ("register", "register-env", "disconnect-env", "scored_data", "scored_data_list")


class EnvApi:
    """The routes over one `State`."""

    def __init__(self, max_bytes: int, hosts: Sequence[str] = ()):
        self.state = State(max_bytes)
        self._guard = Guard(secrets.token_hex(16), EVERYONE, hosts)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware], client_max_size=MAX_BODY)
        app.router.add_get("/", self.root)
        for name in ("batch", "latest_example", "reset_data"):
            app.router.add_get(f"/{name}", getattr(self, name))
        for name in GETS:
            app.router.add_get(f"/{name}", self._answer)
        for name in POSTS:
            app.router.add_post(f"/{name}", self._answer)
        return app

    @web.middleware
    async def _middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        address = request.transport.get_extra_info("sockname")[0] if request.transport is not None else ""
        if (refusal := self._guard.refusal("/health", request.headers, address)) is not None:  # web pages
            return web.json_response({"detail": refusal[1]}, status=refusal[0])
        try:
            return await handler(request)
        except BadRequest as error:
            print(f"{request.path} is refused: {error}", flush=True)
            return web.json_response({"detail": str(error)}, status=422)
        except Full as error:
            return web.json_response({"detail": str(error)}, status=503)

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await body_of(request, MAX_BODY) or b"{}")
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict) and not request.path.startswith("/scored_data"):
            raise BadRequest("the body is not a JSON object")
        return web.json_response(getattr(self.state, request.path[1:].replace("-", "_"))(body))

    async def root(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "AtroposLib API"})

    async def batch(self, request: web.Request) -> web.StreamResponse:
        if self.state.registration is None:
            what = "Trainer not registered. Call /register first."
            return web.json_response({"status": "error", "message": what, "batch": []})
        if (batch := self.state.next_batch()) is None:
            return web.json_response({"batch": None})
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            await answer.prepare(request)
            for start, group in zip([b'{"batch":[', *[b","] * len(batch)], batch, strict=False):
                await answer.write(start + group.data)
            await answer.write(b"]}")
            await answer.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            self.state.put_back(batch)
            raise
        return answer

    async def latest_example(self, request: web.Request) -> web.Response:
        return web.Response(body=self.state.latest, content_type="application/json")

    async def reset_data(self, request: web.Request) -> web.Response:
        self.state = State(self.state.max_bytes)
        return web.Response(text="Reset successful")


# ---- the command -----------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = OptionParser(
        "instep env-api", description="The Atropos API: environments send groups, a trainer takes batches."
    )
    made.add_argument("--host", default="127.0.0.1", help="address to listen at (default: only this machine)")
    made.add_argument("--port", type=int, default=8000)
    made.add_argument("--max-queue-gb", type=float, default=4.0, help="limit of waiting groups, as JSON (default: 4)")
    made.add_argument(
        "--allowed-hosts", nargs="+", default=[], help="more host names of this server, for the Host header"
    )
    return made


def main(words: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code.

    Raises:
        ConfigError: a flag is wrong, or the port is taken.
    """
    options = parser().parse_args(words)
    if not 0 < options.port < 65536 or not 0 < options.max_queue_gb < 1e6:
        what = "--port or --max-queue-gb is out of range"
        raise ConfigError(what, where="instep env-api", remedy="use another value")
    if not port_is_free(options.port, options.host):
        raise ConfigError(f"port {options.port} is taken", where="--port", remedy="use a free port")
    api = EnvApi(int(options.max_queue_gb * (1 << 30)), options.allowed_hosts)
    asyncio.run(_serve(api, options.host, options.port))
    return 0


async def _serve(api: EnvApi, host: str, port: int) -> None:
    runner = web.AppRunner(api.app(), access_log=None, handler_cancellation=True, shutdown_timeout=2.0, **AS_THEY_COME)
    end, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        print(f"instep env-api: http://{host}:{port}, for --env.rollout_server_url and --atropos-url", flush=True)
        await end.wait()
        print(f"ending; {len(api.state.queue)} groups were not requested", flush=True)
    finally:
        await runner.cleanup()
