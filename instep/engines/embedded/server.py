"""The HTTP server: a process without torch. It parses and formats while the engine's process computes."""

import asyncio
import functools
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from aiohttp import web

from instep.engines.bodies import read_of
from instep.engines.embedded import protocol
from instep.engines.embedded.protocol import HttpError, Request
from instep.engines.embedded.streaming import TIMEOUT, Body, log_probs, stream
from instep.models.routes import encode
from instep.system.calls import Caller
from instep_engine import sglang_form, vllm_form
from instep_engine.guard import Guard
from instep_engine.lease import Lease, NoLease

Handler = Callable[[web.Request, Body], Awaitable[Body | web.StreamResponse]]
_OWN = "model request_id return_token_ids"  # parameters that are not about sampling
_OPENAI = f"{_OWN} stream stream_options {protocol.ADD_SPECIAL}"


class Server:
    """The routes to the engine (`scheduler.Scheduler`) at the other end of `pipe`; `calls` are the calls it accepts."""

    def __init__(
        self, pipe: Connection, names: list[str], calls: set[str], max_model_len: int, vocab_size: int, eos_ids: Any
    ):
        self.engine, self.name, self.names, self.calls, self.eos_ids = Caller(pipe), names[0], names, calls, eos_ids
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.guard = Guard.from_environment()
        self.routes: dict[str, Handler] = {"POST /inference/v1/generate": self.generate, "POST /pause": self.pause}
        self.routes |= {f"POST {sglang_form.PATH}": self.sglang, "POST /lease": self.lease, "POST /resume": self.resume}
        self.routes |= {"POST /v1/completions": self.completions, "POST /v1/chat/completions": self.chat}
        self.routes |= {"GET /v1/models": self.models, "POST /sleep": self.sleep, "POST /wake_up": self.wake_up}
        sessions = "start_weight_update update_weights finish_weight_update".split()
        self.routes |= {f"POST /{step}": self.session for step in sessions}
        self._lease = Lease(self._expired)

    async def handle(self, http: web.Request) -> web.StreamResponse:
        """Answer a request to any route with JSON. Errors have vLLM's form."""
        try:
            address = http.transport.get_extra_info("sockname")[0] if http.transport is not None else ""
            if (refused := self.guard.refusal(http.path, http.headers, address)) is not None:
                raise HttpError("Unauthorized" if refused[0] == 401 else "Forbidden", refused[1])
            body = protocol.read_body(await read_of(http))
            own = self.routes.get(route := f"{http.method} {http.path}")
            if own is None and route not in self.calls:
                raise HttpError("NotFoundError", f"there is no {route}")
            async with asyncio.timeout(TIMEOUT):
                answer = await (own(http, body) if own else self.engine.call(route, body))
                return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer or {})
        except HttpError as error:
            refusal = error
        except NoLease as error:
            refusal = HttpError("SessionError", error.what)
        except TimeoutError:
            refusal = HttpError("Unavailable", f"it took longer than {TIMEOUT} s")
        return web.json_response({"error": refusal.body()}, status=refusal.status)

    async def generate(self, http: web.Request, body: Body) -> Body | web.StreamResponse:
        """Answer token ids with token ids."""
        protocol.check_keys(body, {*_OWN.split(), "token_ids", "sampling_params", "cache_salt", "priority"})
        if body.get("priority") not in (None, 0):
            what = f"priority: {body['priority']!r:.50}, but requests are served as they come"
            raise HttpError("BadRequestError", what)
        given = body.get("sampling_params") or {}  # cache_salt separates prefix caches; none outlives its requests here
        return await self._run("generate-tokens", http, [body.get("token_ids")], body, given, "")

    async def sglang(self, http: web.Request, body: Body) -> Body:
        """Answer text or token ids in SGLang's form, or in that of vLLM's first server."""
        begun, call = time.monotonic(), self.engine.call
        try:
            asked = vllm_form.read(body, http.headers.get(sglang_form.HEADER))
        except ValueError as error:
            raise HttpError("BadRequestError", str(error)) from error
        ids: Any = asked.ids if asked.text is None else await call("encode", asked.text, asked.adds_special_tokens)
        answer = await self._run("generate-tokens", http, [ids], {}, asked.payload(ids)["sampling_params"], "")
        assert isinstance(answer, dict)  # it is not streamed
        decode = functools.partial(call, "decode")
        return await vllm_form.reply_of(asked, ids, answer, time.monotonic() - begun, decode)

    async def completions(self, http: web.Request, body: Body) -> Body | web.StreamResponse:
        prompt = body.get("prompt")
        prompts: Any = prompt if isinstance(prompt, list) and prompt and type(prompt[0]) in (list, str) else [prompt]
        add = protocol.adds_special(body, True)
        prompts = [await self.engine.call("encode", p, add) if isinstance(p, str) else p for p in prompts]
        return await self._run("cmpl", http, prompts, body, {"max_tokens": 16} | body, f"{_OPENAI} prompt")

    async def chat(self, http: web.Request, body: Body) -> Body | web.StreamResponse:
        messages, extra = body.get("messages"), body.get("chat_template_kwargs") or {}
        if not isinstance(messages, list) or not messages:
            raise HttpError("BadRequestError", "messages must be a non-empty list")
        if not isinstance(extra, dict):
            raise HttpError("BadRequestError", "chat_template_kwargs must be an object")
        prompt = await self.engine.call("chat", messages, extra, protocol.adds_special(body, False))
        given = body | {"logprobs": 0 if body.get("logprobs") else None}
        given["max_tokens"] = given.pop("max_completion_tokens", None) or body.get("max_tokens")  # OpenAI's newer name
        return await self._run("chatcmpl", http, [prompt], body, given, f"{_OPENAI} messages chat_template_kwargs")

    async def _run(
        self, kind: str, http: web.Request, prompts: list[Any], body: Body, given: Any, own: str
    ) -> Body | web.StreamResponse:
        """Return the reply of all three routes, n choices per prompt in order; `given` may also have the keys `own`."""
        params = protocol.sampling_params(given, {*own.split()}, self.eos_ids, self.vocab_size)
        streamed, with_usage = protocol.streams(body) if own else (False, False)
        num, seed, limit = params.pop("n", 1), params.pop("seed", None), params.pop("max_tokens", self.max_model_len)
        model = str(body.get("model") or self.name)
        if model not in self.names and ("\0" in model or os.path.realpath(model) != os.path.realpath(self.name)):
            raise HttpError("NotFoundError", f"the model {model!r} does not exist; this engine serves {self.name!r}")
        name = f"{kind}-{http.headers.get('x-request-id') or body.get('request_id') or random.getrandbits(128)}"
        requests: list[Request] = []
        if len(prompts) * num > protocol.MAX_RESPONSES:
            most = protocol.MAX_RESPONSES
            raise HttpError("BadRequestError", f"{len(prompts)} prompts, n={num}: at most {most} responses at a time")
        for prompt in prompts:
            room = self.max_model_len - len(protocol.token_ids(prompt, "token_ids", self.vocab_size))
            if not prompt or room < 1:
                possible = f"1 to {self.max_model_len - 1} are possible"
                raise HttpError("BadRequestError", f"the prompt has {len(prompt)} tokens; {possible}")
            if params.get("routed_experts_prompt_start", 0) > len(prompt):
                raise HttpError("BadRequestError", f"routed_experts_prompt_start: the prompt has {len(prompt)} tokens")
            first = random.getrandbits(62) if seed is None else seed
            fixed = dict(id=name, prompt=prompt, max_tokens=min(room, limit), wants_text=bool(own), stream=streamed)
            fixed |= params
            requests += [Request(seed=(first + i) % 2**63, **fixed) for i in range(num)]

        def usage(done: list[Request]) -> Body:
            read, made = sum(len(p) for p in prompts), sum(len(r.tokens) for r in done)
            return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

        reply: Body = {"id" if own else "request_id": name, "model": self.name}
        if own:  # OpenAI's form
            form = "text_completion" if kind == "cmpl" else "chat.completion.chunk" if streamed else "chat.completion"
            reply |= {"object": form, "created": int(time.time())}
        if streamed:
            answers = self.engine.stream_each("submit", requests, cancel="abort")
            more: dict[str, Any] = {"return_token_ids": bool(body.get("return_token_ids"))}
            return await stream(http, kind, reply, requests, answers, usage=usage if with_usage else None, **more)
        requests = await self.engine.call_each("submit", requests, cancel="abort")
        choices: list[Body] = [{"index": i} | self._choice(kind, r) for i, r in enumerate(requests)]
        reply |= {"choices": choices} | ({"usage": usage(requests)} if own else {})
        for request, choice in zip(requests, choices, strict=True):
            where = choice if kind == "cmpl" else reply
            if (scores := request.prompt_scores) is not None:
                entries = [{str(t): {"logprob": max(p, -9999.0), "rank": r} for t, p, r in place} for place in scores]
                where["prompt_logprobs"] = [None, *entries]  # NaN stays
            if body.get("return_token_ids"):
                choice["token_ids"], where["prompt_token_ids"] = request.tokens, request.prompt
        return reply

    def _choice(self, kind: str, request: Request) -> Body:
        choice: Body = {"finish_reason": request.finish_reason, "stop_reason": request.stop_reason, "logprobs": None}
        if request.logprobs is not None:
            choice["logprobs"] = log_probs(kind, request.tokens, request.log_probs, request.token_texts, request.top)
        if kind == "generate-tokens":
            spans = [dict(zip(("version", "start", "end"), span, strict=True)) for span in request.spans]
            if request.tokens and request.routes:
                choice["routed_experts"] = encode(np.concatenate(request.routes)[request.routed_experts_prompt_start :])
            return choice | {"token_ids": request.tokens, "weight_versions": spans}
        text = {"text": request.text} if kind == "cmpl" else {"message": {"role": "assistant", "content": request.text}}
        return choice | text

    async def models(self, http: web.Request, body: Body) -> Body:
        model = {"id": self.name, "object": "model", "owned_by": "instep", "max_model_len": self.max_model_len}
        return {"object": "list", "data": [model]}

    async def pause(self, http: web.Request, body: Body) -> Body:
        mode, clear = http.query.get("mode", "abort"), http.query.get("clear_cache", "true").lower() == "true"
        if mode not in ("abort", "keep", "wait"):
            raise HttpError("BadRequestError", f"mode={mode!r}: abort, keep or wait")
        await self.engine.call("pause", mode, clear)
        while mode == "wait" and await self.engine.call("num_running"):
            await asyncio.sleep(0.005)
        return {"status": "paused"}

    async def sleep(self, http: web.Request, body: Body) -> Body:
        if (level := http.query.get("level", "1")) not in ("1", "2"):
            raise HttpError("BadRequestError", f"level={level!r}: 1 or 2")
        await self.engine.call("sleep", int(level))
        return {}

    async def wake_up(self, http: web.Request, body: Body) -> Body:
        await self.engine.call("wake", http.query.getall("tags", ["weights", "kv_cache"]))
        return {}

    async def lease(self, http: web.Request, body: Body) -> Body:
        """Begin or renew the lease of a pause (`instep_engine/lease.py`)."""
        self._lease.ask(body)
        return {}

    async def _expired(self, in_place: bool) -> None:
        """Resume. Weights of a session, or written in place, are not served until a session has succeeded."""
        print("embedded engine: no process renews the lease of the pause: it resumes", flush=True)
        await self.engine.call("expire", in_place)

    async def session(self, http: web.Request, body: Body) -> Body:
        """Do a step of a weight session."""
        self._lease.check()
        answer: Body = await self.engine.call(f"POST {http.path}", body)
        if http.path == "/finish_weight_update":
            self._lease.whole()
        return answer

    async def resume(self, http: web.Request, body: Body) -> Body:
        answer: Body = await self.engine.call("POST /resume", body)
        self._lease.end()
        return answer


def serve(sock: socket.socket, pipe: Connection, names: list[str]) -> None:
    """Serve for ever, once the engine has loaded its model."""
    app = web.Application(client_max_size=256 << 20)
    try:
        app.router.add_route("*", "/{route:.*}", Server(pipe, names, **pipe.recv()).handle)
    except EOFError:
        os._exit(1)  # the engine's process has ended, and reported why
    asyncio.run(_serve(app, sock))


async def _serve(app: web.Application, sock: socket.socket) -> None:
    # No client sends compressed requests, except one that wants to fill the memory.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, auto_decompress=False)
    await runner.setup()
    await web.SockSite(runner, sock, backlog=4096).start()
    print("embedded engine: ready at http://{}:{}".format(*sock.getsockname()), flush=True)
    await asyncio.Event().wait()
