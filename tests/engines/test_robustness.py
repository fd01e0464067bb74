"""A request that is wrong, or hangs, harms no other: of the embedded engine."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from instep.engines.embedded.protocol import HttpError, Request
from instep.engines.engine import Engine as ControlledEngine
from instep.system.calls import Caller
from instep.system.ports import free_port
from instep.system.processes import SupervisedProcess
from tests import keys
from tests.assets import make_checkpoint
from tests.engines.running import Engine

HELLO = [{"role": "user", "content": "1"}]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
OTHER: dict[str, Any] = {"max_tokens": 80, "temperature": 1, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, Any]:
    """A response while nothing else is under way."""
    if engine.kind != "embedded":
        pytest.skip("of the embedded engine")
    return engine.generate([5, 6, 7], **OTHER)


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("/v1/completions", {"prompt": "1", "stop": "\ud800"}, "surrogate"),
        ("/v1/completions", b'{"prompt": "1", "stop": "\xed\xa0\x80"}', "utf-8"),
        ("/v1/completions", b'{"prompt": "\xff"}', "utf-8"),
        ("/v1/completions", b'{"prompt": ' + b"[" * 100_000, "recursion"),
        ("/start_weight_update", b'{"version": ' + b"[" * 500 + b"]" * 500 + b"}", "nested more than 64 deep"),
        ("/v1/completions", b'{"seed": ' + b"1" * 5000 + b"}", "4300 digits"),
        ("/v1/completions", {"prompt": "1", "model": "a\0b"}, "does not exist"),
        ("/v1/completions", {"prompt": "1" * 10**6}, "the prompt has 1000000 characters"),
        ("/v1/completions", {"prompt": [[5]] * 20_000}, "at most 16384 responses"),
        ("/v1/completions", {"prompt": "1", "stop": ["x"] * 65}, "at most 64 strings"),
        ("/v1/chat/completions", {"messages": HELLO, "chat_template": LOOPS}, "chat_template"),
        ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"chat_template": LOOPS}}, "chat_templ"),
        ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"max_length": 10**12}}, "max_length"),
        ("/v1/chat/completions", {"messages": [HELLO, HELLO]}, "message 0 must be an object"),
        ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": 1}, "an object"),
        ("/abort_requests", {"request_ids": 5}, "list of strings"),
    ],
    ids=lambda value: f"{value:.40}" if isinstance(value, str) else "",
)
def test_a_bad_request_fails_alone(engine: Engine, alone: Any, route: str, body: Any, words: str) -> None:
    """While another one is under way, which ends as ever."""
    other = engine.submit([5, 6, 7], **OTHER)
    status, reply = engine.call(route, body, timeout=20)
    assert status in (400, 404) and words in reply["error"]["message"], reply
    assert other.result(60) == alone


def test_a_step_that_fails_fails_its_requests_only(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        command = [
            sys.executable,
            "-m",
            "tests.engines.faulty_runner",
            str(make_checkpoint(tmp_path)),
            str(theirs.fileno()),
        ]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def request(first: int) -> Request:
        none: Any = frozenset()
        fixed: dict[str, Any] = dict(stop=[], stop_ids=none, eos_ids=none, skip_special_tokens=True, wants_text=False)
        return Request(id="", prompt=[first, 5], seed=1, max_tokens=40, **fixed)

    async def scenario() -> list[Any]:
        caller = Caller(ours)
        asked = [asyncio.create_task(caller.call_each("submit", [request(n)], cancel="abort")) for n in (5, 7, 6)]
        first = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 300)
        return [*first, await asyncio.wait_for(caller.call_each("submit", [request(5)], cancel="abort"), 300)]

    try:
        good, bad, _, again = asyncio.run(scenario())
    finally:
        process.kill()
        process.wait(5)
    assert isinstance(bad, HttpError) and (bad.status, str(bad)) == (
        500,
        "the engine failed: RuntimeError: not enough memory",
    )
    assert len(again[0].tokens) == 40
    if not isinstance(good, HttpError):  # it was prefilled in the same step as the other, or before
        assert good[0].tokens == again[0].tokens


def test_the_heartbeat_follows_the_thread_that_works(tmp_path: Path) -> None:
    """A template of the model's own that never ends: the engine is silent, although its other threads run."""
    path = make_checkpoint(tmp_path / "hf")
    for file in path.glob("*chat_template*"):
        file.write_text(f"{{% if messages[0].content == 'hang' %}}{LOOPS}{{% endif %}}1")
    command = [
        sys.executable,
        "-m",
        "instep.engines.embedded",
        "--model",
        str(path),
        "--port",
        str(port := free_port()),
    ]
    process = SupervisedProcess("engine", command, tmp_path / "log", keys.ENVIRONMENT, heartbeat=3.0)
    engine = ControlledEngine("engine", keys.knowing(f"http://127.0.0.1:{port}"), process)
    try:
        engine.wait_ready(120)
        began = time.monotonic()
        while time.monotonic() - began < 4:  # idle for longer than the bound
            assert process.fault() is None
            time.sleep(0.2)
        body = {"messages": [{"role": "user", "content": "hang"}]}
        engine.watch = lambda: None
        with pytest.raises(Exception, match="/v1/chat/completions"):
            engine.post("/v1/chat/completions", body, timeout=0.5)
        deadline = time.monotonic() + 30
        while (fault := process.fault()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert fault.startswith("has not answered for "), fault
    finally:
        process.stop(0.5)
