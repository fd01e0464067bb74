"""instep's routes in SGLang's HTTP server, and the check of every request's key (`guard.py`).

SGLang's own routes stay as they are. instep's are those of its other engines:

    GET  /is_paused   GET /weight_info   GET /instep/alive (answered by the scheduler)   GET /instep/drafts
    POST /pause?mode=abort|wait|keep&clear_cache=true|false   POST /resume   POST /abort_requests
    POST /reset_prefix_cache   POST /sleep?level=1|2   POST /wake_up?tags=weights|kv_cache
    POST /start_weight_update {"protocol", "version", "nonce"}   POST /update_weights {"update_info": {...}}
    POST /finish_weight_update {"weight_version"}   POST /lease (`lease.py`)
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from instep_engine.guard import Guarded
from instep_engine.lease import Keeper, NoLease, end_server
from instep_engine.sglang.weights import ADAPTER, FORMAT, STREAMS

LOOK_SECONDS = 0.02  # between two looks for requests under way; SGLang itself looks once a second
IDLE_SECONDS = 30.0
TAGS = ("weights", "kv_cache", "cuda_graph")


class Refusal(Exception):
    """The answer to a refused call: `args` are its HTTP status and message."""


class Control:
    """The routes of one server, over its `TokenizerManager`."""

    def __init__(self, manager: Any):
        self.manager = manager
        self.session: tuple[str, str] | None = None  # version and nonce of the one under way
        self.adapter = ""  # serves requests that name none
        self._asleep: set[str] = set()
        self._brings_adapter = False
        self._pauses = 0  # how often generation was paused or resumed
        self.keeper = Keeper(self.resume, end_server)
        self.drafted = self.taken = 0  # tokens, with speculative decoding

    @property
    def version(self) -> str:
        return str(self.manager.config_value("weight_version"))

    async def is_paused(self) -> dict[str, Any]:
        return {"is_paused": self.manager.is_pause}

    async def weight_info(self) -> dict[str, Any]:
        return {"weight_version": self.version, "in_session": self.session is not None}

    async def drafts(self) -> dict[str, Any]:
        return {"drafted": self.drafted, "taken": self.taken}

    async def alive(self) -> dict[str, Any]:
        await self.manager.get_internal_state()
        return {"alive": True}

    async def pause(self, mode: str = "abort", clear_cache: str = "true") -> dict[str, Any]:
        """Hold new requests; end those under way (abort), let them end (wait), or keep them for later (keep).

        With `clear_cache`, kept requests compute their keys and values again.
        """
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if mode not in ("abort", "wait", "keep"):
            raise Refusal(400, f"no such mode: {mode!r}")
        self._pauses, mine = self._pauses + 1, self._pauses + 1
        if mode == "keep":
            await self.manager.pause_generation(PauseGenerationReqInput(mode="retract"))
            if clear_cache == "true" and not await self._flush():
                raise Refusal(409, "the cache of requests under way cannot be dropped")
            return {"status": "paused"}
        async with self.manager.is_pause_cond:
            self.manager.is_pause = True
        while self._pauses == mine and await self.manager.model_update_lock.is_locked():
            if mode == "abort":  # again: a request may have been on its way to the scheduler
                self._abort()
            await asyncio.sleep(LOOK_SECONDS)
        return {"status": "paused"}

    def _abort(self) -> None:
        """End all requests that the schedulers have. SGLang's own call would also fail those that a pause holds."""
        from sglang.srt.managers.io_struct import AbortReq

        self.manager._dispatch_to_scheduler(AbortReq(rid="", abort_all=True))

    async def resume(self) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._pauses += 1  # a call that still waits for requests gives up
        await self.manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        self.keeper.lease.end()
        return {"status": "resumed"}

    async def lease(self, body: dict[str, Any]) -> dict[str, Any]:
        self.keeper.lease.ask(body)
        return {}

    async def abort_requests(self) -> dict[str, Any]:
        under_way = len(self.manager.rid_to_state)
        self._abort()
        return {"aborted": under_way}

    async def reset_prefix_cache(self) -> dict[str, Any]:
        return {"success": await self._flush()}

    async def _flush(self) -> bool:
        """Drop the caches. Return False if requests are about on any rank."""
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        self.manager.auto_create_handle_loop()
        return all(one.success for one in await self.manager.flush_cache_communicator(FlushCacheReqInput()))

    async def sleep(self, level: int = 1) -> dict[str, Any]:
        """Free the memory of weights and KV cache. Level 1 keeps the weights: on the host, else on the GPU."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        self._abort()
        deadline = time.monotonic() + IDLE_SECONDS
        while not await self._flush():  # a scheduler that is not idle would die of what follows
            if time.monotonic() > deadline:
                raise Refusal(409, f"requests are under way, also {IDLE_SECONDS:.0f} s after they were aborted")
            await asyncio.sleep(LOOK_SECONDS)
        kept = level == 1 and not self.manager.server_args.enable_weights_cpu_backup  # SGLang would lose them
        tags = [tag for tag in TAGS if tag not in self._asleep and not (kept and tag == "weights")]
        await self.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))
        self._asleep.update(tags)
        return {}

    async def wake_up(self, tags: str) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        wanted = {tags} | ({"cuda_graph"} if tags == "kv_cache" else set())
        if found := sorted(wanted & self._asleep):
            await self.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=found))
            self._asleep.difference_update(found)
        return {}

    async def start_weight_update(self, body: dict[str, Any]) -> dict[str, Any]:
        self.keeper.lease.check()
        self.session, self._brings_adapter = None, False
        await self._call({"call": "start", **{name: body[name] for name in ("protocol", "version", "nonce")}})
        self.session = body["version"], body["nonce"]
        self.keeper.begun(body["version"])
        return {}

    async def update_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.session is None:
            raise Refusal(400, "WeightMismatch[]: no session was announced, or it was refused")
        if not isinstance(body["update_info"], dict):
            raise Refusal(400, "update_info is no JSON object")
        backend = str(body["update_info"]["backend"])
        with self.keeper.loading(backend, several=backend in STREAMS):
            await self._call({"call": "update", "info": body["update_info"]})
        self._brings_adapter |= backend.startswith("lora")
        return {}

    async def finish_weight_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.session is None or self.session[0] != body["weight_version"]:
            raise Refusal(400, f"WeightMismatch[]: no session of version {body['weight_version']} is under way")
        self.keeper.lease.check()
        if self._brings_adapter:
            await self._load_adapter("@".join(self.session))
        await self._call({"call": "finish"}, body["weight_version"])
        self.keeper.finished()
        self.session = None
        return {}

    async def _load_adapter(self, name: str) -> None:
        """Serve the adapter of the session, under a name of its own, and forget the last one.

        SGLang would load an adapter again, by itself, for a request with the old name.
        """
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput, UnloadLoRAAdapterReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        nothing = [MultiprocessingSerializer.serialize({})] * self.manager.server_args.tp_size  # schedulers have it
        request = LoadLoRAAdapterFromTensorsReqInput(
            lora_name=ADAPTER + name, config_dict={}, serialized_named_tensors=nothing
        )
        loaded = await self.manager.load_lora_adapter_from_tensors(request)
        if not loaded.success:
            raise Refusal(400, f"WeightMismatch[]: the adapter cannot be loaded: {loaded.error_message}")
        last, self.adapter = self.adapter, ADAPTER + name
        if not last:
            return
        # Generation is paused: no request uses the last one. SGLang's own call would wait for its count of users,
        # which 0.5.17 does not lower for every aborted request.
        async with self.manager.lora_update_lock:
            number = await self.manager.lora_registry.unregister(last)
            self.manager.lora_registry._counters.pop(number, None)
            self.manager.lora_ref_cache.pop(last, None)
            request = UnloadLoRAAdapterReqInput(lora_name=last, lora_id=number)
            results = await self.manager.update_lora_adapter_communicator(request)
        if refused := [one.error_message for one in results if not one.success]:
            raise Refusal(400, f"WeightMismatch[]: the last adapter cannot be unloaded: {refused[0]}")

    async def _call(self, asked: dict[str, Any], version: str | None = None) -> None:
        """Let all schedulers answer a call of a session (`weights.py`); `version`: the new one."""
        from sglang.srt.managers.communicator import FanOutCommunicator
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        words = [json.dumps(asked).encode()]
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=words, load_format=FORMAT, flush_cache=False, weight_version=version
        )
        self.manager.auto_create_handle_loop()
        # SGLang's own call would wait for the requests under way, also where nothing is loaded.
        results = await self.manager.update_weights_from_tensor_communicator(request)
        accepted, message = FanOutCommunicator.merge_results(results)
        if not accepted:
            self.session = None
            raise Refusal(400, message)
        if version is not None:
            self.manager._update_weight_version_if_provided(version)


def add_routes(app: Any, manager: Any) -> Control:
    """Add instep's routes and its guard to SGLang's FastAPI application."""
    control = Control(manager)
    routes: dict[str, tuple[str, Callable[..., Any]]] = {
        "/is_paused": ("GET", control.is_paused),
        "/weight_info": ("GET", control.weight_info),
        "/instep/alive": ("GET", control.alive),
        "/instep/drafts": ("GET", control.drafts),
        **{
            f"/{method.__name__}": ("POST", method)
            for method in (
                *(control.pause, control.resume, control.lease, control.abort_requests, control.reset_prefix_cache),
                *(control.sleep, control.wake_up, control.start_weight_update),
                *(control.update_weights, control.finish_weight_update),
            )
        },
    }
    for path, (method, function) in routes.items():
        app.add_api_route(path, _answering(function), methods=[method])
    app.add_middleware(Guarded)
    return control


def _answering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the endpoint of a method of `Control`: query and body become its arguments."""
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def endpoint(request: Request) -> JSONResponse:
        given: dict[str, Any] = dict(request.query_params)
        takes = function.__annotations__
        try:
            if "body" in takes:
                given = {"body": await request.json()}
            if "level" in given:
                given["level"] = int(given["level"])
            return JSONResponse(await function(**{name: value for name, value in given.items() if name in takes}))
        except Refusal as refusal:
            status, message = refusal.args
        except NoLease as refusal:
            status, message = 400, str(refusal)
        except (ValueError, KeyError, TypeError) as error:
            status, message = 400, f"the request has another form: {error!r}"
        return JSONResponse({"error": {"message": message, "code": status}}, status)

    endpoint.__annotations__ = {"request": Request, "return": JSONResponse}  # FastAPI reads objects, not their names
    return endpoint
