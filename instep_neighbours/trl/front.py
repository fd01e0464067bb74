"""The port of `instep serve` and `instep vllm-serve`: OpenAI's routes, TRL's of both generations, and those of Atropos.

Requests of TRL's clients for texts are translated (`forms.py`) and divided among the engines; those that change weights
go to `Updates`. What a client of OpenAI's sends is passed on as it is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from instep.data.tokenizer import tokenizer_of
from instep.engines import keys
from instep.engines.bodies import AS_THEY_COME, body_of
from instep.engines.gate_main import MAX_BODY, forward
from instep.engines.http import checked_socket, message
from instep.engines.kind import served_dtype
from instep.engines.wire import GENERATE
from instep.errors import InstepError
from instep.rollout import admission
from instep_engine.guard import EVERYONE, GENERATION_ROUTES, HOSTS_VARIABLE, Guard
from instep_neighbours.atropos import bridge
from instep_neighbours.trl import forms
from instep_neighbours.trl.access import Access
from instep_neighbours.trl.clients import BadRequest, Connection, Refused
from instep_neighbours.trl.forms import Asked, Body
from instep_neighbours.trl.texts import IMAGES, Texts, template_options
from instep_neighbours.trl.updates import Updates

if TYPE_CHECKING:
    from instep.arguments.args import Args

REFUSED = {
    "/v1/chat/completions/render": IMAGES,
    "/v1/load_lora_adapter": "adapters by name are not served here: let the trainer merge them, and send whole weights",
}
LOOK_SECONDS = 0.2
START_SECONDS = 60.0  # to find the host's name and to listen there
RETRY_SECONDS = 60.0  # a prompt whose engine has died goes to another one, or waits for it to come back
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
        serves: whether an engine has the weights that it should; no other one is asked.
    """

    def __init__(
        self, args: Args, url: str, model: str, access: Access, host: str, updates: Updates, serves: Callable[[], bool]
    ):
        self._serves, self._args, self._url, self._model, self._host = serves, args, url, model, host
        self._access, self._updates = access, updates
        hosts = keys.server_environment(args)[HOSTS_VARIABLE].split(",")
        self._guard = Guard(keys.run_key(), EVERYONE, [*hosts, "0.0.0.0", host])
        self._texts = Texts(tokenizer_of(args))
        self._loop = asyncio.new_event_loop()
        self._ready, self._fault = threading.Event(), ""
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)
        self.routes: dict[str, Handler] = {
            # TRL <= 1.10
            "GET /health/": self._health,
            "GET /get_world_size/": self._world_size,
            "POST /generate/": self._generate,
            "POST /chat/": self._chat,
            "POST /get_sequence_logprobs/": self._sequence_logprobs,
            "POST /init_communicator/": self._init_communicator,
            "POST /update_named_param/": self._update_named_param,
            "POST /reset_prefix_cache/": self._reset_legacy,
            "POST /close_communicator/": self._close,
            # TRL >= 1.11
            "GET /health": self._health,
            "GET /get_world_size": self._world_size_if_free,
            "GET /server_info": self._server_info,
            "POST /v1/completions": self._openai,
            "POST /v1/chat/completions": self._openai,
            "POST /v1/chat/completions/render": self._refused,
            "POST /v1/load_lora_adapter": self._refused,
            "POST /init_weight_transfer_engine": self._init,
            "POST /start_weight_update": self._start,
            "POST /update_weights": self._update,
            "POST /finish_weight_update": self._finish,
            "POST /reset_prefix_cache": self._reset,
            "POST /pause": self._pause,
            "POST /resume": self._resume,
            "POST /bridge/pause": self._pause,  # Atropos'
            "POST /bridge/resume": self._resume,
            "GET /is_paused": self._is_paused,
            "GET /weight_info": self._weight_info,
        }
        self.routes |= bridge.routes(args, model, updates, self._one_token, lambda: list(self.routes))

    # ---- the thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises OSError if the port cannot be had within `START_SECONDS`."""
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            raise OSError(f"its thread does not listen after {START_SECONDS:.0f} s")
        if self._fault:
            raise OSError(self._fault)

    def check(self) -> None:
        """Raise RuntimeError if the thread has ended by itself."""
        if not self._thread.is_alive():
            raise RuntimeError(f"the server's port is served no more: {self._fault}")

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
        # A client's connection shows that it lives, so that none is closed because nothing came by it.
        options: Any = {"handler_cancellation": True, "keepalive_timeout": 1e6, "shutdown_timeout": 1.0, **AS_THEY_COME}
        runner = web.AppRunner(app, access_log=access, **options)
        async with aiohttp.ClientSession(connector=connector, timeout=limits, read_bufsize=1 << 20) as self._http:
            await runner.setup()
            try:
                await web.TCPSite(runner, self._host, self._args.port, backlog=1024).start()
                self._ready.set()
                while not self._stop.is_set():
                    with suppress(Refused, InstepError):  # told to the user, and tried again
                        await self._updates.look()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._stop.wait(), LOOK_SECONDS)
            finally:
                await runner.cleanup()

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        try:
            self._check(http)
            handler = self.routes.get(f"{http.method} {http.path}")
            if handler is None and http.path in GENERATION_ROUTES:
                self._check_whole(now=True)
                return await self._pass_on(http)
            if handler is None:
                raise Refused(f"there is no {http.method} {http.path} here", 404)
            answer = await handler(http, object_of(await body_of(http, MAX_BODY)))
            return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)
        except Refused as error:
            return error_answer(error.status, str(error))
        except InstepError as error:
            return error_answer(503, f"{error.what} ({error.where}); {error.remedy}")

    def _check(self, http: web.Request) -> None:
        """Check whose request it is. Raises Refused."""
        address = http.transport.get_extra_info("sockname")[0] if http.transport is not None else ""
        if (refusal := self._guard.refusal("/health", http.headers, address)) is not None:
            raise Refused(refusal[1], refusal[0])
        if (refusal := self._access.refusal(http.path, http.headers.get("Authorization", ""))) is not None:
            raise Refused(refusal[1], refusal[0])

    def _check_whole(self, now: bool = False) -> None:
        """Raise Refused if nothing can be generated, or (`now`) not without waiting for an engine."""
        if self._updates.delivery.broken:
            raise Refused(self._updates.delivery.broken, 503)
        if now and not self._serves():
            raise Refused("no engine serves: one is started anew", 503)

    async def _pass_on(self, http: web.Request) -> web.StreamResponse:
        async with admission.admitted(self._url):
            return await forward(self._http, http, self._url, keys.key_of(self._url))

    async def _ask(self, payloads: Sequence[Body]) -> list[Body]:
        """The engines' answers, in order. If one refuses, all others are given up."""
        self._check_whole()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask_one(payload)) for payload in payloads]
        except* Refused as several:
            raise several.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _ask_one(self, payload: Body) -> Body:
        url, deadline = self._url + GENERATE, time.monotonic() + RETRY_SECONDS
        async with admission.admitted(url):
            while True:
                try:
                    if not self._serves():
                        raise ConnectionError("none has the current weights")
                    headers = keys.headers_for(url)
                    async with self._http.post(url, json=payload, headers=headers) as answer:
                        text = await answer.text()
                        status = answer.status
                except (aiohttp.ClientError, ConnectionError) as error:
                    status, text = 503, f"no engine answers: {error}"
                except TimeoutError:
                    raise Refused(f"no answer in {self._args.rollout_timeout:.0f} s (--rollout-timeout)", 504) from None
                if status == 200:
                    return json.loads(text)  # type: ignore[no-any-return]
                if status < 500 or (time.monotonic() > deadline and not self._updates.delivery.paused):
                    raise Refused(message(text), status)
                await asyncio.sleep(LOOK_SECONDS)

    async def _one_token(self) -> None:
        await self._ask([Asked.of({"max_tokens": 1}).payload(self._model, [0])])

    # ---- TRL <= 1.10 -------------------------------------------------------------------------------------------------

    async def _health(self, http: web.Request, body: Body) -> Body:
        if not self._serves():
            raise Refused("no engine serves: one is started anew", 503)
        return {"status": "ok"}

    async def _world_size(self, http: web.Request, body: Body) -> Body:
        return {"world_size": 1}  # one process receives weights for all workers of all engines

    async def _generate(self, http: web.Request, body: Body) -> Body:
        asked, prompts = forms.legacy_asked(body, forms.LEGACY_GENERATE), forms.legacy_prompts(body)
        return await self._legacy(body, await self._texts.ids(prompts), asked)

    async def _chat(self, http: web.Request, body: Body) -> Body:
        conversations = body.get("messages")
        if not isinstance(conversations, list):
            raise BadRequest("messages must be a list of conversations")
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

    async def _init_communicator(self, http: web.Request, body: Body) -> Body:
        port, size, uuid = body.get("port"), body.get("world_size"), body.get("client_device_uuid", "")
        if type(port) is not int or type(size) is not int or not isinstance(uuid, str):
            raise BadRequest("port, world_size and client_device_uuid are needed")
        await self._updates.init_legacy(Connection(http.transport), port, size, uuid)
        return {"message": "Request received, initializing communicator"}

    async def _update_named_param(self, http: web.Request, body: Body) -> Body:
        name, dtype, shape = (body.get(key) for key in ("name", "dtype", "shape"))
        if not isinstance(name, str) or not isinstance(dtype, str) or not forms.is_ids(shape):
            raise BadRequest("name, dtype and shape are needed")
        assert isinstance(shape, list)
        self._updates.announce(Connection(http.transport), name, dtype, shape)
        return {"message": "Request received, updating named parameter"}

    async def _reset_legacy(self, http: web.Request, body: Body) -> Body:
        success = await self._updates.reset(Connection(http.transport))
        return {"message": f"Request received, resetting prefix cache status: {success}"}

    async def _close(self, http: web.Request, body: Body) -> Body:
        await self._updates.leave(Connection(http.transport))
        return {"message": "Request received, closing communicator"}

    # ---- TRL >= 1.11 -------------------------------------------------------------------------------------------------

    async def _world_size_if_free(self, http: web.Request, body: Body) -> Body:
        await self._updates.check_free(Connection(http.transport))
        return await self._world_size(http, body)

    async def _server_info(self, http: web.Request, body: Body) -> Body:
        """What TRL's clients look at of vLLM's configuration, before they init a group if they have none."""
        if not self._updates.takes_none:
            await self._updates.check_free(Connection(http.transport))
        dtype = f"torch.{served_dtype(self._args)}"
        config: Body = {
            "model_config": {"model": self._model, "dtype": dtype, "logprobs_mode": "processed_logprobs"},
            "weight_transfer_config": None if self._updates.takes_none else {"backend": "nccl"},
            "lora_config": None,
            "parallel_config": {"data_parallel_size": 1},
        }
        return {"vllm_config": config}

    async def _openai(self, http: web.Request, body: Body) -> Any:
        if not forms.is_translated(body):
            self._check_whole(now=True)
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
                    made.append(forms.chat_choice(len(made), choice, asked, name, text))
                else:
                    made.append(forms.completion_choice(len(made), prompt, answer, choice, asked, name, text))
        return forms.openai_answer(self._model, chat, prompts, made)

    async def _refused(self, http: web.Request, body: Body) -> Body:
        raise BadRequest(REFUSED[http.path])

    async def _init(self, http: web.Request, body: Body) -> Body:
        await self._updates.init(Connection(http.transport), part_of(body, "init_info"))
        return {"message": "Weight transfer initialized"}

    async def _start(self, http: web.Request, body: Body) -> Body:
        if body.get("is_checkpoint_format", True) is not True:
            raise BadRequest("is_checkpoint_format: weights come under the names of the checkpoint, or not at all")
        self._updates.start(Connection(http.transport))
        return {"message": "Weight update started"}

    async def _update(self, http: web.Request, body: Body) -> Body:
        await self._updates.update(Connection(http.transport), part_of(body, "update_info"))
        return {"message": "Weights updated"}

    async def _finish(self, http: web.Request, body: Body) -> Body:
        await self._updates.finish(Connection(http.transport))
        return {"message": "Weight update finished"}

    async def _reset(self, http: web.Request, body: Body) -> Body:
        return {"success": await self._updates.reset(Connection(http.transport))}

    async def _pause(self, http: web.Request, body: Body) -> Body:
        default = "keep" if http.path == "/bridge/pause" else "abort"
        if (mode := body.get("mode", http.query.get("mode", default))) not in ("abort", "wait", "keep"):
            raise BadRequest(f"mode={mode!r}: abort, wait or keep")
        await self._updates.pause(mode)
        return {"status": "paused"}

    async def _resume(self, http: web.Request, body: Body) -> Body:
        await self._updates.resume()
        return {"status": "resumed"}

    async def _is_paused(self, http: web.Request, body: Body) -> Body:
        return {"is_paused": self._updates.delivery.paused}

    async def _weight_info(self, http: web.Request, body: Body) -> Body:
        return {"weight_version": str(self._updates.delivery.version)}


def object_of(raw: bytes) -> Body:
    """The JSON object of a body, which may be empty. Raises BadRequest."""
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object")
    return body


def part_of(body: Body, name: str) -> Body:
    if not isinstance(value := body.get(name), dict):
        raise BadRequest(f"{name} must be an object")
    return value


def error_answer(status: int, text: str) -> web.Response:
    reason = "".join(c if " " <= c <= "~" else " " for c in text)  # what requests' raise_for_status shows
    body = {"error": {"message": text, "type": "instep", "code": status}}
    return web.json_response(body, status=status, reason=reason[:1000])
