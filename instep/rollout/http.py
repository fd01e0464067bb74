"""JSON over HTTP with bounds: `post`, which rollout hooks also use, and `get`; both send the key of the address.

A hook that uses another HTTP client sends the header `Authorization: Bearer {api_key(url)}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from instep.data.sampling import note_json, note_request
from instep.engines.http import REFUSED, message, refusal
from instep.engines.keys import api_key, bearer, headers_for, key_of
from instep.errors import EngineError, NoAnswerError
from instep.rollout import runtime
from instep.rollout.request_gate import gate
from instep.rollout.runtime import CONNECT_SECONDS, http_session
from instep_engine import sglang_form
from instep_engine.answers import CONTENT_TYPE, decode

__all__ = ["api_key", "get", "headers_for", "post", "post_within"]

FIRST_PAUSE = 0.2  # seconds before the second attempt; doubled for each further one
LONGEST_PAUSE = 5.0
SESSION_HEADER = "x-session-id"  # the sticky and hashing policies of vllm-router read it
TOO_MANY = 429  # requests: the server asks the client to wait


async def post(
    url: str,
    payload: dict[str, Any],
    *,
    max_retries: int = 4,
    timeout: float = 3600.0,
    headers: dict[str, str] | None = None,
) -> dict[str, Any]:
    """POST `payload` as JSON and return the JSON object of the answer ({} for an empty one).

    A refusal (4xx, except 429) is final. After a failed connection, a 429 or a 5xx it tries at most `max_retries` more
    times, with growing pauses (by default 3 seconds in all). `timeout` bounds one attempt, in seconds.

    Raises:
        EngineError: with the URL and the answer's own message.
    """
    in_sglangs_form = gate().guards(url) and urlsplit(url).path == sglang_form.PATH
    if in_sglangs_form:
        if "seed" in (payload.get("sampling_params") or {}):  # the name in what hooks get
            params = {"sampling_seed" if k == "seed" else k: v for k, v in payload["sampling_params"].items()}
            payload = {**payload, "sampling_params": params}
        headers = {sglang_form.HEADER: sglang_form.repeated(payload), **(headers or {})}
    answer = _object(url, await post_json(url, payload, max_retries=max_retries, timeout=timeout, headers=headers))
    if in_sglangs_form:
        params = {sglang_form.VLLM_NAMES.get(k, k): v for k, v in (payload.get("sampling_params") or {}).items()}
        note_request(params, [answer.get("output_ids") or []], payload.get("input_ids"))
    elif gate().guards(url):
        note_json(payload, answer)
    return answer


async def post_json(
    url: str, payload: dict[str, Any], *, max_retries: int, timeout: float, headers: dict[str, str] | None
) -> Any:
    """POST as `post` does, and return any JSON value. The request is not noted as one of a generate function."""
    return await _ask("POST", url, max_retries, timeout, headers, json=payload)


async def get(url: str, *, max_retries: int = 4, timeout: float = 3600.0) -> dict[str, Any]:
    """GET a JSON object. Bounds and errors are those of `post`."""
    return _object(url, await _ask("GET", url, max_retries, timeout, None))


async def post_within(url: str, payload: dict[str, Any], seconds: float) -> Any:
    """POST `payload` as JSON and return the answer, any JSON value. Retry as `post` does, for `seconds` in all.

    Raises:
        EngineError: with the URL and the answer's own message.
    """
    return await _ask("POST", url, None, seconds, None, json=payload)


async def _ask(
    method: str, url: str, max_retries: int | None, timeout: float, headers: dict[str, str] | None, **body: Any
) -> Any:
    """Return the answer. `timeout` bounds each of `max_retries` + 1 attempts, or all together if that is None."""
    headers, end, attempt = headers or {}, time.monotonic() + timeout, 0
    of_run = runtime.state()
    if "json" in body and gate().guards(url):
        body["json"] = gate().packed(urlsplit(url).path, body["json"])
    while True:  # each new connection is checked (runtime.py)
        attempt += 1
        seconds = timeout if max_retries is not None else max(1.0, end - time.monotonic())
        limits = aiohttp.ClientTimeout(total=seconds, sock_connect=min(CONNECT_SECONDS, seconds))
        try:
            async with (
                _counted(of_run.requests_in_flight, url),
                http_session() as session,
                session.request(method, url, timeout=limits, headers=bearer(key_of(url)) | headers, **body) as answer,
            ):
                if answer.status < 400:
                    if "Accept" in headers:
                        of_run.answers_by_form["arrays" if answer.content_type == CONTENT_TYPE else "json"] += 1
                    return _parse(url, await answer.read(), answer.content_type)
                text = await answer.text()
                problem = f"{answer.status}: {message(text)}"
                if answer.status in REFUSED:
                    raise refusal(url, answer.status, text)
                if answer.status < 500 and answer.status != TOO_MANY:
                    remedy = "correct what the message names; --rollout-max-prompt-len skips long prompts"
                    raise EngineError(f"the request was refused with {problem}", where=url, remedy=remedy)
        except (aiohttp.ClientError, ConnectionError) as error:
            problem = f"{type(error).__name__}: {error}"
        except TimeoutError:
            what = f"no answer within {seconds:.0f} s"
            raise EngineError(what, where=url, remedy="see the server's log; is it overloaded?") from None
        pause = min(FIRST_PAUSE * 2 ** min(attempt - 1, 9), LONGEST_PAUSE)
        if max_retries is None:
            left = end - time.monotonic()
            pause = min(pause, left - FIRST_PAUSE / 2)
        if left < FIRST_PAUSE if max_retries is None else attempt > max_retries:
            within = f" in {timeout:g} s" if max_retries is None else ""
            remedy = "see the server's log; is it still running, and at this address?"
            raise NoAnswerError(f"{attempt} attempts{within} failed, the last with {problem}", where=url, remedy=remedy)
        await asyncio.sleep(pause)


@contextlib.asynccontextmanager
async def _counted(counts: Counter[str], url: str) -> AsyncIterator[None]:
    counts[url] += 1
    try:
        yield
    finally:
        counts[url] -= 1


def _parse(url: str, body: bytes, content_type: str) -> Any:
    try:
        if content_type == CONTENT_TYPE:
            return decode(body)
        return json.loads(body) if body.strip() else {}
    except ValueError:
        what = f"the answer is not JSON: {body[:200]!r}"
        raise EngineError(what, where=url, remedy="is this the right address?") from None


def _object(url: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        what = f"the answer is not a JSON object: {json.dumps(value)[:200]}"
        raise EngineError(what, where=url, remedy="is this the right address?")
    return value
