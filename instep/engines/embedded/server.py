"""The HTTP routes. Handlers parse and format; the engine's thread does the rest."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import torch
import transformers
from aiohttp import web

from instep.engines.embedded import protocol
from instep.engines.embedded.protocol import BadRequest
from instep.engines.embedded.scheduler import Engine, Request, Sampling
from instep.engines.embedded.weights import SessionError, WeightMismatch

Body = dict[str, Any]


class NotFound(Exception):
    """HTTP 404: another model's name."""


class Server:
    """Routes over `engine`. Every request is bounded by `timeout` seconds, every control call too."""

    def __init__(self, engine: Engine, name: str, max_model_len: int, eos_ids: frozenset[int], timeout: float):
        self.engine, self.name, self.max_model_len = engine, name, max_model_len
        self.eos_ids, self.timeout, self.tokenizer = eos_ids, timeout, engine.tokenizer
        self.created = int(time.time())

    def app(self) -> web.Application:
        app = web.Application(client_max_size=256 << 20, middlewares=[_errors])
        post: dict[str, Callable[[web.Request, Body], Awaitable[Any]]] = {
            "/inference/v1/generate": self.generate,
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/pause": self.pause,
            "/resume": self.resume,
            "/abort_requests": self.abort,
            "/inference/v1/abort_requests": self.abort,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/update_weight_version": self.update_weight_version,
            "/weight_checker": self.weight_checker,
            "/init_weight_transfer_engine": self.init_weight_transfer_engine,
            "/start_weight_update": self.start_weight_update,
            "/update_weights": self.update_weights,
            "/finish_weight_update": self.finish_weight_update,
        }
        get: dict[str, Callable[[], Any]] = {
            "/health": dict,
            "/v1/models": self.models,
            "/is_paused": lambda: {"is_paused": self.engine.paused is not None},
            "/version": lambda: {
                "version": "embedded",
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "/get_world_size": lambda: {"world_size": 1},
            "/weight_info": lambda: {"weight_version": self.engine.weights.version},
        }
        app.add_routes([web.post(path, _json(handler)) for path, handler in post.items()])
        app.add_routes([web.get(path, _get(handler)) for path, handler in get.items()])
        return app

    # -- generation ---------------------------------------------------------------------------------------------------

    async def generate(self, http: web.Request, body: Body) -> Any:
        """Token ids in, token ids out."""
        own = {"token_ids", "sampling_params", "model", "request_id", "return_token_ids"}
        protocol.refuse_unknown(body, own)
        params = self._params(body.get("sampling_params") or {}, set())
        prompt = protocol.token_ids(body.get("token_ids"), "token_ids", self.engine.vocab_size)
        name = f"generate-tokens-{http.headers.get('x-request-id') or body.get('request_id') or uuid.uuid4().hex}"
        requests = await self._run(name, [prompt], params, body)
        return {
            "request_id": name,
            "model": self.name,
            "choices": [protocol.generate_choice(r, r.index) for r in requests],
            "prompt_logprobs": protocol.prompt_logprobs(requests[0], self.tokenizer),
            "prompt_token_ids": prompt if body.get("return_token_ids") else None,
            "kv_transfer_params": None,
            "output_mode": "tokens",
            "usage": protocol.usage(requests),
        }

    async def completions(self, http: web.Request, body: Body) -> Any:
        own = {"prompt", "model", "request_id", "return_token_ids", "add_special_tokens"}
        params = self._params({"max_tokens": 16} | body, own)
        prompt = body.get("prompt")
        many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (list, str))
        prompts = [self._encode(p, body) for p in (prompt if many else [prompt])]
        name = f"cmpl-{http.headers.get('x-request-id') or body.get('request_id') or uuid.uuid4().hex}"
        requests = await self._run(name, prompts, params, body)
        choices = []
        for index, request in enumerate(requests):
            choice = {
                "index": index,
                "text": protocol.text_of(request, self.tokenizer),
                "logprobs": protocol.openai_logprobs(request, self.tokenizer, chat=False),
                "finish_reason": request.finish_reason,
                "stop_reason": request.stop_reason,
                "prompt_logprobs": protocol.prompt_logprobs(request, self.tokenizer),
            }
            if body.get("return_token_ids"):
                choice |= {"token_ids": request.tokens, "prompt_token_ids": request.prompt}
            choices.append(choice)
        return self._openai(name, "text_completion", choices, requests)

    async def chat(self, http: web.Request, body: Body) -> Any:
        own = {"messages", "model", "request_id", "return_token_ids", "add_generation_prompt", "chat_template_kwargs"}
        own |= {"max_completion_tokens", "top_logprobs"}
        wanted = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        params = self._params(body | {"logprobs": wanted, "max_tokens": limit}, own)
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise BadRequest("this checkpoint has no chat template: use /v1/completions or /inference/v1/generate")
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise BadRequest("messages must be a non-empty list")
        try:
            prompt = self.tokenizer.apply_chat_template(
                body["messages"],
                add_generation_prompt=body.get("add_generation_prompt", True),
                return_dict=False,
                **(body.get("chat_template_kwargs") or {}),
            )
        except Exception as error:  # whatever a template raises on these messages
            raise BadRequest(f"the chat template refused the messages: {error}") from error
        name = f"chatcmpl-{http.headers.get('x-request-id') or body.get('request_id') or uuid.uuid4().hex}"
        requests = await self._run(name, [prompt], params, body)
        choices = []
        for request in requests:
            choice = {
                "index": request.index,
                "message": {"role": "assistant", "content": protocol.text_of(request, self.tokenizer)},
                "logprobs": protocol.openai_logprobs(request, self.tokenizer, chat=True),
                "finish_reason": request.finish_reason,
                "stop_reason": request.stop_reason,
            }
            choices.append(choice | ({"token_ids": request.tokens} if body.get("return_token_ids") else {}))
        reply = self._openai(name, "chat.completion", choices, requests)
        reply["prompt_logprobs"] = protocol.prompt_logprobs(requests[0], self.tokenizer)
        return reply | ({"prompt_token_ids": prompt} if body.get("return_token_ids") else {})

    def _openai(self, name: str, kind: str, choices: list[Body], requests: list[Request]) -> Body:
        usage = protocol.usage(requests)
        return {
            "id": name,
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
            "choices": choices,
            "usage": usage,
        }

    def _params(self, given: Any, own: set[str]) -> Sampling:
        params = protocol.sampling_params(
            given,
            allowed=own,
            eos_ids=self.eos_ids,
            vocab_size=self.engine.vocab_size,
            max_num_seqs=self.engine.max_num_seqs,
        )
        if params.stop and self.tokenizer is None:
            raise BadRequest("stop strings need a tokenizer, and this checkpoint has none: use stop_token_ids")
        return params

    def _encode(self, prompt: Any, body: Body) -> list[int]:
        if not isinstance(prompt, str):
            return protocol.token_ids(prompt, "prompt", self.engine.vocab_size)
        if self.tokenizer is None:
            raise BadRequest("this checkpoint has no tokenizer: send token ids")
        return self.tokenizer.encode(prompt, add_special_tokens=body.get("add_special_tokens", True))

    async def _run(self, name: str, prompts: list[list[int]], params: Sampling, body: Body) -> list[Request]:
        """The finished requests, prompt-major; n of them per prompt."""
        model = body.get("model")
        if model is not None and model != self.name and os.path.realpath(str(model)) != os.path.realpath(self.name):
            raise NotFound(f"the model {model!r} does not exist; this engine serves {self.name!r}")
        loop, requests = asyncio.get_running_loop(), []
        for prompt in prompts:
            room = self.max_model_len - len(prompt)
            if not prompt or room < 1:
                raise BadRequest(f"the prompt has {len(prompt)} tokens; 1 to {self.max_model_len - 1} are possible")
            end = len(prompt) + min(room, params.max_tokens or room)
            for index in range(params.n):
                seed = random.getrandbits(63) if params.seed is None else (params.seed + index) % 2**63
                one = replace(params)
                requests.append(Request(name, index, prompt, one, seed, end, loop.create_future()))
        self.engine.call(lambda: self.engine.submit(requests))
        try:
            async with asyncio.timeout(self.timeout):
                await asyncio.gather(*(r.future for r in requests))
        except (TimeoutError, asyncio.CancelledError):  # too slow, or the client went away
            self.engine.call(lambda: self.engine._withdraw(requests, reason="abort"))
            raise
        failed = next((r.error for r in requests if r.error), None)
        if failed:
            raise web.HTTPServiceUnavailable(text=failed)
        return requests

    # -- control ------------------------------------------------------------------------------------------------------

    async def _call(self, function: Callable[[], Any]) -> Any:
        async with asyncio.timeout(self.timeout):
            return await asyncio.wrap_future(self.engine.call(function))

    def models(self) -> Body:
        entry = {"id": self.name, "object": "model", "created": self.created, "owned_by": "instep"}
        return {"object": "list", "data": [entry | {"root": self.name, "max_model_len": self.max_model_len}]}

    async def pause(self, http: web.Request, body: Body) -> Any:
        mode = http.query.get("mode", body.get("mode", "abort"))
        if mode not in ("abort", "keep", "wait"):
            raise BadRequest(f"mode={mode!r}: abort, keep or wait")
        clear = _flag(http, "clear_cache", True)
        await self._call(lambda: self.engine.pause(mode, clear))
        async with asyncio.timeout(self.timeout):
            while mode == "wait" and not await self._call(self.engine.drained):
                await asyncio.sleep(0.005)
        return {"status": "paused"}

    async def resume(self, http: web.Request, body: Body) -> Any:
        await self._call(self.engine.resume)
        return {"status": "resumed"}

    async def abort(self, http: web.Request, body: Body) -> Any:
        ids = body.get("request_ids")
        if ids is not None and (not isinstance(ids, list) or not all(isinstance(i, str) for i in ids)):
            raise BadRequest("request_ids must be a list of strings; left out, it means all")
        return {"status": "aborted", "aborted": await self._call(lambda: self.engine.abort(ids and set(ids)))}

    async def reset_prefix_cache(self, http: web.Request, body: Body) -> Any:
        running = _flag(http, "reset_running_requests", False)
        return {"success": await self._call(lambda: self.engine.reset_cache(running))}

    async def update_weight_version(self, http: web.Request, body: Body) -> Any:
        version = body.get("new_version")
        if not isinstance(version, str):
            raise BadRequest("new_version must be a string")
        await self._call(lambda: self.engine.set_version(version))
        return {"success": True, "new_version": version}

    async def weight_checker(self, http: web.Request, body: Body) -> Any:
        if body.get("action", "checksum") != "checksum":
            raise BadRequest("the embedded engine knows the action 'checksum' only")
        return {"checksums": await self._call(self.engine.weights.digests)}

    async def init_weight_transfer_engine(self, http: web.Request, body: Body) -> Any:
        return {"message": "shm and disk need no preparation"}

    async def start_weight_update(self, http: web.Request, body: Body) -> Any:
        if self.engine.paused is None:
            raise SessionError("weights change under a pause only: POST /pause first")
        await self._call(lambda: self.engine.weights.start(body.get("version"), body.get("nonce")))
        return {"message": "started"}

    async def update_weights(self, http: web.Request, body: Body) -> Any:
        info = body.get("update_info")
        if not isinstance(info, dict):
            raise BadRequest("update_info must be an object")
        return {"message": "loaded", "num_tensors": await self._call(lambda: self.engine.weights.update(info))}

    async def finish_weight_update(self, http: web.Request, body: Body) -> Any:
        await self._call(lambda: self.engine.finish_update(body.get("weight_version")))
        return {"message": "finished", "weight_version": self.engine.weights.version}


