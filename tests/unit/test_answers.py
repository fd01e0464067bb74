"""Answers in arrays: what goes in comes out, and anything else is refused; the client reads both forms alike."""

import asyncio
import contextlib
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from instep.engines.wire import GENERATE
from instep.errors import EngineError
from instep.rollout import runtime
from instep.rollout.client import complete
from instep.system.ports import free_port
from instep_engine.answers import CONTENT_TYPE, decode, encode

CHOICES = [
    {"index": 0, "token_ids": [7, 151_000], "log_probs": [-0.5, -1.25], "finish_reason": "stop", "stop_reason": 0},
    {"index": 1, "token_ids": [], "log_probs": [], "finish_reason": "abort", "stop_reason": None},
    {"index": 2, "token_ids": [1], "log_probs": [-3.0], "finish_reason": "length", "stop_reason": None,
     "weight_versions": [{"version": "4", "start": 0, "end": 1}]},
]  # fmt: skip


def test_what_goes_in_comes_out():
    assert decode(encode(CHOICES)) == {"choices": CHOICES}
    (choice,) = decode(encode([{"token_ids": [1, 2], "log_probs": [-math.inf, -0.1]}]))["choices"]
    assert choice["log_probs"][0] == -9999.0 and abs(choice["log_probs"][1] + 0.1) < 1e-8
    with pytest.raises(ValueError, match="2 tokens with 1 log-probs"):
        encode([{"token_ids": [1, 2], "log_probs": [0.0]}])


@pytest.mark.parametrize("cut", [0, 3, 10, -1, -20])
def test_a_broken_answer_is_refused(cut):
    body = encode(CHOICES)
    with pytest.raises(ValueError, match="answer"):
        decode(body[:cut])
    with pytest.raises(ValueError, match="answer"):
        decode(body + b"x")


async def healthy(_: web.Request) -> web.Response:
    return web.json_response({"data": []})


@contextlib.asynccontextmanager
async def served(answer: Any) -> AsyncIterator[str]:
    """The address of a server whose POST requests `answer` answers."""
    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    app.router.add_get("/{path:.*}", healthy)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_the_client_takes_what_it_gets():
    """An engine that can answers in arrays, unless the client is told not to accept them; one that cannot, in JSON."""
    asked: list[str] = []
    bodies: dict[str, Any] = {"right": encode(CHOICES[2:]), "broken": encode(CHOICES[2:])[:-1]}

    async def answer(request: web.Request) -> web.Response:
        what = request.path.split("/")[1]
        asked.append(request.headers.get("Accept", ""))
        if CONTENT_TYPE not in asked[-1] or what == "never":
            entry = {"token_ids": [1], "logprobs": {"content": [{"logprob": -3.0}]}, "finish_reason": "length"}
            return web.json_response({"choices": [entry]})
        return web.Response(body=bodies[what], content_type=CONTENT_TYPE)

    async def main() -> None:
        async with served(answer) as url:
            for what, arrays, versions in (("right", True, ["4"]), ("right", False, []), ("never", True, [])):
                done = await complete(f"{url}/{what}{GENERATE}", "m", [1], {"max_tokens": 1}, arrays=arrays)
                assert (done.token_ids, done.log_probs, done.finish_reason) == ([1], [-3.0], "length")
                assert [span.version for span in done.weight_versions] == versions
            with pytest.raises(EngineError, match="the answer is not JSON"):
                await complete(f"{url}/broken{GENERATE}", "m", [1], {"max_tokens": 1})

    runtime.run(main(), timeout=30)
    runtime.shutdown()
    assert [CONTENT_TYPE in accepted for accepted in asked] == [True, False, True, True]


@pytest.mark.router
def test_the_router_passes_arrays_on(tmp_path):
    """vllm-router forwards what the client accepts, and the bytes of the answer."""
    accepted: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        accepted.append(request.headers["Accept"])
        return web.Response(body=encode(CHOICES[2:]), content_type=CONTENT_TYPE)

    async def main() -> None:
        async with served(answer) as url:
            port = free_port()
            words = ["--worker-urls", url, "--host", "127.0.0.1", "--port", str(port)]
            words += ["--prometheus-port", str(free_port()), "--policy", "sticky_least_loaded"]
            with (tmp_path / "log").open("wb") as log:
                command = [sys.executable, "-m", "vllm_router.launch_router", *words]
                process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                router = f"http://127.0.0.1:{port}"
                while not await is_ready(router):
                    assert process.poll() is None, (tmp_path / "log").read_text()
                    await asyncio.sleep(0.1)
                done = await complete(router + GENERATE, "m", [1], {"max_tokens": 1}, session="group-0")
                assert (done.token_ids, done.weight_versions[0].version) == ([1], "4")
            finally:
                process.kill()
                process.wait(10)

    runtime.run(main(), timeout=120)
    runtime.shutdown()
    assert [CONTENT_TYPE in value for value in accepted] == [True]


async def is_ready(url: str) -> bool:
    async with aiohttp.ClientSession() as session:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(url + "/health") as answer:
                return answer.status == 200
    return False
