"""Turns on the GPUs: engines that are started anew wait for theirs; a sleeping vLLM refuses."""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from instep.controller.deployment import Deployment
from instep.controller.turns import Turns
from instep.engines.engine import TAGS, Engine, EngineRefusal
from instep.engines.vllm import VllmKind
from instep.errors import EngineError


class Session:
    """Engines that note what they are told; the trainer of a test notes it in the same list."""

    def __init__(self, moves: list[str], num_engines: int = 1):
        self.moves = moves
        self.engines = [SimpleNamespace(sleep=self._sleep, wake=self._wake) for _ in range(num_engines)]

    def _sleep(self, level: int, timeout: float) -> None:
        self.moves.append(f"sleep {level}")

    def _wake(self, tag: str, timeout: float) -> None:
        self.moves.append(f"wake {tag}")

    def each(self, call: Any) -> None:
        for engine in self.engines:
            call(engine)

    def seconds_left(self) -> float:
        return 1.0

    def resume(self) -> None:
        self.moves.append("resume")


def make(moves: list[str], way: str = "shm", **args: Any) -> Turns:
    given = {"offload_train": True, "offload_rollout": True, "weight_sync": way, "engine_start_timeout": 0.3}
    given |= {"sync_timeout": 1.0, **args}
    turns = Turns(SimpleNamespace(**given))  # type: ignore[arg-type]

    def role(name: str) -> Any:
        def move(verb: str, **what: bool) -> Any:
            moves.append(f"{name} {verb} {what}")
            return lambda: moves.append(f"{name} done")

        return SimpleNamespace(offload=lambda **w: move("offload", **w), onload=lambda **w: move("onload", **w))

    turns.roles = [role("actor"), role("critic")]
    return turns


def test_actor_and_critic_move_at_the_same_time_and_nobody_moves_twice() -> None:
    moves: list[str] = []
    turns, session = make(moves), Session(moves)
    turns.to_engines(session)  # type: ignore[arg-type]
    left = "offload {'weights': True}"
    assert moves[:4] == [f"actor {left}", f"critic {left}", "actor done", "critic done"]
    moves.clear()
    turns.to_engines(session)  # type: ignore[arg-type]
    assert [m for m in moves if "wake" not in m] == []
    turns.to_trainer(session)  # type: ignore[arg-type]
    moves.clear()
    with turns.borrowed(session, optimizer=True):  # type: ignore[arg-type]
        assert moves == [], "the trainer is there"
    assert set(turns.take_seconds()) == {f"turns/{n}_seconds" for n in ("sleep", "wake", "offload", "onload")}
    assert turns.take_seconds() == {}


@pytest.mark.parametrize("way, level", [("shm", 2), ("disk", 2), ("nccl", 2), ("lora", 1)])
def test_weights_that_no_sync_brings_survive_the_sleep(way: str, level: int) -> None:
    moves: list[str] = []
    turns, session = make(moves, way), Session(moves)
    turns.to_trainer(session)  # type: ignore[arg-type]
    assert moves == [f"sleep {level}"]
    turns.to_engines(session)  # type: ignore[arg-type]
    moves.clear()
    with turns.borrowed(session, optimizer=False):  # type: ignore[arg-type]
        assert moves[:3] == ["sleep 1", "actor onload {'optimizer': False}", "critic onload {'optimizer': False}"]
    assert moves[-3:] == ["wake weights", "wake kv_cache", "resume"]


def test_without_offload_nobody_moves() -> None:
    moves: list[str] = []
    turns, session = make(moves, offload_train=False, offload_rollout=False), Session(moves)
    for turn in (turns.to_trainer, turns.to_sync, turns.to_engines):
        turn(session)  # type: ignore[arg-type]
    assert moves == [] and not turns.are_taken


def test_a_trainer_that_stays_gives_back_what_its_passes_needed() -> None:
    moves: list[str] = []
    turns, session = make(moves, offload_train=False), Session(moves)
    turns.begin(session.engines)  # type: ignore[arg-type]
    assert moves == ["sleep 1"]
    turns.to_engines(session)  # type: ignore[arg-type]
    turns.to_trainer(session)  # type: ignore[arg-type]
    assert moves[-1] == "sleep 2"
    turns.to_sync(session)  # type: ignore[arg-type]
    left = [m for m in moves if m.startswith("actor")]
    assert left == ["actor offload {'weights': True}", "actor done", "actor offload {'weights': False}", "actor done"]


