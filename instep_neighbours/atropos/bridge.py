"""The routes of Atropos' example server on `instep serve`, as far as they are about its engines as a whole.

Weights that a trainer shares, and adapters, are of `instep atropos-serve`, whose plugin has these routes, too
(`instep_engine/vllm/atropos.py`): here they are refused, or say that there are none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from instep.engines.kind import served_dtype
from instep_neighbours.trl.clients import Refused

if TYPE_CHECKING:
    from aiohttp import web

    from instep.arguments.args import Args
    from instep_neighbours.trl.updates import Updates

MODES = ("keep", "wait", "abort")
Body = dict[str, Any]


def routes(
    args: Args, model: str, updates: Updates, generate: Callable[[], Awaitable[None]], known: Callable[[], list[str]]
) -> dict[str, Callable[[web.Request, Body], Awaitable[Body]]]:
    """Handlers by method and path.

    Args:
        generate: asks an engine for one token.
        known: all routes of the server, as here.
    """

    async def health_generate(http: web.Request, body: Body) -> Body:
        if updates.delivery.paused:
            raise Refused("the engines are paused", 503)
        await generate()
        return {}

    async def info(http: web.Request, body: Body) -> Body:
        version, at = updates.delivery.version, updates.delivery.brought_at
        about = {"update_count": version, "last_update_time": at, "model_name": model, "device": args.device}
        return {"enabled": False, "shared_weights": False, **about}

    async def state_dict_info(http: web.Request, body: Body) -> Body:
        return {"model": model, "dtype": f"torch.{served_dtype(args)}", "shared_weights_enabled": False}

    async def pause(http: web.Request, body: Body) -> Body:
        if (mode := body.get("mode", http.query.get("mode", "keep"))) not in MODES:
            raise Refused(f"no such mode: {mode!r}; there are {', '.join(MODES)}", 400)
        await updates.pause(mode)
        return {"status": "paused"}

    async def resume(http: web.Request, body: Body) -> Body:
        await updates.resume()
        return {"status": "resumed"}

    async def is_paused(http: web.Request, body: Body) -> Body:
        return {"paused": updates.delivery.paused}

    async def sleep(http: web.Request, body: Body) -> Body:
        raise Refused("these engines do not sleep; that of `instep atropos-serve --enable-sleep-mode` does", 400)

    async def wake_up(http: web.Request, body: Body) -> Body:
        return {"status": "awake"}

    async def is_sleeping(http: web.Request, body: Body) -> Body:
        return {"sleeping": False}

    async def debug(http: web.Request, body: Body) -> Body:
        about = {"model": model, "dtype": f"torch.{served_dtype(args)}"}
        return {"engine_type": args.rollout_backend, "patches_applied": False, "model_config": about}

    async def list_endpoints(http: web.Request, body: Body) -> Body:
        pairs = (route.split() for route in known())
        return {"endpoints": [{"path": path, "methods": [method]} for method, path in pairs]}

    async def lora_status(http: web.Request, body: Body) -> Body:
        active = dict.fromkeys(("active_adapter_path", "active_adapter_name", "active_adapter_id"))
        return {"lora_available": False, **active, "load_count": 0, "available_adapters": []}

    async def lora_load(http: web.Request, body: Body) -> Body:
        raise Refused("these engines take no adapters; that of `instep atropos-serve --enable-lora` does", 400)

    async def lora_unload(http: web.Request, body: Body) -> Body:
        return {"status": "ok", "previous_adapter": None, "previous_name": None}

    return {
        "GET /health_generate": health_generate,
        "GET /bridge/info": info,
        "GET /bridge/state_dict_info": state_dict_info,
        "POST /bridge/pause": pause,
        "POST /bridge/resume": resume,
        "GET /bridge/is_paused": is_paused,
        "POST /bridge/sleep": sleep,
        "POST /bridge/wake_up": wake_up,
        "GET /bridge/is_sleeping": is_sleeping,
        "GET /bridge/debug": debug,
        "GET /bridge/list_endpoints": list_endpoints,
        "GET /lora/status": lora_status,
        "POST /lora/load": lora_load,
        "POST /lora/unload": lora_unload,
    }
