"""The HTTP routes. Handlers parse and format; the engine's thread does the rest."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import torch
import transformers
from aiohttp import web

from instep.engines.embedded import protocol
from instep.engines.embedded.protocol import NotFound, Refusal, Request, Sampling, Texts, Unavailable, token_ids
from instep.engines.embedded.scheduler import Engine

Body = dict[str, Any]
Handler = Callable[[web.Request, Body], Awaitable[Body]]
_OWN = {"model", "request_id", "return_token_ids"}


class Server:
    """Routes over `engine`. Every request and every control call is bounded by `timeout` seconds."""

    def __init__(self, engine: Engine, name: str, max_model_len: int, eos_ids: frozenset[int], timeout: float):
        self.engine, self.name, self.max_model_len, self.eos_ids = engine, name, max_model_len, eos_ids
        self.timeout, self.tokenizer, self.texts = timeout, engine.tokenizer, Texts(engine.tokenizer)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=256 << 20, middlewares=[_errors])
        model = {
            "id": self.name,
            "object": "model",
            "owned_by": "instep",
            "root": self.name,
            "created": int(time.time()),
        }
        versions = {"version": "embedded", "torch": torch.__version__, "transformers": transformers.__version__}
        get: dict[str, Callable[[], Body]] = {
            "/health": dict,
            "/v1/models": lambda: {"object": "list", "data": [model | {"max_model_len": self.max_model_len}]},
            "/is_paused": lambda: {"is_paused": self.engine.paused is not None},
            "/version": lambda: versions,
            "/get_world_size": lambda: {"world_size": 1},
            "/weight_info": lambda: {"weight_version": self.engine.weights.version},
        }
        post: dict[str, Handler] = {"/inference/v1/generate": self.generate, "/v1/completions": self.completions}
        post |= {"/v1/chat/completions": self.chat, "/pause": self.pause}
        post |= {path: self._control(function) for path, function in _controls(self.engine).items()}
        app.add_routes([web.get(path, _get(function)) for path, function in get.items()])
        app.add_routes([web.post(path, _post(function)) for path, function in post.items()])
        return app

    async def generate(self, http: web.Request, body: Body) -> Body:
        """Token ids in, token ids out."""
        protocol.check_keys(body, _OWN | {"token_ids", "sampling_params"})
        params = self._params(body.get("sampling_params") or {}, set())
        prompt = token_ids(body.get("token_ids"), "token_ids", self.engine.vocab_size)
        name, requests = await self._run("generate-tokens", http, [prompt], params, body)
        choices = []
        for r in requests:
            content = protocol.log_prob_entries(r)
            spans = [{"version": version, "start": start, "end": end} for version, start, end in r.spans]
            choice: Body = {"index": r.index, "finish_reason": r.finish_reason, "stop_reason": r.stop_reason}
            choice |= {"token_ids": r.tokens, "weight_versions": spans, "routed_experts": None, "sampling_mask": None}
            choices.append(choice | {"logprobs": None if content is None else {"content": content}})
        reply: Body = {"request_id": name, "model": self.name, "choices": choices, "usage": protocol.usage(requests)}
        reply |= {"prompt_token_ids": prompt if body.get("return_token_ids") else None, "kv_transfer_params": None}
        return reply | {"prompt_logprobs": self.texts.prompt_logprobs(requests[0]), "output_mode": "tokens"}

    async def completions(self, http: web.Request, body: Body) -> Body:
        own = _OWN | {"prompt", "add_special_tokens", "return_tokens_as_token_ids"}
        params = self._params({"max_tokens": 16} | body, own)
        prompt: Any = body.get("prompt")
        many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (list, str))
        prompts = [self._encode(p, body) for p in (prompt if many else [prompt])]
        name, requests = await self._run("cmpl", http, prompts, params, body)
        return self._openai(name, "text_completion", requests, body)

    async def chat(self, http: web.Request, body: Body) -> Body:
        own = _OWN | {"messages", "add_generation_prompt", "chat_template_kwargs", "return_tokens_as_token_ids"}
        logprobs = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        given = body | {"logprobs": logprobs, "max_tokens": limit}
        params = self._params(given, own | {"max_completion_tokens", "top_logprobs"})
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise Refusal("this checkpoint has no chat template: use /v1/completions or /inference/v1/generate")
        messages, extra = body.get("messages"), body.get("chat_template_kwargs") or {}
        if not isinstance(messages, list) or not messages:
            raise Refusal("messages must be a non-empty list")
        extra = {"add_generation_prompt": body.get("add_generation_prompt", True), **extra, "return_dict": False}
        try:
            prompt = self.tokenizer.apply_chat_template(messages, **extra)
        except Exception as error:  # whatever a template raises on what it was given
            raise Refusal(f"the chat template refused the messages: {error}") from error
        name, requests = await self._run("chatcmpl", http, [prompt], params, body)
        return self._openai(name, "chat.completion", requests, body)

    def _openai(self, name: str, kind: str, requests: list[Request], body: Body) -> Body:
        """A completion; for a chat the prompt's ids and log-probs stand beside the choices, else in them."""
        chat = kind == "chat.completion"
        choices: list[Body] = []
        reply: Body = {"id": name, "object": kind, "created": int(time.time()), "model": self.name, "choices": choices}
        for index, request in enumerate(requests):
            text = self.texts.response(request)
            choice: Body = {"index": index, "finish_reason": request.finish_reason, "stop_reason": request.stop_reason}
            choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choice["logprobs"] = self.texts.logprobs(request, chat, bool(body.get("return_tokens_as_token_ids")))
            prompt = reply if chat else choice
            prompt["prompt_logprobs"] = self.texts.prompt_logprobs(request)
            if body.get("return_token_ids"):
                choice["token_ids"], prompt["prompt_token_ids"] = request.tokens, request.prompt
            choices.append(choice)
        return reply | {"usage": protocol.usage(requests)}

    def _params(self, given: Any, own: set[str]) -> Sampling:
        params = protocol.sampling_params(given, own, self.eos_ids, self.engine.vocab_size)
        if params.n > self.engine.max_num_seqs:
            raise Refusal(f"n={params.n} is greater than --max-num-seqs {self.engine.max_num_seqs}")
        if params.stop and self.tokenizer is None:
            raise Refusal("stop strings need a tokenizer, and this checkpoint has none: use stop_token_ids")
        return params

    def _encode(self, prompt: Any, body: Body) -> list[int]:
        if not isinstance(prompt, str):
            return token_ids(prompt, "prompt", self.engine.vocab_size)
        if self.tokenizer is None:
            raise Refusal("this checkpoint has no tokenizer: send token ids")
        return self.tokenizer.encode(prompt, add_special_tokens=body.get("add_special_tokens", True))

    async def _run(
        self, kind: str, http: web.Request, prompts: list[list[int]], params: Sampling, body: Body
    ) -> tuple[str, list[Request]]:
        """The request's id and its finished responses, prompt-major, n per prompt."""
        model, loop, requests = str(body.get("model") or self.name), asyncio.get_running_loop(), []
        if model != self.name and os.path.realpath(model) != os.path.realpath(self.name):
            raise NotFound(f"the model {model!r} does not exist; this engine serves {self.name!r}")
        name = f"{kind}-{http.headers.get('x-request-id') or body.get('request_id') or uuid.uuid4().hex}"
        for prompt in prompts:
            room = self.max_model_len - len(prompt)
            if not prompt or room < 1:
                raise Refusal(f"the prompt has {len(prompt)} tokens; 1 to {self.max_model_len - 1} are possible")
            end = len(prompt) + min(room, params.max_tokens or room)
            for index in range(params.n):
                seed = random.getrandbits(63) if params.seed is None else (params.seed + index) % 2**63
                requests.append(Request(name, index, prompt, params, seed, end, loop.create_future()))
        self.engine.call(lambda: self.engine.submit(requests))
        try:
            async with asyncio.timeout(self.timeout):
                for request in requests:
                    await request.future
        except (TimeoutError, asyncio.CancelledError):  # too slow, or the client went away
            self.engine.call(lambda: self.engine.withdraw(requests, reason="abort"))
            raise
        if requests[0].error:
            raise Unavailable(requests[0].error)
        return name, requests

    def _control(self, function: Callable[[web.Request, Body], Body]) -> Handler:
        async def handle(http: web.Request, body: Body) -> Body:
            async with asyncio.timeout(self.timeout):
                return await asyncio.wrap_future(self.engine.call(lambda: function(http, body)))

        return handle

    async def pause(self, http: web.Request, body: Body) -> Body:
        mode, clear_cache = http.query.get("mode", "abort"), _flag(http, "clear_cache", True)
        if mode not in ("abort", "keep", "wait"):
            raise Refusal(f"mode={mode!r}: abort, keep or wait")
        async with asyncio.timeout(self.timeout):
            await asyncio.wrap_future(self.engine.call(lambda: self.engine.pause(mode, clear_cache)))
            while mode == "wait" and (self.engine.running or self.engine.waiting):
                await asyncio.sleep(0.005)
        return {"status": "paused"}


