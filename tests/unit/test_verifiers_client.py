"""The protocol of env servers, against a small server of ZeroMQ, and the flags of environments."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from instep.arguments.parse import parse
from instep.errors import ConfigError, RolloutError
from instep_neighbours.verifiers.client import Client, ServerLostError
from tests.bounds import allowed

msgpack, zmq = pytest.importorskip("msgpack"), pytest.importorskip("zmq")
asyncio_zmq = pytest.importorskip("zmq.asyncio")

Frames = list[bytes]
Scenario = Callable[[Client, Any], Awaitable[None]]
END = {"success": True, "error": None, "head": {"ok": True}, "traces": []}


class Server:
    """A ROUTER that keeps what it was asked, and answers with what `answers` makes of a request."""

    def __init__(self, path: Path, answers: Callable[[bytes, Any], list[tuple[bytes, Any]]]):
        self.address, self.asked, self._answers = f"ipc://{path}", list[tuple[bytes, Any]](), answers
        self.socket = asyncio_zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.bind(self.address)
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            client, name, method, payload = await self.socket.recv_multipart()
            self.asked.append((method, {**msgpack.unpackb(payload), "name": name.decode()}))
            if method == b"cancel":  # the episode that is cancelled ends
                over = {"success": False, "error": "Cancelled: rollout aborted"}
                await self.socket.send_multipart(
                    [client, self.asked[0][1]["name"].encode(), b"reply", msgpack.packb(over)]
                )
            for kind, data in self._answers(method, msgpack.unpackb(payload)):
                await self.socket.send_multipart([client, name, *([kind] if kind else []), msgpack.packb(data)])

    def close(self) -> None:
        self._task.cancel()
        self.socket.close(linger=0)


def play(tmp_path: Path, answers: Callable[[bytes, Any], list[tuple[bytes, Any]]], scenario: Scenario) -> None:
    async def main() -> None:
        server = Server(tmp_path / "s", answers)
        client = Client(server.address)
        try:
            await scenario(client, server)
        finally:
            await client.close()
            server.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_an_episode_comes_in_deltas_and_a_reply(tmp_path: Path) -> None:
    node = {"parent": None, "token_ids": [1], "mask": [False], "logprobs": []}

    def answers(method: bytes, payload: Any) -> list[tuple[bytes, Any]]:
        if method == b"health":
            return [(b"reply", {"success": True, "error": None})]
        delta = {"trace": "t", "open": {"id": "t"}, "nodes": [node]}
        return [(b"delta", delta), (b"reply", {**END, "traces": [{"id": "t", "nodes": 1, "calls": 0}]})]

    async def scenario(client: Client, server: Server) -> None:
        assert await client.health(5.0)
        several = await asyncio.gather(*(client.run({"task_data": {"idx": i}}) for i in range(3)))
        assert [e["traces"][0]["nodes"][0]["token_ids"] for e in several] == [[1]] * 3
        assert [method for method, _ in server.asked] == [b"health", b"run", b"run", b"run"]
        assert client.num_running == 0

    play(tmp_path, answers, scenario)


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        (b"reply", {"success": False, "error": "ValidationError: idx"}, "refused an episode: ValidationError: idx"),
        (b"reply", {**END, "traces": [{"id": "t", "nodes": 1, "calls": 0}]}, "trace t came with 0 nodes"),
        (b"reply", [1, 2], "in another format"),
        (b"delta", {"no": "trace"}, "in another format"),
        (b"", END, "2 frames; before 0.4"),
    ],
)
def test_answers_that_are_wrong_are_named(kind: bytes, data: Any, said: str, tmp_path: Path) -> None:
    async def scenario(client: Client, server: Server) -> None:
        with pytest.raises(RolloutError) as caught:
            await client.run({})
        assert said in str(caught.value)

    play(tmp_path, lambda method, payload: [(kind, data)], scenario)


def test_a_cancelled_episode_is_cancelled_at_the_server(tmp_path: Path) -> None:
    async def scenario(client: Client, server: Server) -> None:
        task = asyncio.create_task(client.run({}))
        while not server.asked:
            await asyncio.sleep(0.01)
        name = server.asked[0][1]["name"]
        task.cancel()
        while len(server.asked) < 2:
            await asyncio.sleep(0.01)
        assert server.asked[1][0] == b"cancel" and server.asked[1][1]["request_id"] == name
        with pytest.raises(asyncio.CancelledError):
            await task

    began = time.monotonic()
    play(tmp_path, lambda method, payload: [], scenario)
    assert time.monotonic() - began < allowed(2)


def test_a_server_that_ends_takes_its_episodes_with_it(tmp_path: Path) -> None:
    async def scenario(client: Client, server: Server) -> None:
        tasks = [asyncio.create_task(client.run({})) for _ in range(2)]
        while len(server.asked) < 2:
            await asyncio.sleep(0.01)
        server.close()
        began = time.monotonic()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, ServerLostError)
        assert time.monotonic() - began < allowed(2)

    play(tmp_path, lambda method, payload: [], scenario)


def test_nobody_at_the_address_is_no_health(tmp_path: Path) -> None:
    async def main() -> bool:
        client = Client(f"ipc://{tmp_path}/nobody")
        try:
            return await client.health(0.2)
        finally:
            await client.close()

    assert not asyncio.run(main())


# ---- flags -----------------------------------------------------------------------------------------------------------

BASE = "--hf-checkpoint x --rollout-batch-size 2 --num-rollout 1 --run-dir y --device cpu"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--env-args {}", "acts only with --env"),
        (
            "--prompt-data a.jsonl --rollout-function-path instep_neighbours.verifiers.generate_rollout",
            "give --env NAME",
        ),
        ("--env e --rm-type math", "the rewards are the environment's"),
        ("--env e --prompt-data a.jsonl", "the data are the environment's"),
        ("--env e --custom-generate-function-path os.path.join", "the turns are the environment's"),
        ("--env e --rollout-function-path os.path.join", "its own rollout function"),
        ("--env e --partial-rollout", "cannot be continued"),
        ("--env e --rollout-max-context-len 9", "max_total_tokens"),
        ("--env e --rollout-stop-token-ids 3", "the renderer names the tokens"),
        ("--env e --env-address localhost:5000", "not an address of ZeroMQ"),
        ("--env e --env-address tcp://h:1 --env-num-servers 2", "one is running already"),
        ("--env e --env-args [1]", "not an object"),
        ("--env e --eval-interval 1", "--env-eval-args"),
    ],
)
def test_what_does_not_go_with_an_environment(more: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"{BASE} {more}".split())
    assert said in str(caught.value)
