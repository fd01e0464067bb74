"""An engine and a worker that cost nothing, each a real process, for `controller_share.py`.

    python benchmarks/stand_ins.py engine ANSWERS [RATE]    answers each request at once, or makes RATE tokens a second,
                                                            one request after the other; prints its port
    python -m stand_ins worker                              answers each call at once, with metrics of zeros

ANSWERS is JSON, a list of responses, each a list of token ids. They are taken by seed, and come in arrays to a client
that accepts them, else in vLLM's JSON; `n` of a request makes it n responses.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from instep.cluster.local import WorkerChannel
from instep.system.processes import follow_parent
from instep_engine.answers import CONTENT_TYPE, encode

if TYPE_CHECKING:  # an engine needs no torch
    import torch

    from instep.types import TokenBatch


def log_probs_of(ids: list[int], number: int) -> list[float]:
    """Return log-probs as an engine may have computed them: float32, all different."""
    draws = np.random.default_rng(number).exponential(1.0, len(ids)).astype(np.float32)
    return (-draws).tolist()


class Answers:
    """The bodies of all answers, made when they are first asked for."""

    def __init__(self, responses: list[list[int]], rate: float):
        self._ids, self._rate, self._busy_until = responses, rate, 0.0
        self._log_probs = [log_probs_of(ids, i) for i, ids in enumerate(responses)]
        self.body = functools.cache(self._body)

    def due(self, first: int, n: int, now: float) -> float:
        """When an engine has made the answer that is asked for now."""
        num_tokens = sum(len(self._ids[place]) for place in self._places(first, n))
        self._busy_until = max(now, self._busy_until) + num_tokens / self._rate
        return self._busy_until

    def _places(self, first: int, n: int) -> list[int]:
        return [(first + i) % len(self._ids) for i in range(n)]

    def _body(self, first: int, n: int, arrays: bool) -> bytes:
        places = self._places(first, n)
        if arrays:
            return encode([{"index": i, **self._choice(place)} for i, place in enumerate(places)])
        return json.dumps({"choices": [self._as_vllm(i, self._choice(p)) for i, p in enumerate(places)]}).encode()

    def _choice(self, place: int) -> dict[str, Any]:
        parts = {"token_ids": self._ids[place], "log_probs": self._log_probs[place]}
        return {**parts, "finish_reason": "length", "stop_reason": None}

    def _as_vllm(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        pairs = zip(choice["token_ids"], choice.pop("log_probs"), strict=True)
        content = [{"token": f"token_id:{i}", "logprob": p, "bytes": None, "top_logprobs": []} for i, p in pairs]
        return {"index": index, **choice, "logprobs": {"content": content}}


class Connection(asyncio.Protocol):
    """One connection of a client that waits for each answer before its next request."""

    def __init__(self, answers: Answers):
        self._answers, self._data = answers, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if len(body) < int(fields.get(b"content-length", b"0")):
            return
        self._data = b""
        params = json.loads(body).get("sampling_params", {})
        arrays = CONTENT_TYPE.encode() in fields.get(b"accept", b"")
        asked = params.get("seed", 0) % 64, params.get("n", 1)
        answer, loop = self._answers.body(*asked, arrays), asyncio.get_running_loop()
        kind = CONTENT_TYPE if arrays else "application/json"
        answered = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(answer)}\r\n\r\n"
        loop.call_at(self._answers.due(*asked, loop.time()), self._transport.write, answered.encode() + answer)


async def serve(responses: list[list[int]], rate: float) -> None:
    answers = Answers(responses, rate)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(answers), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def kept_by_sample(batch: TokenBatch) -> tuple[torch.Tensor, ...]:
    """The engine's log-probs, and as many entropies of zero: `[2, response_length]` for each sample."""
    import torch

    log_probs = batch.token_columns["rollout_log_probs"]
    return torch.stack([log_probs, torch.zeros_like(log_probs)]).split(batch.response_lengths.tolist(), dim=1)


def work() -> None:
    """Answer the calls of a round."""
    channel = WorkerChannel()
    while True:
        try:
            method, args = channel.receive()
        except (EOFError, OSError):
            return
        if method == "train":
            batch, _, lrs, kept, *_ = args
            metrics = [{"loss": 0.0, "grad_norm": 1.0, "skipped_steps": 0.0, "lr": lr} for lr in lrs]
            rows = kept_by_sample(batch)
            channel.result((metrics, {i: rows[i] for i in kept}, 0.0))
        elif method == "begin_step":
            channel.result(dict(enumerate(kept_by_sample(args[0]))))
        else:
            channel.result({"trainer_host_bytes": 0.0})


if __name__ == "__main__":
    follow_parent()
    if sys.argv[1] == "engine":
        rate = float(sys.argv[3]) if len(sys.argv) > 3 else math.inf
        asyncio.run(serve(json.loads(Path(sys.argv[2]).read_text()), rate))
    else:
        work()
