"""Streams of OpenAI's routes: server-sent events, one for each token and response."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from instep.engines.embedded.protocol import HttpError, Progress, Request
from instep.system.calls import Part

Body = dict[str, Any]
TIMEOUT = 1800  # seconds, for every request and control call
STREAM_TIMEOUT = TIMEOUT - 5  # so that a stream can report that it ends


def log_probs(
    kind: str, tokens: list[int], scores: list[float], texts: list[str], top: Sequence[list[tuple[int, float]]] = ()
) -> Body:
    """Return a choice's log-probs in OpenAI's form (without text `texts` is empty); `top` has other tokens."""
    scores = [max(-9999.0, p) for p in scores]  # this order also removes NaN, which JSON lacks
    if kind == "cmpl":
        return {"tokens": texts, "token_logprobs": scores}
    content = [_named(token, p) for token, p in zip(tokens, scores, strict=True)]
    for entry, likely in zip(content, top, strict=False):
        entry["top_logprobs"] = [_named(token, max(-9999.0, p)) for token, p in likely]
    for entry, text in zip(content, texts, strict=False):
        entry |= {"token": text, "bytes": list(text.encode()), "top_logprobs": []}
    return {"content": content}


def _named(token: int, log_prob: float) -> Body:
    """Add vLLM's name of a token without text. With it clients check that a log-prob is that of their token."""
    return {"token": f"token_id:{token}", "token_id": token, "logprob": log_prob}


class _Choice:
    """One response. `sent` characters and `num_tokens` tokens have gone to the client."""

    def __init__(self, kind: str, index: int, request: Request, return_token_ids: bool):
        self._kind, self._index, self._prompt = kind, index, request.prompt
        self._with_ids, self._scored = return_token_ids, request.logprobs is not None
        self._held = max((len(s) for s in request.stop), default=1) - 1  # may become the beginning of a stop string
        self._text, self._sent, self._num_tokens = "", 0, 0

    def progress(self, new: Progress) -> Body | None:
        """Return the choice of a chunk; None while there is nothing to send."""
        self._text += new.text
        end = max(self._sent, len(self._text) - self._held)
        text = self._text[self._sent : end]
        if not (text or self._scored or self._with_ids):
            return None
        return self._chunk(text, new.tokens, new.log_probs, new.token_texts)

    def last(self, request: Request) -> Body:
        new = self._num_tokens
        tails = request.tokens[new:], request.log_probs[new:], request.token_texts[new:]
        chunk = self._chunk(request.text[self._sent :], *tails)
        return chunk | {"finish_reason": request.finish_reason, "stop_reason": request.stop_reason}

    def _chunk(self, text: str, tokens: list[int], scores: list[float], texts: list[str]) -> Body:
        choice: Body = {"index": self._index, "finish_reason": None, "logprobs": None}
        if self._scored:
            choice["logprobs"] = log_probs(self._kind, tokens, scores, texts)
        if self._with_ids:
            choice |= {"token_ids": tokens} | ({} if self._num_tokens else {"prompt_token_ids": self._prompt})
        role = {} if self._num_tokens else {"role": "assistant"}
        self._sent, self._num_tokens = self._sent + len(text), self._num_tokens + len(tokens)
        return choice | ({"text": text} if self._kind == "cmpl" else {"delta": role | {"content": text}})


async def stream(
    http: web.Request,
    kind: str,
    head: Body,
    requests: list[Request],
    answers: AsyncGenerator[tuple[int, Any]],
    *,
    return_token_ids: bool,
    usage: Callable[[list[Request]], Body] | None,
) -> web.StreamResponse:
    """Send all answers as chunks that begin with `head`.

    Args:
        usage: makes the usage of a last chunk from the finished requests; None: no such chunk.

    Raises:
        HttpError: it is the first answer. A later one is sent in the stream, and ends it.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    choices = [_Choice(kind, i, request, return_token_ids) for i, request in enumerate(requests)]
    finished: list[Request] = []

    async def send(data: Body | str) -> None:
        if not response.prepared:
            await response.prepare(http)
        text = data if isinstance(data, str) else json.dumps(data)
        await response.write(f"data: {text}\n\n".encode())

    try:
        async with aclosing(answers), asyncio.timeout(STREAM_TIMEOUT):
            async for index, answer in answers:
                if isinstance(answer, Part):
                    choice = choices[index].progress(answer.value)
                else:
                    finished.append(answer.result())
                    choice = choices[index].last(finished[-1])
                if choice is not None:
                    await send(head | {"choices": [choice]})
    except (HttpError, TimeoutError) as error:
        if not response.prepared:
            raise
        failure = error if isinstance(error, HttpError) else HttpError("Unavailable", f"{STREAM_TIMEOUT} s are over")
        await send({"error": failure.body()})
    else:
        if usage is not None:
            await send(head | {"choices": [], "usage": usage(finished)})
    await send("[DONE]")
    await response.write_eof()
    return response