def _controls(engine: Engine) -> dict[str, Callable[[web.Request, Body], Body]]:
    """Calls that run whole in the engine's thread, between two steps."""
    weights = engine.weights

    def abort(http: web.Request, body: Body) -> Body:
        ids = None if body.get("request_ids") is None else _field(body, "request_ids", list)
        return {"status": "aborted", "aborted": engine.abort(ids)}

    def check(http: web.Request, body: Body) -> Body:
        if body.get("action", "checksum") != "checksum":
            raise Refusal(f"action={body['action']!r}: the embedded engine knows 'checksum' only")
        return {"checksums": weights.digests()}

    def resume(http: web.Request, body: Body) -> Body:
        engine.resume()
        return {"status": "resumed"}

    def start(http: web.Request, body: Body) -> Body:
        engine.start_update(body.get("version"), body.get("nonce"))
        return {"message": "started"}

    def set_version(version: str) -> Body:
        engine.set_version(version)
        return {"weight_version": version}

    return {
        "/resume": resume,
        "/abort_requests": abort,
        "/inference/v1/abort_requests": abort,
        "/reset_prefix_cache": lambda http, body: {
            "success": engine.reset_cache(_flag(http, "reset_running_requests", False))
        },
        "/update_weight_version": lambda http, body: set_version(_field(body, "new_version", str)),
        "/weight_checker": check,
        "/init_weight_transfer_engine": lambda http, body: {"message": "shm and disk need no preparation"},
        "/start_weight_update": start,
        "/update_weights": lambda http, body: {"num_tensors": weights.update(_field(body, "update_info", dict))},
        "/finish_weight_update": lambda http, body: set_version(weights.finish(body.get("weight_version"))),
    }