def _flag(http: web.Request, name: str, default: bool) -> bool:
    value = http.query.get(name, str(default)).lower()
    if value not in ("true", "false", "1", "0"):
        raise BadRequest(f"{name}={value!r}: true or false")
    return value in ("true", "1")


def _json(handler: Callable[[web.Request, Body], Awaitable[Any]]) -> Any:
    async def handle(http: web.Request) -> web.Response:
        try:
            body = json.loads(await http.read() or b"{}")
        except ValueError as error:
            raise BadRequest(f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        return web.json_response(await handler(http, body))

    return handle


def _get(handler: Callable[[], Any]) -> Any:
    async def handle(http: web.Request) -> web.Response:
        return web.json_response(handler())

    return handle


def _error(status: int, kind: str, message: str, **extra: Any) -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": status, **extra}
    return web.json_response({"error": error}, status=status)


@web.middleware
async def _errors(http: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(http)
    except BadRequest as error:
        return _error(400, "BadRequestError", str(error))
    except NotFound as error:
        return _error(404, "NotFoundError", str(error))
    except WeightMismatch as error:
        return _error(409, "WeightMismatch", str(error), tensor=error.tensor)
    except SessionError as error:
        return _error(409, "SessionError", str(error))
    except TimeoutError:
        return _error(504, "Timeout", "the request took longer than --request-timeout allows")
    except web.HTTPException as error:
        return _error(error.status, "ServiceUnavailable" if error.status == 503 else error.reason, error.text or "")
