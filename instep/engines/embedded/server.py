"""The HTTP routes. Handlers parse and format; the engine's thread does the rest."""

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import web

from instep.engines.embedded import protocol
from instep.engines.embedded.protocol import HttpError, Request
from instep.engines.embedded.scheduler import Engine

Body = dict[str, Any]
Handler = Callable[[web.Request, Body], Awaitable[Body]]
TIMEOUT = 1800  # seconds, for every request and control call
_OWN = "model request_id return_token_ids"  # parameters that are not about sampling


class Server:
    """Routes over `engine`."""

    def __init__(self, engine: Engine, name: str, eos_ids: frozenset[int]):
        self.engine, self.name, self.eos_ids = engine, name, eos_ids
        self.max_model_len = engine.runner.max_length

    def app(self) -> web.Application:
        app = web.Application(client_max_size=256 << 20)
        routes: dict[str, Handler] = {path: partial(self._call, f) for path, f in self.controls().items()}
        routes |= {"POST /inference/v1/generate": self.generate, "POST /v1/completions": self.completions}
        routes |= {"POST /v1/chat/completions": self.chat, "POST /pause": self.pause, "* /{other:.*}": self.unknown}
        for (method, path), function in zip(map(str.split, routes), routes.values(), strict=True):
            app.router.add_route(method, path, _route(function))
        return app

    async def generate(self, http: web.Request, body: Body) -> Body:
        """Token ids in, token ids out."""
        protocol.check_keys(body, {*_OWN.split(), "token_ids", "sampling_params"})
        given = body.get("sampling_params") or {}
        return await self._run("generate-tokens", http, [body.get("token_ids")], body, given, "")

    async def completions(self, http: web.Request, body: Body) -> Body:
        prompt, encode = body.get("prompt"), self.engine.tokenizer.encode
        prompts: Any = prompt if isinstance(prompt, list) and prompt and type(prompt[0]) in (list, str) else [prompt]
        prompts = [encode(p) if isinstance(p, str) else p for p in prompts]
        return await self._run("cmpl", http, prompts, body, {"max_tokens": 16} | body, f"{_OWN} prompt")

    async def chat(self, http: web.Request, body: Body) -> Body:
        messages, template = body.get("messages"), self.engine.tokenizer.apply_chat_template
        if not isinstance(messages, list) or not messages:
            raise HttpError("BadRequestError", "messages must be a non-empty list")
        try:
            extra = {"add_generation_prompt": True, **(body.get("chat_template_kwargs") or {}), "return_dict": False}
            prompt = template(messages, **extra)
        except Exception as error:  # no template, or whatever one raises on what it was given
            raise HttpError("BadRequestError", f"the chat template failed: {error}") from error
        given = body | {"logprobs": 0 if body.get("logprobs") else None}
        return await self._run("chatcmpl", http, [prompt], body, given, f"{_OWN} messages chat_template_kwargs")

    async def _run(self, kind: str, http: web.Request, prompts: list[Any], body: Body, given: Any, own: str) -> Body:
        """The reply of all three routes: prompt-major choices, n per prompt. `own`: keys that `given` may also have."""
        params = protocol.sampling_params(given, {*own.split()}, self.eos_ids, self.engine.vocab_size)
        num, seed, limit = params.pop("n", 1), params.pop("seed", None), params.pop("max_tokens", self.max_model_len)
        model = str(body.get("model") or self.name)
        if model != self.name and os.path.realpath(model) != os.path.realpath(self.name):
            raise HttpError("NotFoundError", f"the model {model!r} does not exist; this engine serves {self.name!r}")
        name = f"{kind}-{http.headers.get('x-request-id') or body.get('request_id') or random.getrandbits(128)}"
        requests = []
        for prompt in prompts:
            room = self.max_model_len - len(protocol.token_ids(prompt, "token_ids", self.engine.vocab_size))
            if not prompt or room < 1:
                message = f"the prompt has {len(prompt)} tokens; 1 to {self.max_model_len - 1} are possible"
                raise HttpError("BadRequestError", message)
            first = random.getrandbits(62) if seed is None else seed
            fixed = dict(id=name, prompt=prompt, max_tokens=min(room, limit)) | params
            requests += [Request(seed=(first + i) % 2**63, **fixed) for i in range(num)]
        self.engine.call(lambda: self.engine.submit(requests))
        try:
            for request in requests:
                if (failure := await request.future) is not None:
                    raise failure
        except asyncio.CancelledError:  # too slow, or the client went away
            self.engine.call(lambda: self.engine.abort(requests))
            raise
        choices: list[Body] = [{"index": i} | self._choice(kind, r) for i, r in enumerate(requests)]
        key = "request_id" if kind == "generate-tokens" else "id"
        reply: Body = {key: name, "model": self.name, "choices": choices}
        for request, choice in zip(requests, choices, strict=True):
            where = choice if kind == "cmpl" else reply
            if (scores := request.prompt_scores) is not None:
                entries = [{str(t): {"logprob": p}} for t, p in zip(request.prompt[1:], scores, strict=True)]
                where["prompt_logprobs"] = [None, *entries]
            if body.get("return_token_ids"):
                choice["token_ids"], where["prompt_token_ids"] = request.tokens, request.prompt
        return reply

    def _choice(self, kind: str, request: Request) -> Body:
        choice: Body = {"finish_reason": request.finish_reason, "stop_reason": request.stop_reason, "logprobs": None}
        if request.logprobs is not None:
            scores = [max(-9999.0, p) for p in request.log_probs]  # in this order also for NaN, which JSON lacks
            content = [{"token_id": t, "logprob": p} for t, p in zip(request.tokens, scores, strict=True)]
            choice["logprobs"] = {"token_logprobs": scores} if kind == "cmpl" else {"content": content}
        if kind == "generate-tokens":
            spans = [dict(zip(("version", "start", "end"), span, strict=True)) for span in request.spans]
            return choice | {"token_ids": request.tokens, "weight_versions": spans}
        text = self.engine.tokenizer.decode(request.tokens, skip_special_tokens=request.skip_special_tokens)
        text = text.partition(request.stop_reason)[0] if isinstance(request.stop_reason, str) else text
        return choice | ({"text": text} if kind == "cmpl" else {"message": {"role": "assistant", "content": text}})

    async def _call(self, function: Callable[[Body], Any], http: web.Request, body: Body) -> Body:
        return await asyncio.wrap_future(self.engine.call(lambda: function(body)))

    async def unknown(self, http: web.Request, body: Body) -> Body:
        raise HttpError("NotFoundError", f"there is no {http.method} {http.path}")

    async def pause(self, http: web.Request, body: Body) -> Body:
        mode, clear = http.query.get("mode", "abort"), http.query.get("clear_cache", "true").lower() == "true"
        if mode not in ("abort", "keep", "wait"):
            raise HttpError("BadRequestError", f"mode={mode!r}: abort, keep or wait")
        await self._call(lambda body: self.engine.pause(mode, clear), http, body)
        while mode == "wait" and self.engine.running:
            await asyncio.sleep(0.005)
        return {"status": "paused"}

    def controls(self) -> dict[str, Callable[[Body], Any]]:
        """Calls that run whole in the engine's thread, between two steps: what they answer is true then."""
        engine, weights = self.engine, self.engine.weights
        model = {"id": self.name, "object": "model", "owned_by": "instep", "max_model_len": self.max_model_len}
        return {
            "GET /health": lambda body: {},
            "GET /v1/models": lambda body: {"object": "list", "data": [model]},
            "GET /is_paused": lambda body: {"is_paused": engine.paused is not None},
            "GET /weight_info": lambda body: {"weight_version": weights.version},
            "POST /resume": lambda body: engine.resume(),
            "POST /abort_requests": lambda body: {"aborted": engine.abort(body.get("request_ids"))},
            "POST /reset_prefix_cache": lambda body: {"success": not engine.running},  # no prefix outlives its request
            "POST /weight_checker": lambda body: {"checksums": weights.digests()},
            "POST /start_weight_update": engine.start_update,
            "POST /update_weights": lambda body: {"num_tensors": weights.update(body.get("update_info"))},
            "POST /update_weight_version": lambda body: engine.set_version(body.get("new_version")),
            "POST /finish_weight_update": lambda body: engine.set_version(weights.finish(body.get("weight_version"))),
        }


def _route(function: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(http: web.Request) -> web.Response:
        try:
            if not isinstance(body := json.loads(await http.read() or b"{}"), dict):
                raise json.JSONDecodeError("no object", "", 0)
            async with asyncio.timeout(TIMEOUT):
                return web.json_response(await function(http, body) or {})
        except HttpError as error:
            refusal = error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            refusal = HttpError("BadRequestError", f"the body is no JSON object: {error}")
        except TimeoutError:
            refusal = HttpError("Unavailable", f"it took longer than {TIMEOUT} s")
        body = {"message": str(refusal), "type": refusal.kind, "code": refusal.status, "tensor": refusal.tensor}
        return web.json_response({"error": body}, status=refusal.status)

    return handle