def _field(body: Body, name: str, kind: type) -> Any:
    if not isinstance(body.get(name), kind):
        raise Refusal(f"{name} must be a JSON {kind.__name__}, got {body.get(name)!r}")
    return body[name]


def _flag(http: web.Request, name: str, default: bool) -> bool:
    value = http.query.get(name, str(default)).lower()
    if value not in ("true", "false", "1", "0"):
        raise Refusal(f"{name}={value!r}: true or false")
    return value in ("true", "1")


def _post(handler: Handler) -> Any:
    async def handle(http: web.Request) -> web.Response:
        try:
            body = json.loads(await http.read() or b"{}")
        except ValueError as error:
            raise Refusal(f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refusal("the body must be a JSON object")
        return web.json_response(await handler(http, body))

    return handle


def _get(handler: Callable[[], Body]) -> Any:
    async def handle(http: web.Request) -> web.Response:
        return web.json_response(handler())

    return handle


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    tensor = None
    try:
        return await handler(request)
    except Refusal as refusal:
        status, kind, message, tensor = refusal.status, refusal.kind, str(refusal), refusal.tensor
    except TimeoutError:
        status, kind, message = 504, "Timeout", "it took longer than --request-timeout allows"
    except web.HTTPException as other:
        status, kind, message = other.status, other.reason, f"{request.method} {request.path}: {other.reason}"
    error = {"message": message, "type": kind, "param": None, "code": status, "tensor": tensor}
    return web.json_response({"error": error}, status=status)
