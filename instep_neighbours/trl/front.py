"""The port of `instep serve` and `instep vllm-serve`: OpenAI's routes, TRL's of both generations, and Atropos' routes.

Text requests of TRL's clients are translated (`forms.py`) and divided among the engines. Requests that change weights
go to `Updates`. Requests of OpenAI clients are passed on unchanged. Shared weights and adapters belong to `instep
atropos-serve` (`instep_engine/vllm/atropos.py`); Atropos' routes for them report here that they are missing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
from aiohttp import web

from instep.arguments.args import Args
from instep.data.tokenizer import tokenizer_of
from instep.engines import keys
from instep.engines.bodies import AS_THEY_COME, body_of
from instep.engines.gate_main import MAX_BODY, forward
from instep.engines.http import checked_socket, message
from instep.engines.kind import kind_of, served_dtype
from instep.engines.wire import GENERATE
from instep.errors import InstepError
from instep.rollout.request_gate import gate
from instep_engine.guard import EVERYONE, GENERATION_ROUTES, HOSTS_VARIABLE, Guard
from instep_neighbours.trl import forms
from instep_neighbours.trl.clients import Access, BadRequest, Body, Connection, Refused, of_type, one_line
from instep_neighbours.trl.forms import Asked
from instep_neighbours.trl.texts import IMAGES, Texts, template_options
from instep_neighbours.trl.updates import Updates

REFUSED = {
    "POST /v1/chat/completions/render": IMAGES,
    "POST /v1/load_lora_adapter": "adapters by name are not served here: let the trainer merge them, and send whole "
    "weights",
    "POST /bridge/sleep": "these engines do not sleep; that of `instep atropos-serve --enable-sleep-mode` does",
    "POST /lora/load": "these engines support no adapters; that of `instep atropos-serve --enable-lora` does",
}
# Atropos' routes about missing features; `instep_engine/vllm/atropos.py` has them all.
_ADAPTER = dict.fromkeys(("active_adapter_path", "active_adapter_name", "active_adapter_id"))
FIXED: dict[str, Body] = {
    "POST /bridge/wake_up": {"status": "awake"},
    "GET /bridge/is_sleeping": {"sleeping": False},
    "GET /lora/status": {"lora_available": False, **_ADAPTER, "load_count": 0, "available_adapters": []},
    "POST /lora/unload": {"status": "ok", "previous_adapter": None, "previous_name": None},
    "GET /get_world_size/": {"world_size": 1},  # one process receives weights for all workers of all engines
}
LOOK_SECONDS = 0.2
START_SECONDS = 60.0  # to find the host's name and to listen there
RETRY_SECONDS = 60.0  # a prompt of a dead engine goes to another one, or waits for it to restart
Handler = Callable[[web.Request, Body], Awaitable[Any]]
access = logging.getLogger("aiohttp.access")


class Front:
    """The server at `--host` and `--port`, in a thread with an event loop.

    Args:
        args: of `instep serve`.
        access: checked for every request.
        url: of the router or the only engine.
        model: its name there.
        updates: made before this thread runs.
        serves: whether an engine has the current weights; other engines get no requests.
    """

    def __init__(
        self, args: Args, url: str, model: str, access: Access, host: str, updates: Updates, serves: Callable[[], bool]
    ):
        self._serves, self._args, self._url, self._model, self._host = serves, args, url, model, host
        self._access, self._updates, self._kind = access, updates, kind_of(args.rollout_backend)
        hosts = keys.server_environment(args)[HOSTS_VARIABLE].split(",")
        self._guard = Guard(keys.run_key(), EVERYONE, [*hosts, "0.0.0.0", host])
        self._texts, self._dtype = Texts(tokenizer_of(args)), f"torch.{served_dtype(args)}"
        self._loop = asyncio.new_event_loop()
        self._ready, self._fault = threading.Event(), ""
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)
        self.routes: dict[str, Handler] = {
            # TRL <= 1.10
            "GET /health/": self._health,
            "POST /generate/": self._generate,
            "POST /chat/": self._chat,
            "POST /get_sequence_logprobs/": self._sequence_logprobs,
            "POST /init_communicator/": updates.init_legacy,
            "POST /update_named_param/": updates.announce,
            "POST /reset_prefix_cache/": updates.reset,
            "POST /close_communicator/": updates.leave,
            # TRL >= 1.11
            "GET /health": self._health,
            "GET /get_world_size": self._world_size_if_free,
            "GET /server_info": self._server_info,
            "POST /v1/completions": self._openai,
            "POST /v1/chat/completions": self._openai,
            "POST /init_weight_transfer_engine": updates.init,
            "POST /start_weight_update": updates.start,
            "POST /update_weights": updates.update,
            "POST /finish_weight_update": updates.finish,
            "POST /reset_prefix_cache": updates.reset,
            "POST /pause": updates.pause,
            "POST /resume": updates.resume,
            "GET /is_paused": self._state,
            "GET /weight_info": self._state,
            # Atropos' example server
            "GET /health_generate": self._health_generate,
            "POST /bridge/pause": updates.pause,
            "POST /bridge/resume": updates.resume,
            "GET /bridge/is_paused": self._state,
            "GET /bridge/info": self._state,
            "GET /bridge/state_dict_info": self._state,
            "GET /bridge/debug": self._state,
            "GET /bridge/list_endpoints": self._endpoints,
        }

    # ---- the thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to listen. Raises OSError if the port is not available within `START_SECONDS`."""
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            raise OSError(f"its thread does not listen after {START_SECONDS:.0f} s")
        if self._fault:
            raise OSError(self._fault)

    def check(self) -> None:
        """Raise RuntimeError if the thread has ended by itself."""
        if not self._thread.is_alive():
            raise RuntimeError(f"the server's port has no server any more: {self._fault}")

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(5.0)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:  # noqa: BLE001 - a thread's border: `start` and `check` tell it
            self._fault = f"{type(error).__name__}: {error}"
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        limits = aiohttp.ClientTimeout(total=self._args.rollout_timeout, sock_connect=10.0)
        connector = aiohttp.TCPConnector(limit=0, socket_factory=checked_socket)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{route:.*}", self._handle)
        # An open connection shows that a client is alive, so the server closes none for inactivity.
        options: Any = {"handler_cancellation": True, "keepalive_timeout": 1e6, "shutdown_timeout": 1.0, **AS_THEY_COME}
        runner = web.AppRunner(app, access_log=access, **options)
        async with aiohttp.ClientSession(connector=connector, timeout=limits, read_bufsize=1 << 20) as self._http:
            await runner.setup()
            try:
                await web.TCPSite(runner, self._host, self._args.port, backlog=1024).start()
                self._ready.set()
                while not self._stop.is_set():
                    with suppress(Refused, InstepError):  # the user gets a report, and it is tried again
                        await self._updates.look()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._stop.wait(), LOOK_SECONDS)
            finally:
                await runner.cleanup()

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        try:
            self._check(http)
            if (route := f"{http.method} {http.path}") in REFUSED:
                raise BadRequest(REFUSED[route])
            if route in FIXED:
                return web.json_response(FIXED[route])
            if (handler := self.routes.get(route)) is None:
                if http.path not in GENERATION_ROUTES:
                    raise Refused(f"no route {route}", 404)
                return await self._pass_on(http)
            answer = await handler(http, object_of(await body_of(http, MAX_BODY)))
            return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)
        except Refused as error:
            return error_answer(error.status, str(error))
        except InstepError as error:
            return error_answer(503, one_line(error))

    def _check(self, http: web.Request) -> None:
        """Check the key of a request. Raises Refused."""
        address = http.transport.get_extra_info("sockname")[0] if http.transport is not None else ""
        if (refusal := self._guard.refusal("/health", http.headers, address)) is not None:
            raise Refused(refusal[1], refusal[0])
        if (refusal := self._access.refusal(http.path, http.headers.get("Authorization", ""))) is not None:
            raise Refused(refusal[1], refusal[0])

    def _check_whole(self) -> None:
        """Raise Refused if generation is impossible."""
        if self._updates.delivery.broken:
            raise Refused(self._updates.delivery.broken, 503)

    async def _pass_on(self, http: web.Request) -> web.StreamResponse:
        self._check_whole()
        if not self._serves():
            raise Refused("no engine is ready: one is restarting", 503)
        async with gate().admitted(self._url):
            return await forward(self._http, http, self._url, keys.key_of(self._url), self._kind.router)

    async def _ask(self, payloads: Sequence[Body]) -> list[Body]:
        """Return the engines' answers, in order. If one refuses, all others are cancelled."""
        if self._kind.wire.generate_route != GENERATE:
            what = f"{self._kind.title} cannot answer TRL's requests: use --rollout-backend vllm or embedded"
            raise Refused(what, 501)
        self._check_whole()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask_one(payload)) for payload in payloads]
        except* Refused as several:
            raise several.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _ask_one(self, payload: Body) -> Body:
        url, deadline = self._url + GENERATE, time.monotonic() + RETRY_SECONDS
        async with gate().admitted(url):
            while True:
                try:
                    if not self._serves():
                        raise ConnectionError("no engine has the current weights")
                    async with self._http.post(url, json=payload, headers=keys.headers_for(url)) as answer:
                        status, text = answer.status, await answer.text()
                except (aiohttp.ClientError, ConnectionError) as error:
                    status, text = 503, f"no engine answers: {error}"
                except TimeoutError:
                    raise Refused(f"no answer in {self._args.rollout_timeout:.0f} s (--rollout-timeout)", 504) from None
                if status == 200:
                    return json.loads(text)  # type: ignore[no-any-return]
                if status < 500 or (time.monotonic() > deadline and not self._updates.delivery.paused):
                    raise Refused(message(text), status)
                await asyncio.sleep(LOOK_SECONDS)

    # ---- TRL <= 1.10 -------------------------------------------------------------------------------------------------

    async def _health(self, http: web.Request, body: Body) -> Body:
        if not self._serves():
            raise Refused("no engine is ready: one is restarting", 503)
        return {"status": "ok"}

    async def _generate(self, http: web.Request, body: Body) -> Body:
        asked, prompts = forms.legacy_asked(body, forms.LEGACY_GENERATE), forms.legacy_prompts(body)
        return await self._legacy(body, await self._texts.ids(prompts), asked)

    async def _chat(self, http: web.Request, body: Body) -> Body:
        conversations = of_type(body, "messages", list)
        asked, options = forms.legacy_asked(body, forms.LEGACY_CHAT), template_options(body)
        return await self._legacy(body, await asyncio.to_thread(self._texts.render, conversations, options), asked)

    async def _legacy(self, body: Body, prompts: list[list[int]], asked: Asked) -> Body:
        prompts = forms.legacy_cut(body, prompts)
        answers = await self._ask([asked.payload(self._model, ids) for ids in prompts])
        return forms.legacy_answer(body, prompts, answers, asked)

    async def _sequence_logprobs(self, http: web.Request, body: Body) -> Body:
        scoring = forms.Scoring.of(body)
        fixed = {"model": self._model, "sampling_params": scoring.params}
        answers = await self._ask([fixed | {"token_ids": sequence} for sequence in scoring.sequences])
        return await asyncio.to_thread(scoring.answer, answers)

    # ---- TRL >= 1.11 -------------------------------------------------------------------------------------------------

    async def _world_size_if_free(self, http: web.Request, body: Body) -> Body:
        await self._updates.check_free(Connection.of(http))
        return FIXED["GET /get_world_size/"]

    async def _server_info(self, http: web.Request, body: Body) -> Body:
        """Return the part of vLLM's configuration that TRL's clients read before they init a group."""
        if not self._updates.takes_none:
            await self._updates.check_free(Connection.of(http))
        config: Body = {
            "model_config": {"model": self._model, "dtype": self._dtype, "logprobs_mode": "processed_logprobs"},
            "weight_transfer_config": None if self._updates.takes_none else {"backend": "nccl"},
            "lora_config": None,
            "parallel_config": {"data_parallel_size": 1},
        }
        return {"vllm_config": config}

    async def _openai(self, http: web.Request, body: Body) -> Any:
        if not forms.is_translated(body):
            return await self._pass_on(http)
        chat, name = http.path == "/v1/chat/completions", self._texts.namer(body)
        if chat:
            asked, options = forms.chat_asked(body), template_options(body)
            prompts = await asyncio.to_thread(self._texts.render, [body.get("messages")], options)
        else:
            asked = forms.completion_asked(body)
            prompts = await self._texts.ids(forms.completion_prompts(body))
        answers = await self._ask([asked.payload(self._model, ids) for ids in prompts])
        made: list[Body] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            for choice in answer["choices"]:
                text = self._texts.of(choice, body)
                if chat:
                    own = forms.chat_choice(choice, asked, name) | {"message": {"role": "assistant", "content": text}}
                else:
                    own = forms.completion_choice(prompt, answer, choice, asked, name) | {"text": text}
                same = {key: choice.get(key) for key in ("finish_reason", "stop_reason", "token_ids")}
                made.append({"index": len(made), **same, **own})
        return forms.openai_answer(self._model, chat, prompts, made)

    # ---- state, and Atropos' routes ----------------------------------------------------------------------------------

    async def _state(self, http: web.Request, body: Body) -> Body:
        """Return the state of engines and weights, for the routes that report parts of it."""
        delivery, args = self._updates.delivery, self._args
        about = {"model": self._model, "dtype": self._dtype}
        facts: dict[str, Body] = {
            "/is_paused": {"is_paused": delivery.paused},
            "/bridge/is_paused": {"paused": delivery.paused},
            "/weight_info": {"weight_version": str(delivery.version)},
            "/bridge/info": {
                **{"enabled": False, "shared_weights": False, "model_name": self._model, "device": args.device},
                **{"update_count": delivery.version, "last_update_time": delivery.brought_at},
            },
            "/bridge/state_dict_info": {**about, "shared_weights_enabled": False},
            "/bridge/debug": {"engine_type": args.rollout_backend, "patches_applied": False, "model_config": about},
        }
        return facts[http.path]

    async def _health_generate(self, http: web.Request, body: Body) -> Body:
        if self._updates.delivery.paused:
            raise Refused("the engines are paused", 503)
        await self._ask([Asked.of({"max_tokens": 1}).payload(self._model, [0])])
        return {}

    async def _endpoints(self, http: web.Request, body: Body) -> Body:
        pairs = (route.split() for route in (*self.routes, *FIXED, *REFUSED))
        return {"endpoints": [{"path": path, "methods": [method]} for method, path in pairs]}


def object_of(raw: bytes) -> Body:
    """Return the JSON object of a body, which may be empty. Raises BadRequest."""
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    return body


def error_answer(status: int, text: str) -> web.Response:
    reason = "".join(c if " " <= c <= "~" else " " for c in text)  # requests' raise_for_status shows it
    body = {"error": {"message": text, "type": "instep", "code": status}}
    return web.json_response(body, status=status, reason=reason[:1000])
