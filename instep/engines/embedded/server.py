"""The HTTP routes. Handlers parse and format; the engine's thread does the rest."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import web

from instep.engines.embedded import protocol
from instep.engines.embedded.protocol import BadRequestError, NotFoundError, Request, ServiceUnavailable, token_ids
from instep.engines.embedded.scheduler import Engine

Body = dict[str, Any]
Control = Callable[[Any, Body], Any]  # (query, body) -> reply
TIMEOUT = 1800  # seconds, for every request and control call
_OWN = {"model", "request_id", "return_token_ids", "return_tokens_as_token_ids", "add_special_tokens"}


class Server:
    """Routes over `engine`."""

    def __init__(self, engine: Engine, name: str, max_model_len: int, eos_ids: frozenset[int]):
        self.engine, self.name, self.max_model_len, self.eos_ids = engine, name, max_model_len, eos_ids
        self.tokenizer, self.created = engine.tokenizer, int(time.time())

    def app(self) -> web.Application:
        app = web.Application(client_max_size=256 << 20, middlewares=[_errors])
        post: dict[str, Any] = {"/inference/v1/generate": self.generate, "/v1/completions": self.completions}
        for path, handler in (post | {"/v1/chat/completions": self.chat, "/pause": self.pause}).items():
            app.router.add_post(path, _handler(handler))
        for route, function in self.controls().items():
            method, path = route.split()
            app.router.add_route(method, path, _handler(partial(self._call, function)))
        return app

    async def generate(self, http: web.Request, body: Body) -> Body:
        """Token ids in, token ids out."""
        protocol.check_keys(body, _OWN | {"token_ids", "sampling_params"})
        return await self._run(
            "generate-tokens", http, [body.get("token_ids")], body, body.get("sampling_params") or {}, set()
        )

    async def completions(self, http: web.Request, body: Body) -> Body:
        prompt: Any = body.get("prompt")
        many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (list, str))
        prompts = prompt if many else [prompt]
        if any(isinstance(p, str) for p in prompts) and self.tokenizer is None:
            raise BadRequestError("this checkpoint has no tokenizer: send token ids")
        special = body.get("add_special_tokens", True)
        prompts = [self.tokenizer.encode(p, add_special_tokens=special) if isinstance(p, str) else p for p in prompts]
        return await self._run("cmpl", http, prompts, body, {"max_tokens": 16} | body, _OWN | {"prompt"})

    async def chat(self, http: web.Request, body: Body) -> Body:
        own = {"messages", "add_generation_prompt", "chat_template_kwargs", "max_completion_tokens", "top_logprobs"}
        logprobs = (body.get("top_logprobs") or 0) if body.get("logprobs") else None
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        messages, extra = body.get("messages"), body.get("chat_template_kwargs") or {}
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise BadRequestError("this checkpoint has no chat template: use another route")
        if not isinstance(messages, list) or not messages:
            raise BadRequestError("messages must be a non-empty list")
        extra = {"add_generation_prompt": body.get("add_generation_prompt", True), **extra, "return_dict": False}
        try:
            prompt = self.tokenizer.apply_chat_template(messages, **extra)
        except Exception as error:  # whatever a template raises on what it was given
            raise BadRequestError(f"the chat template refused the messages: {error}") from error
        given = body | {"logprobs": logprobs, "max_tokens": limit}
        return await self._run("chatcmpl", http, [prompt], body, given, _OWN | own)

    async def _run(
        self, kind: str, http: web.Request, prompts: list[Any], body: Body, given: Any, own: set[str]
    ) -> Body:
        """The reply of all three routes: prompt-major choices, n per prompt."""
        params, requests = protocol.sampling_params(given, own, self.eos_ids, self.engine.vocab_size), []
        if params.n > self.engine.max_num_seqs:
            raise BadRequestError(f"n={params.n} is greater than --max-num-seqs {self.engine.max_num_seqs}")
        if params.stop and self.tokenizer is None:
            raise BadRequestError("stop strings need a tokenizer, and this checkpoint has none: use stop_token_ids")
        model = str(body.get("model") or self.name)
        if model != self.name and os.path.realpath(model) != os.path.realpath(self.name):
            raise NotFoundError(f"the model {model!r} does not exist; this engine serves {self.name!r}")
        name = f"{kind}-{http.headers.get('x-request-id') or body.get('request_id') or uuid.uuid4().hex}"
        for prompt in prompts:
            token_ids(prompt, "token_ids" if kind == "generate-tokens" else "prompt", self.engine.vocab_size)
            room = self.max_model_len - len(prompt)
            if not prompt or room < 1:
                raise BadRequestError(
                    f"the prompt has {len(prompt)} tokens; 1 to {self.max_model_len - 1} are possible"
                )
            end = len(prompt) + min(room, params.max_tokens or room)
            for index in range(params.n):
                seed = random.getrandbits(63) if params.seed is None else (params.seed + index) % 2**63
                future = asyncio.get_running_loop().create_future()
                requests.append(Request(name, index, prompt, params, seed, end, future))
        self.engine.call(lambda: self.engine.submit(requests))
        try:
            async with asyncio.timeout(TIMEOUT):
                for request in requests:
                    await request.future
        except (TimeoutError, asyncio.CancelledError):  # too slow, or the client went away
            self.engine.call(lambda: self.engine.withdraw(requests))
            raise
        if requests[0].error:
            raise ServiceUnavailable(requests[0].error)
        return self._reply(kind, name, requests, body)

    def _reply(self, kind: str, name: str, requests: list[Request], body: Body) -> Body:
        counts = sum(len(r.prompt) for r in requests if r.index == 0), sum(len(r.tokens) for r in requests)
        choices: list[Body] = []
        reply: Body = {"model": self.name, "choices": choices, "created": int(time.time())}
        reply["usage"] = dict(prompt_tokens=counts[0], completion_tokens=counts[1], total_tokens=sum(counts))
        reply |= {"request_id": name} if kind == "generate-tokens" else {"id": name}
        for index, r in enumerate(requests):
            choice: Body = {"index": index, "finish_reason": r.finish_reason, "stop_reason": r.stop_reason}
            content = None if r.params.logprobs is None else protocol.log_prob_entries(r)
            choice["logprobs"] = None if content is None else {"content": content}
            if kind == "generate-tokens":
                spans = [{"version": version, "start": start, "end": end} for version, start, end in r.spans]
                choice |= {"token_ids": r.tokens, "weight_versions": spans}
            else:
                text = self._text(r)
                choice |= {"text": text} if kind == "cmpl" else {"message": {"role": "assistant", "content": text}}
                for entry in [x for e in content or () for x in (e, *e["top_logprobs"])]:
                    entry["token"] = self._token(entry["token_id"], body)
            if kind == "cmpl" and content is not None:
                tops = [{x["token"]: x["logprob"] for x in (*e["top_logprobs"], e)} for e in content]
                columns = {"tokens": [e["token"] for e in content], "top_logprobs": tops}
                choice["logprobs"] = columns | {"token_logprobs": [e["logprob"] for e in content]}
            prompt = choice if kind == "cmpl" else reply
            prompt["prompt_logprobs"] = protocol.prompt_entries(r)
            if body.get("return_token_ids"):
                choice["token_ids"], prompt["prompt_token_ids"] = r.tokens, r.prompt
            choices.append(choice)
        return reply

    def _text(self, request: Request) -> str:
        """The decoded response, cut before the stop string that ended it."""
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(request.tokens, skip_special_tokens=request.params.skip_special_tokens)
        return text.partition(request.stop_reason)[0] if isinstance(request.stop_reason, str) else text

    def _token(self, token: int, body: Body) -> str:
        plain = self.tokenizer is None or body.get("return_tokens_as_token_ids")
        return f"token_id:{token}" if plain else self.tokenizer.decode([token])

    async def _call(self, function: Control, http: web.Request, body: Body) -> Body:
        async with asyncio.timeout(TIMEOUT):
            return await asyncio.wrap_future(self.engine.call(lambda: function(http.query, body)))

    async def pause(self, http: web.Request, body: Body) -> Body:
        mode, clear = http.query.get("mode", "abort"), http.query.get("clear_cache", "true").lower() == "true"
        if mode not in ("abort", "keep", "wait"):
            raise BadRequestError(f"mode={mode!r}: abort, keep or wait")
        await self._call(lambda query, body: self.engine.pause(mode, clear), http, body)
        async with asyncio.timeout(TIMEOUT):
            while mode == "wait" and (self.engine.running or self.engine.waiting):
                await asyncio.sleep(0.005)
        return {"status": "paused"}

    def controls(self) -> dict[str, Control]:
        """Calls that run whole in the engine's thread, between two steps: what they answer is true then."""
        engine, weights = self.engine, self.engine.weights
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "instep", "root": self.name}
        models = {"object": "list", "data": [model | {"max_model_len": self.max_model_len}]}
        abort: Control = lambda query, body: {"aborted": engine.abort(body.get("request_ids"))}  # noqa: E731
        reset: Control = lambda query, body: {  # noqa: E731
            "success": engine.reset_cache(query.get("reset_running_requests", "").lower() == "true")
        }
        return {
            "GET /health": lambda query, body: {},
            "GET /v1/models": lambda query, body: models,
            "GET /version": lambda query, body: {"version": "embedded"},
            "GET /get_world_size": lambda query, body: {"world_size": 1},
            "GET /is_paused": lambda query, body: {"is_paused": engine.paused is not None},
            "GET /weight_info": lambda query, body: {"weight_version": weights.version},
            "POST /resume": lambda query, body: engine.resume(),
            "POST /abort_requests": abort,
            "POST /inference/v1/abort_requests": abort,
            "POST /reset_prefix_cache": reset,
            "POST /weight_checker": lambda query, body: {"checksums": weights.digests()},
            "POST /init_weight_transfer_engine": lambda query, body: {},
            "POST /start_weight_update": lambda query, body: engine.start_update(body),
            "POST /update_weights": lambda query, body: {"num_tensors": weights.update(body.get("update_info"))},
            "POST /update_weight_version": lambda query, body: engine.set_version(body.get("new_version")),
            "POST /finish_weight_update": lambda query, body: engine.set_version(
                weights.finish(body.get("weight_version"))
            ),
        }


def _handler(function: Callable[[web.Request, Body], Awaitable[Body]]) -> Any:
    async def handle(http: web.Request) -> web.Response:
        try:
            body = json.loads(await http.read() or b"{}")
        except ValueError as error:
            raise BadRequestError(f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequestError("the body must be a JSON object")
        return web.json_response(await function(http, body) or {})

    return handle


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequestError as refusal:
        status, kind, message, tensor = refusal.status, type(refusal).__name__, str(refusal), refusal.tensor
    except TimeoutError:
        status, kind, message, tensor = 504, "Timeout", f"it took longer than {TIMEOUT} s", None
    except web.HTTPException as other:
        status, kind, message, tensor = other.status, other.reason, f"{request.method} {request.path}", None
    error = {"message": message, "type": kind, "code": status, "tensor": tensor}
    return web.json_response({"error": error}, status=status)
