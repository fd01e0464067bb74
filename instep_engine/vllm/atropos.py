"""The routes of Atropos' example server that vLLM lacks: `--middleware instep_engine.vllm.atropos.Middleware`.

    GET  /health_generate /bridge/{info,state_dict_info,is_paused,is_sleeping,debug,list_endpoints} /lora/status
    POST /bridge/{pause,resume,sleep,wake_up} /lora/load {"adapter_path": DIR, "adapter_name"?: NAME} /lora/unload

`/generate` is not among them. An adapter of `/lora/load` serves requests without an adapter, until it is unloaded or a
trainer's session has brought another one. The engine must run with --enable-lora and INSTEP_LORA=1 (`lora.py`).
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from instep_engine import LORA_VARIABLE
from instep_engine.asgi import App, Message, Receive, Send, body_of, reply
from instep_engine.vllm import SINGLE_COPY
from instep_engine.vllm.async_llm import Loaded

FIRST_ID = 1001  # of an adapter; the trainer's own has 1
MODES = ("keep", "wait", "abort")
BUSY = "a trainer's session has paused this engine, and will resume it"


class Refused(Exception):
    """A request that cannot be served: the status of the answer, and the reason."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status, self.detail = status, detail


class Middleware:
    """An ASGI middleware that answers those routes, and passes all other requests on."""

    def __init__(self, app: App):
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        method, known = ROUTES.get(scope["path"], ("", None)) if scope["type"] == "http" else ("", None)
        if known is None:
            return await self.app(scope, receive, _told(scope, send))
        try:
            if scope["method"] != method:
                raise Refused(405, f"{scope['path']} takes {method}")
            body = await body_of(receive) if method == "POST" else b""
            if body is None:
                return
            query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
            asked = {**query, **_object(body)}
            answer = await known(_Server(scope["app"], scope["app"].state.engine_client, asked))
        except Refused as refusal:
            return await reply(send, refusal.status, {"detail": refusal.detail})
        await reply(send, 200, answer)


def _told(scope: Message, send: Send) -> Send:
    """Wrap `send` so that it logs the server's start, in the words of uvicorn's own line for a port."""

    async def send_on(message: Message) -> None:
        await send(message)
        if message["type"] == "lifespan.startup.complete" and (url := os.environ.get("INSTEP_ATROPOS_URL")):
            print(f"Uvicorn running on {url} (Press CTRL+C to quit)", flush=True)

    return send_on if scope["type"] == "lifespan" else send


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body or b"{}")
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refused(400, "the body is not an object")
    return found


Answer = dict[str, Any]


