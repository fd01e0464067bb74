"""`instep env-api`: the API through which Atropos' environments feed a trainer, with the routes of Atropos' own server.

Where its clients cannot see it, it is another server: batches that are ready leave in the order in which they were cut,
one whose trainer hung up stays, groups that no trainer could take are refused at the door, memory has a bound, and an
environment that registered with an earlier server at this address is served on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from instep.engines.bodies import AS_THEY_COME, body_of
from instep.errors import ConfigError
from instep.system.options import OptionParser
from instep.system.ports import port_is_free
from instep_engine.guard import EVERYONE, Guard
from instep_neighbours.atropos.batches import Queued
from instep_neighbours.atropos.env_state import BadRequest, Full, State, number_of
from instep_neighbours.atropos.groups import fault_of_group

MAX_BODY = 1 << 30  # bytes of a request, decompressed
_REGISTRATION = {
    "wandb_group": str,
    "wandb_project": str,
    "batch_size": int,
    "max_token_len": int,
    "checkpoint_dir": str,
    "save_checkpoint_interval": int,
    "starting_step": int,
    "num_steps": int,
}
_FIELDS = (
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id", "distill_token_ids"),
    "distill_logprobs",
)
_NO_EXAMPLE: dict[str, list[Any]] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs"),
        *("messages", "images"),
    )
}


class EnvApi:
    """The routes, over one `State`."""

    def __init__(self, max_bytes: int, hosts: Sequence[str] = ()):
        self.state = State(max_bytes)
        self._guard = Guard(secrets.token_hex(16), EVERYONE, hosts)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware], client_max_size=MAX_BODY)
        gets = ("batch", "environments", "info", "latest_example", "reset_data", "status", "wandb_info")
        app.router.add_get("/", self.root)
        app.router.add_get("/status-env", self.status_env)
        for name in gets:
            app.router.add_get(f"/{name}", getattr(self, name))
        for name in ("register", "register-env", "disconnect-env", "scored_data", "scored_data_list"):
            app.router.add_post(f"/{name}", getattr(self, name.replace("-", "_")))
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

    # ---- the trainer's -----------------------------------------------------------------------------------------------

    async def root(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "AtroposLib API"})

    async def register(self, request: web.Request) -> web.Response:
        body = await _object(request)
        for name, kind in _REGISTRATION.items():
            if type(body.get(name)) is not kind:
                raise BadRequest(f"{name} is {body.get(name)!r:.40}, not a {kind.__name__}")
        state = self.state
        if state.registration is None:  # as in Atropos, another trainer changes nothing
            state.registration, state.step = body, body["starting_step"]
            print(f"a trainer has registered, for batches of {body['batch_size']} sequences", flush=True)
        return web.json_response({"uuid": secrets.randbits(128)})

    async def info(self, request: web.Request) -> web.Response:
        known = self.state.registration or {}
        return web.json_response({name: known.get(name, -1) for name in ("batch_size", "max_token_len")})

    async def wandb_info(self, request: web.Request) -> web.Response:
        known = self.state.registration or {}
        return web.json_response({"group": known.get("wandb_group"), "project": known.get("wandb_project")})

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

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response({"current_step": self.state.step, "queue_size": len(self.state.queue)})

    async def environments(self, request: web.Request) -> web.Response:
        return web.json_response({"environments": self.state.environments()})

    async def latest_example(self, request: web.Request) -> web.Response:
        data = self.state.latest or json.dumps(_NO_EXAMPLE).encode()
        return web.Response(body=data, content_type="application/json")

    async def reset_data(self, request: web.Request) -> web.Response:
        self.state = State(self.state.max_bytes)
        return web.Response(text="Reset successful")

    # ---- the environments' -------------------------------------------------------------------------------------------

    async def register_env(self, request: web.Request) -> web.Response:
        return web.json_response(self.state.register_env(await _object(request)))

    async def disconnect_env(self, request: web.Request) -> web.Response:
        number = int(number_of(await _object(request), "env_id"))
        if number not in self.state.envs:
            return web.json_response({"status": "failure", "error": f"there is no environment {number}"})
        self.state.envs[number].connected = False
        return web.json_response({"status": "success"})

    async def status_env(self, request: web.Request) -> web.Response:
        return web.json_response(self.state.status_of(int(number_of(await _object(request), "env_id"))))

    async def scored_data(self, request: web.Request) -> web.Response:
        body = await body_of(request, MAX_BODY)
        group = _queued(json_of(body), "the group")
        self.state.check_room(len(group.data))
        return web.json_response(self.state.add(group))

    async def scored_data_list(self, request: web.Request) -> web.Response:
        given = json_of(await body_of(request, MAX_BODY))
        if not isinstance(given, list):
            raise BadRequest("the body is no list of groups")
        groups = [_queued(group, f"group {i}") for i, group in enumerate(given)]
        self.state.check_room(sum(len(g.data) for g in groups))
        answers = [self.state.add(group) for group in groups]
        sizes = [a["buffer_size"] for a in answers if a["status"] == "buffered"]
        more = {"buffered": len(sizes), "last_buffer_size": sizes[-1]} if sizes else {}
        return web.json_response({"status": "received", "groups_processed": len(groups), **more})


def _queued(group: Any, where: str) -> Queued:
    if fault := fault_of_group(group):
        env = f" of environment {group['env_id']}" if isinstance(group, dict) and "env_id" in group else ""
        raise BadRequest(f"{where}{env}: {fault}")
    env_id = group.get("env_id")
    if env_id is not None and type(env_id) is not int:
        raise BadRequest(f"{where}: env_id is {env_id!r:.40}, no integer")
    kept = {name: group.get(name) for name in _FIELDS}
    return Queued(len(group["tokens"]), env_id, json.dumps(kept, separators=(",", ":")).encode())


async def _object(request: web.Request) -> dict[str, Any]:
    body = json_of(await body_of(request, MAX_BODY))
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object")
    return body


def json_of(text: bytes) -> Any:
    """The JSON of a body. Raises: BadRequest."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error


# ---- the command -----------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = OptionParser(
        "instep env-api", description="The Atropos API: environments send groups, a trainer takes batches."
    )
    made.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    made.add_argument("--port", type=int, default=8000)
    made.add_argument("--max-queue-gb", type=float, default=4.0, help="of groups that wait, as JSON (default: 4)")
    made.add_argument("--allowed-hosts", nargs="+", default=[], help="names, beside its own, by which it is called")
    return made


def main(words: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code.

    Raises:
        ConfigError: a wrong flag, or a port that is taken.
    """
    options = parser().parse_args(words)
    if not 0 < options.port < 65536 or not 0 < options.max_queue_gb < 1e6:
        raise ConfigError("--port or --max-queue-gb is out of range", where="instep env-api", remedy="name another one")
    if not port_is_free(options.port, options.host):
        raise ConfigError(f"port {options.port} is taken", where="--port", remedy="name a free one")
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
        print(f"ending; {len(api.state.queue)} groups had not been asked for", flush=True)
    finally:
        await runner.cleanup()