def test_the_trainer_waits_for_an_engine_that_is_started_anew() -> None:
    deployment, fleet = Deployment.__new__(Deployment), SimpleNamespace(is_starting=True, check=lambda: None)
    deployment.turns, deployment.worker_groups = make([]), []
    deployment._fleet = fleet  # type: ignore[assignment]
    deployment._args = SimpleNamespace(engine_start_timeout=0.3)  # type: ignore[assignment]
    with pytest.raises(EngineError, match="the trainer waits for its GPU"):
        deployment._wait_for_starts()
    threading.Timer(0.1, setattr, (fleet, "is_starting", False)).start()
    deployment._args.engine_start_timeout = 60.0  # type: ignore[misc]
    deployment._wait_for_starts()
    assert not fleet.is_starting


def test_a_sleeping_vllm_refuses_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    middleware = importlib.import_module("instep_engine.vllm.sleep").Middleware
    reached: list[str] = []
    status = [200]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])
        await send({"type": "http.response.start", "status": status[0]})
        await send({"type": "http.response.body", "body": b""})

    serves = middleware(app)

    def ask(path: str, query: str = "", method: str = "POST", answer: int = 200) -> int:
        sent, status[0] = list[Any](), answer

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
        asyncio.run(serves(scope, None, send))
        return int(sent[0]["status"])

    generate = "/inference/v1/generate"
    assert ask(generate) == 200 and ask("/sleep", "level=2") == 200
    for path in (generate, "/v1/completions", "/v1/chat/completions"):
        assert ask(path) == 503
    assert ask("/v1/models", method="GET") == 200 and ask("/health", method="GET") == 200 and ask("/pause") == 200
    assert ask("/wake_up", "tags=weights") == 200 and ask(generate) == 503
    assert ask("/wake_up", "tags=kv_cache") == 200 and ask(generate) == 200
    assert ask("/sleep") == 200 and ask(generate) == 503 and ask("/wake_up") == 200 and ask(generate) == 200
    assert ask("/sleep", method="GET", answer=405) == 405 and ask(generate) == 200
    assert ask("/sleep", "level=x", answer=400) == 400 and ask(generate) == 200, "it was refused"
    assert ask("/sleep", "level=2", answer=500) == 500 and ask(generate) == 503, "who knows what is left"
    assert ask("/wake_up", answer=500) == 500 and ask(generate) == 503, "there was no memory"
    assert ask("/wake_up", method="GET", answer=405) == 405 and ask(generate) == 503
    assert ask("/wake_up", "tags=kv_cache") == 200 and ask(generate) == 503, "the weights are not there"
    assert ask("/wake_up", "tags=weights&tags=kv_cache") == 200 and ask(generate) == 200
    assert reached.count(generate) == 6


class Refuses(BaseHTTPRequestHandler):
    """A vLLM that has no memory, as 0.26 words it."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        what = "sleep" if "/sleep" in self.path else "wake_up"
        message = f"Call to {what} method failed: CUDA Error: out of memory at cumem_allocator.cpp:139"
        text = json.dumps({"error": {"message": message, "type": "InternalServerError", "code": 500}}).encode()
        self.send_response(500)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def test_an_engine_without_memory_names_what_helps() -> None:
    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = Engine("engine 0", f"http://127.0.0.1:{server.server_port}", None, VllmKind("0.26.0"), sleeps=True)
        with pytest.raises(EngineError, match="does not fall asleep: .*\n.*where.*\n.*no other process"):
            engine.sleep(2, timeout=5)
        assert not engine.asleep and engine.has_weights
        engine.asleep = TAGS
        with pytest.raises(EngineError, match="memory of its kv_cache back: .*out of memory") as caught:
            engine.wake("kv_cache", timeout=5)
        assert not isinstance(caught.value, EngineRefusal) and "lower --vllm-gpu-memory-" in caught.value.remedy
        assert engine.asleep == TAGS
        server.shutdown()
