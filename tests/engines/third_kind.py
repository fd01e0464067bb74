"""A kind of engine that instep does not know, and `instep` with it: `python -m tests.engines.third_kind train ...`.

It computes as the embedded engine does, but speaks in words of its own: other routes, other JSON, another session.
`python -m tests.engines.third_kind engine ...` is the engine.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from instep.engines.embedded.kind import EmbeddedKind
from instep.engines.kind import Capabilities, RunningEngine, register
from instep.engines.spec import Addresses, EngineSpec

if TYPE_CHECKING:
    from instep.engines.wire import WireFormat

# Its routes, and what the embedded engine calls them; it has no others.
ROUTES = {
    "/health": "/health",
    "/third/generate": "/inference/v1/generate",
    "/third/end_all": "/abort_requests",
    "/third/held": "/is_paused",
    "/third/hold": "/pause",
    "/third/go": "/resume",
    "/third/forget": "/reset_prefix_cache",
    "/third/begin": "/start_weight_update",
    "/third/take": "/update_weights",
    "/third/done": "/finish_weight_update",
}


class ThirdKind(EmbeddedKind):
    """Started, asked, fed and watched in its own way."""

    name, title, auto_device, core_route = "third", "the third engine", "", "/third/held"
    sends_heartbeats = False

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        return Capabilities(self.title, "3.0")

    @functools.cached_property
    def wire(self) -> WireFormat:
        from tests.engines.third_wire import ThirdWire

        return ThirdWire()

    def command(self, args: Any, spec: EngineSpec, at: Addresses, node_rank: int = 0) -> list[str]:
        return ["-m", __spec__.name, "engine", *super().command(args, spec, at, node_rank)[2:]]

    def environment(
        self, args: Any, spec: EngineSpec, at: Addresses, node_host: str, num_threads: int
    ) -> dict[str, str]:
        return super().environment(args, spec, at, node_host, num_threads) | {"THIRD_KIND": spec.name}

    def read_refusal(self, error: Mapping[str, Any]) -> tuple[str, str | None]:
        return f"the third engine says: {error['message']}", None

    def core_patience(self, heartbeat_timeout: float) -> float | None:
        return 2 * heartbeat_timeout

    def pause(self, engine: RunningEngine, mode: str, *, timeout: float) -> None:
        engine.post("/third/hold", timeout=timeout, mode=mode)

    def reset_cache(self, engine: RunningEngine, *, timeout: float) -> None:
        engine.post("/third/forget", timeout=timeout)

    def resume(self, engine: RunningEngine, *, timeout: float) -> None:
        engine.post("/third/go", timeout=timeout)

    def start_update(self, engine: RunningEngine, version: str, nonce: str, *, timeout: float) -> None:
        engine.post("/third/begin", {"version": version, "nonce": nonce}, timeout=timeout)

    def update(self, engine: RunningEngine, info: dict[str, Any], *, timeout: float) -> None:
        engine.post("/third/take", {"update_info": info}, timeout=timeout)

    def finish_update(self, engine: RunningEngine, version: str, names: Sequence[str], *, timeout: float) -> None:
        engine.post("/third/done", {"weight_version": version}, timeout=timeout)


def run_engine() -> None:
    """The embedded engine's process behind the routes and the JSON of this kind."""
    import json
    import os

    from aiohttp import web

    from instep.engines.embedded import __main__ as embedded
    from instep.engines.embedded import server

    class Server(server.Server):
        async def handle(self, http: web.Request) -> web.Response:
            if (path := ROUTES.get(http.path)) is None:
                return web.json_response({"error": {"message": f"no {http.path} here"}}, status=404)
            return await super().handle(http.clone(rel_url=http.rel_url.with_path(path).with_query(http.query)))

        async def generate(self, http: web.Request, body: dict[str, Any]) -> dict[str, Any]:
            answer = await super().generate(http, {"token_ids": body["ids"], "sampling_params": body["how"]})
            scores = [next(iter(entry.values()))["logprob"] for entry in answer.get("prompt_logprobs", [])[1:]]
            return {"responses": json.dumps(answer["choices"]), "scores": scores}

    server.Server = Server  # type: ignore[misc]
    print(f"this is {os.environ['THIRD_KIND']} of the third kind", flush=True)
    sys.argv[1:2] = []
    embedded.main()


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        run_engine()
    register(ThirdKind())
    from instep.cli import main

    sys.exit(main())
