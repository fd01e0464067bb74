"""JSON over HTTP with bounds: `post`, which rollout hooks also use, and `get`; both send the key of the address.

A hook with an HTTP client of its own sends the header `Authorization: Bearer {api_key(url)}`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from instep.data.sampling import note_json, note_request
from instep.engines import sglang_form
from instep.engines.answers import CONTENT_TYPE, decode
from instep.engines.http import REFUSED, message, refusal
from instep.engines.keys import api_key, bearer, headers_for, key_of
from instep.errors import EngineError, NoAnswerError
from instep.rollout import admission, runtime
from instep.rollout.runtime import CONNECT_SECONDS, http_session

__all__ = ["api_key", "get", "headers_for", "post"]

FIRST_PAUSE = 0.2  # seconds before the second attempt; doubled for each further one
LONGEST_PAUSE = 5.0


async def post(
    url: str,
    payload: dict[str, Any],
    *,
    max_retries: int = 4,
    timeout: float = 3600.0,
    headers: dict[str, str] | None = None,
) -> dict[str, Any]:
    """POST `payload` as JSON and return the JSON object of the answer ({} for an empty one).

    A refusal (4xx) is final. After a failed connection or a 5xx there are at most `max_retries` further attempts, with
    growing pauses (by default 3 seconds in all). `timeout` bounds one attempt, in seconds.

    Raises:
        EngineError: with the URL and the answer's own message.
    """
    in_sglangs_form = admission.is_guarded(url) and urlsplit(url).path == sglang_form.PATH
    if in_sglangs_form:
        headers = {sglang_form.HEADER: sglang_form.repeated(payload), **(headers or {})}
    answer = await _ask("POST", url, max_retries, timeout, headers, json=payload)
    if in_sglangs_form:
        params = {sglang_form.VLLM_NAMES.get(k, k): v for k, v in (payload.get("sampling_params") or {}).items()}
        note_request(params, [answer.get("output_ids") or []], payload.get("input_ids"))
    elif admission.is_guarded(url):
        note_json(payload, answer)
    return answer


async def get(url: str, *, max_retries: int = 4, timeout: float = 3600.0) -> dict[str, Any]:
    """GET a JSON object; bounds and errors are those of `post`."""
    return await _ask("GET", url, max_retries, timeout, None)


async def _ask(
    method: str, url: str, max_retries: int, timeout: float, headers: dict[str, str] | None, **body: Any
) -> dict[str, Any]:
    problem = ""
    headers = bearer(key_of(url)) | (headers or {})  # each new connection is checked (runtime.py)
    for attempt in range(max_retries + 1):
        if attempt:
            await asyncio.sleep(min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE))
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=min(CONNECT_SECONDS, timeout))
        runtime.requests_in_flight[url] = runtime.requests_in_flight.get(url, 0) + 1
        try:
            async with (
                http_session() as session,
                session.request(method, url, timeout=limits, headers=headers, **body) as answer,
            ):
                if answer.status < 400:
                    if "Accept" in headers:
                        runtime.answers_by_form["arrays" if answer.content_type == CONTENT_TYPE else "json"] += 1
                    return _parse(url, await answer.read(), answer.content_type)
                text = await answer.text()
                problem = f"{answer.status}: {message(text)}"
                if answer.status in REFUSED:
                    raise refusal(url, answer.status, text)
                if answer.status < 500:
                    remedy = "mend what the message names; --rollout-max-prompt-len leaves out long prompts"
                    raise EngineError(f"the request was refused with {problem}", where=url, remedy=remedy)
        except aiohttp.ClientError as error:
            problem = f"{type(error).__name__}: {error}"
        except TimeoutError:
            raise EngineError(
                f"no answer within {timeout:.0f} s", where=url, remedy="see the server's log; is it overloaded?"
            ) from None
        finally:
            runtime.requests_in_flight[url] -= 1
    raise NoAnswerError(
        f"{max_retries + 1} attempts failed, the last with {problem}",
        where=url,
        remedy="see the server's log; is it still running, and at this address?",
    )


def _parse(url: str, body: bytes, content_type: str) -> dict[str, Any]:
    try:
        if content_type == CONTENT_TYPE:
            return decode(body)
        value = json.loads(body) if body.strip() else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EngineError(
            f"the answer is no JSON object: {body[:200]!r}", where=url, remedy="is this the address of an engine?"
        )
    return value