class _Server:
    """The answers of the routes. `asked` is the query and the body of the request."""

    def __init__(self, app: Any, engine: Any, asked: dict[str, Any]):
        self.app, self.engine, self.asked, self.model = app, engine, asked, engine.model_config
        self.keeper = getattr(engine, "_instep_keeper", None)  # made by a trainer's first call
        transfer = engine.vllm_config.weight_transfer_config
        self.shares = transfer is not None and transfer.backend == SINGLE_COPY
        self.takes_adapters = engine.vllm_config.lora_config is not None and bool(os.environ.get(LORA_VARIABLE))

    async def health_generate(self) -> Answer:
        from vllm import SamplingParams

        if await self.engine.is_paused():
            raise Refused(503, "the engine is paused")
        one, name = SamplingParams(max_tokens=1), f"health-{uuid.uuid4()}"
        async for _ in self.engine.generate({"prompt_token_ids": [0]}, one, name):
            pass
        return {}

    async def info(self) -> Answer:
        return {
            "enabled": self.shares,
            "shared_weights": self.shares,
            "update_count": self.keeper.num_updates if self.keeper else 0,
            "last_update_time": self.keeper.last_update if self.keeper else 0.0,
            "model_name": str(self.model.model),
            "device": self.engine.vllm_config.device_config.device_type,
        }

    async def state_dict_info(self) -> Answer:
        return {"model": str(self.model.model), "dtype": str(self.model.dtype), "shared_weights_enabled": self.shares}

    async def debug(self) -> Answer:
        import vllm

        names = ("VLLM_ENABLE_SHARED_WEIGHTS", "NUM_INFERENCE_NODES", "LOGDIR")
        shared, nodes, logs = (os.environ.get(name, "unset") for name in names)
        return {
            "engine_type": type(self.engine).__name__,
            "vllm_version": vllm.__version__,
            "patches_applied": self.shares,
            "shared_weights_env": shared,
            "num_inference_nodes": nodes,
            "logdir": logs,
            "model_config": {"model": str(self.model.model), "dtype": str(self.model.dtype)},
        }

    async def list_endpoints(self) -> Answer:
        own = [{"path": path, "methods": [method]} for path, (method, _) in ROUTES.items()]
        theirs = [{"path": r.path, "methods": sorted(r.methods)} for r in self.app.routes if getattr(r, "methods", ())]
        return {"endpoints": own + theirs}

    async def pause(self) -> Answer:
        """Pause: new requests wait. Running ones stop (keep), end (wait), or are aborted, as `mode` says."""
        if (mode := self.asked.get("mode", "keep")) not in MODES:
            raise Refused(400, f"no such mode: {mode!r}; there are {', '.join(MODES)}")
        self._check_free()
        await self.engine.pause_generation(mode=mode, clear_cache=True)
        return {"status": "paused"}

    async def resume(self) -> Answer:
        self._check_free()
        await self.engine.resume_generation()
        return {"status": "resumed"}

    def _check_free(self) -> None:
        if self.keeper is not None and self.keeper.lease.held:
            raise Refused(409, BUSY)

    async def is_paused(self) -> Answer:
        return {"paused": await self.engine.is_paused()}

    async def sleep(self) -> Answer:
        if not self.model.enable_sleep_mode:
            raise Refused(400, "this engine cannot sleep: start it with --enable-sleep-mode (not with shared weights)")
        self._check_free()
        await self.engine.sleep()
        return {"status": "sleeping"}

    async def wake_up(self) -> Answer:
        if self.model.enable_sleep_mode:
            await self.engine.wake_up()
        return {"status": "awake"}

    async def is_sleeping(self) -> Answer:
        return {"sleeping": bool(self.model.enable_sleep_mode and await self.engine.is_sleeping())}

    async def lora_status(self) -> Answer:
        folder, request = Path(os.environ.get("LOGDIR") or "."), Loaded.request
        return {
            "lora_available": self.takes_adapters,
            "active_adapter_path": request and request.lora_path,
            "active_adapter_name": request and request.lora_name,
            "active_adapter_id": request and request.lora_int_id,
            "load_count": Loaded.count,
            "available_adapters": sorted(path.parent.name for path in folder.glob("*/adapter_config.json")),
        }

    async def lora_load(self) -> Answer:
        if not self.takes_adapters:
            raise Refused(400, f"this engine accepts no adapters: start it with --enable-lora and {LORA_VARIABLE}=1")
        path, name = self.asked.get("adapter_path"), self.asked.get("adapter_name") or f"adapter_{Loaded.count}"
        if not isinstance(path, str) or not isinstance(name, str):
            raise Refused(422, "adapter_path and adapter_name must be texts")
        try:
            config = json.loads((Path(path) / "adapter_config.json").read_text())
        except OSError:
            raise Refused(404, f"Adapter not found: {path} has no adapter_config.json") from None
        except ValueError as error:
            raise Refused(400, f"{path}/adapter_config.json is not JSON: {error}") from None
        from vllm.lora.request import LoRARequest

        request = LoRARequest(name, FIRST_ID + Loaded.count, os.path.abspath(path))
        try:
            await self.engine.add_lora(request)
        except Exception as error:  # noqa: BLE001 - from the worker; the core does not keep its class
            raise Refused(400, f"vLLM cannot load {path}: {error}") from error
        Loaded.request, Loaded.count = request, Loaded.count + 1
        about = {key: config.get(key) for key in ("r", "lora_alpha", "target_modules")}
        return {
            "status": "ok",
            "adapter_path": path,
            "adapter_name": name,
            "adapter_id": request.lora_int_id,
            "load_count": Loaded.count,
            "adapter_config": {**about, "base_model": config.get("base_model_name_or_path")},
        }

    async def lora_unload(self) -> Answer:
        before, Loaded.request = Loaded.request, None
        names = {"previous_adapter": before and before.lora_path, "previous_name": before and before.lora_name}
        return {"status": "ok", **names}


ROUTES: dict[str, tuple[str, Callable[[_Server], Awaitable[Answer]]]] = {
    "/health_generate": ("GET", _Server.health_generate),
    "/bridge/info": ("GET", _Server.info),
    "/bridge/state_dict_info": ("GET", _Server.state_dict_info),
    "/bridge/pause": ("POST", _Server.pause),
    "/bridge/resume": ("POST", _Server.resume),
    "/bridge/is_paused": ("GET", _Server.is_paused),
    "/bridge/sleep": ("POST", _Server.sleep),
    "/bridge/wake_up": ("POST", _Server.wake_up),
    "/bridge/is_sleeping": ("GET", _Server.is_sleeping),
    "/bridge/debug": ("GET", _Server.debug),
    "/bridge/list_endpoints": ("GET", _Server.list_endpoints),
    "/lora/status": ("GET", _Server.lora_status),
    "/lora/load": ("POST", _Server.lora_load),
    "/lora/unload": ("POST", _Server.lora_unload),
}
