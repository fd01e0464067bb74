"""The Atropos API for tests: instep's own server in a thread, and requests as Atropos' clients make them."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from instep.system.ports import free_port
from instep_neighbours.atropos.env_api import EnvApi

REGISTRATION: dict[str, Any] = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 8,
    "max_token_len": 64,
    "checkpoint_dir": "/tmp/c",
    "save_checkpoint_interval": 5,
    "starting_step": 3,
    "num_steps": 10,
}


def group(size: int, env_id: int | None = None, first: int = 5, **more: Any) -> dict[str, Any]:
    """A group of `size` sequences of two prompt tokens and two trained ones; `first` tells groups apart."""
    tokens = [[first, 6, 7 + i, 8] for i in range(size)]
    out = {
        "tokens": tokens,
        "masks": [[-100, -100, *ids[2:]] for ids in tokens],
        "scores": [float(i) for i in range(size)],
    }
    return {**out, "inference_logprobs": [[1.0, 1.0, -0.5, -0.25]] * size, "env_id": env_id, **more}


class Client:
    """What environments and trainers ask, as JSON; the status of the last answer is `status`."""

    def __init__(self, url: str):
        self.url, self.status = url, 0

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        request.method = method
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                text, self.status = answer.read(), answer.status
        except urllib.error.HTTPError as error:
            text, self.status = error.read(), error.code
        try:
            return json.loads(text)
        except ValueError:
            return text.decode()

    def get(self, path: str, body: Any = None) -> Any:
        return self.ask("GET", path, body)

    def post(self, path: str, body: Any) -> Any:
        return self.ask("POST", path, body)

    def post_gzip(self, path: str, body: Any) -> Any:
        return self.ask("POST", path, gzip.compress(json.dumps(body).encode()), **{"Content-Encoding": "gzip"})

    def register(self, **more: Any) -> None:
        """Register a trainer, and let it begin."""
        assert set(self.post("/register", {**REGISTRATION, **more})) == {"uuid"}
        assert self.get("/batch") == {"batch": None}

    def register_env(self, group_size: int = 4, **more: Any) -> int:
        body = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": group_size, **more}
        answer = self.post("/register-env", {"min_batch_allocation": None, **body})
        assert answer["status"] == "success"
        return int(answer["env_id"])

    def batches(self) -> list[list[int]]:
        """All batches that there are, each as the first tokens of its groups."""
        out = []
        while (batch := self.get("/batch")["batch"]) is not None:
            out.append([g["tokens"][0][0] for g in batch])
        return out


@contextmanager
def serving(port: int | None = None, *, max_bytes: int = 1 << 20) -> Iterator[Client]:
    """instep's API in a thread of this process."""
    port, loop = port or free_port(), asyncio.new_event_loop()
    runner = web.AppRunner(EnvApi(max_bytes).app(), auto_decompress=False, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield Client(f"http://127.0.0.1:{port}")
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
