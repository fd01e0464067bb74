"""Answers in arrays: `--middleware instep_engine.vllm.fast.api.Middleware` (`answers.py` has their form).

vLLM's own route makes a `Logprob`, two models and some JSON for each token, which keeps its server busy. A client that
accepts arrays gets them here, by the same route and the same JSON. `TAKEN` lists the parameters that this supports. A
request with others, or one that vLLM would refuse, goes to vLLM's own route, which answers in JSON.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

from vllm.logger import init_logger

from instep_engine import answers
from instep_engine.asgi import GENERATE, App, Message, Receive, Send, body_of, reply, with_body
from instep_engine.vllm.fast import KEY, RANGE, VERSIONS, minor_version, versions

logger = init_logger("vllm.instep")
TAKEN = frozenset(
    "n max_tokens min_tokens temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed "
    "stop_token_ids ignore_eos allowed_token_ids logprobs detokenize output_kind skip_special_tokens "
    "spaces_between_special_tokens routed_experts_prompt_start".split()
)
RANK = b"x-data-parallel-rank"  # the number of the replica that must answer


class Middleware:
    """An ASGI middleware that answers generation requests in arrays."""

    def __init__(self, app: App):
        self.app, self._is_on = app, minor_version() in VERSIONS
        if self._is_on:
            logger.info("instep: answers in arrays for clients that accept %s", answers.CONTENT_TYPE)
        else:
            logger.info("instep: no answers in arrays, because this version of vLLM is not tested (%s)", RANGE)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        ours = self._is_on and scope["type"] == "http" and scope["path"] == GENERATE and scope["method"] == "POST"
        if not ours or not _accepted(scope):
            await self.app(scope, receive, send)
            return
        if (body := await body_of(receive)) is None:  # the client has gone
            return
        taken = _take(scope, body)
        answer = await _unless_left(_answer(scope, *taken), receive) if taken is not None else None
        if answer is not None:
            await reply(send, 200, answer, answers.CONTENT_TYPE)
            return
        await self.app(*with_body(body, scope, receive), send)


def _accepted(scope: Message) -> bool:
    return any(name == b"accept" and answers.CONTENT_TYPE.encode() in value for name, value in scope["headers"])


def _take(scope: Message, body: bytes) -> tuple[list[int], Any] | None:
    """Return the prompt and the sampling parameters of a request; None for one that is not for here."""
    import msgspec
    from vllm import SamplingParams, envs

    state = scope["app"].state
    try:
        payload = json.loads(body)
        given = {name: value for name, value in payload["sampling_params"].items() if value is not None}
        model, prompt = payload.get("model"), payload["token_ids"]
        if (
            not set(payload) <= {"model", "token_ids", "sampling_params", "stream"}
            or payload.get("stream")  # vllm-router adds "stream": false
            or not given.keys() <= TAKEN
            or given.get("logprobs") != 0
            or given.get("detokenize", True)
            or "max_tokens" not in given
            or (model and not state.openai_serving_models.is_base_model(model))
            or not isinstance(prompt, list)
            or not all(type(token) is int for token in prompt)
        ):
            return None
        n = given.pop("n", 1)
        if type(n) is not int or not 1 <= n <= envs.VLLM_MAX_N_SEQUENCES:
            return None
        # Flat lists instead of an object for each token; one message with the whole response; no deep copies.
        given |= {"output_kind": 2, "flat_logprobs": True, "extra_args": {KEY: 1}, "skip_clone": True}
        params = msgspec.convert(given, SamplingParams)
        params.n = n  # here, because vLLM refuses several greedy samples
        return prompt, params
    except (ValueError, KeyError, TypeError, AttributeError, msgspec.ValidationError):
        return None  # vLLM reports what is wrong


async def _answer(scope: Message, prompt: list[int], params: Any) -> bytes | None:
    """Return the body of the answer; None if vLLM refuses the request or its core has died (its route reports it).

    vLLM checks the request once, and makes of it a request for each sample, with `seed + i`. It aborts them if this is
    cancelled.
    """
    from vllm.inputs import tokens_input
    from vllm.v1.engine.exceptions import EngineDeadError

    rank = next((int(value) for name, value in scope["headers"] if name == RANK and value.isdigit()), None)
    engine, name = scope["app"].state.engine_client, f"instep-{uuid.uuid4().hex}"
    try:
        async for final in engine.generate(tokens_input(prompt), params, name, data_parallel_rank=rank):
            results = final.outputs
    except (ValueError, TypeError, EngineDeadError):
        return None
    return answers.encode([_choice(result, name) for result in results])


def _choice(result: Any, name: str) -> dict[str, Any]:
    """Return one response, as a choice of `answers.py`."""
    if result.finish_reason == "error":
        raise RuntimeError(f"vLLM has ended request {name} with an error")
    flat = result.logprobs  # it may also hold those of other tokens, for other requests
    log_probs = [flat.logprobs[start] for start in flat.start_indices]
    choice = {"index": result.index, "token_ids": result.token_ids, "log_probs": log_probs}
    told = getattr(result, "weight_versions", None)  # from 0.32 on
    if told:
        choice["weight_versions"] = [{"version": s.version, "start": s.start, "end": s.end} for s in told]
    elif spans := versions.spans([flat.ranks[start] for start in flat.start_indices]):
        choice["weight_versions"] = spans
    if result.routed_experts is not None:  # of an engine with --enable-return-routed-experts
        choice["routed_experts"] = result.routed_experts
    return {**choice, "finish_reason": result.finish_reason, "stop_reason": result.stop_reason}


async def _unless_left(work: Any, receive: Receive) -> bytes | None:
    """Return the result of `work`; cancel it when the client leaves."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    answer, gone = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return b""  # no client reads it
        body: bytes | None = answer.result()
        return body
    finally:
        for task in (answer, gone):
            task.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)
