"""The port of `instep vllm-serve` by itself."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest

from instep.arguments.parse import parse
from instep.engines import bodies
from instep.system.ports import free_port
from instep_neighbours.trl import front
from instep_neighbours.trl.clients import Access
from instep_neighbours.trl.delivery import _Unproven
from instep_neighbours.trl.front import Front
from instep_neighbours.trl.serve import _layout
from instep_neighbours.trl.staging import Layout
from instep_neighbours.trl.updates import Updates
from tests.assets import make_checkpoint
from tests.e2e.trl_sender import Http, Refusal


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    root = tmp_path_factory.mktemp("front")
    words = ["--hf-checkpoint", str(make_checkpoint(root / "hf")), "--run-dir", str(root / "run"), "--device", "cpu"]
    return parse(words, "serve").replace(sync_timeout=60.0, rollout_backend="embedded")


@pytest.fixture
def port(args, tmp_path):
    """Starts a port without engines, for a layout: returns its URL and its `Updates`, which let nobody join."""
    running = []

    def start(layout):
        own = args.replace(port=free_port())
        fleet = SimpleNamespace(waiting=list, available=list)
        updates = Updates(own, fleet, layout, tmp_path, tmp_path, "127.0.0.1", print)
        updates._begin = lambda *_: None
        server = Front(own, "http://127.0.0.1:1", "m", Access(""), "127.0.0.1", updates, lambda: True)
        running.append((server, updates))
        server.start()
        return f"http://127.0.0.1:{own.port}", updates

    yield start
    for server, updates in running:
        server.close()
        updates.close()


def test_a_port_that_never_listens_is_not_waited_for(args, monkeypatch, tmp_path):
    """A host's name that no server of names answers, say."""
    updates = Updates(args, None, Layout(), tmp_path, tmp_path, "127.0.0.1", print)
    server = Front(args, "http://127.0.0.1:1", "m", "", "127.0.0.1", updates, lambda: True)
    monkeypatch.setattr(front, "START_SECONDS", 0.05)
    monkeypatch.setattr(server, "_serve", lambda: asyncio.sleep(0.3))
    with pytest.raises(OSError, match="does not listen after"):
        server.start()
    server.close()


def test_a_trainer_hears_before_it_inits_a_group_that_another_one_has_it(port, args):
    url, updates = port(_layout(args))
    first, second = Http(url), Http(url)
    info = second("/server_info?config_format=json", method="GET")["vllm_config"]
    assert info["weight_transfer_config"] == {"backend": "nccl"} and info["lora_config"] is None
    assert info["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert second("/get_world_size", method="GET") == {"world_size": 1}
    first("/init_communicator/", {"port": 1, "world_size": 2})
    for path in ("/server_info?config_format=json", "/get_world_size"):
        with pytest.raises(Refusal) as raised:
            second(path, method="GET")
        told, reason = str(raised.value), raised.value.reason  # requests' raise_for_status shows the latter
        assert raised.value.status == 409 and "has the weight group since" in told and "one trainer at a time" in reason
        assert first.status(path, method="GET") == 200
    assert second("/get_world_size/", method="GET") == {"world_size": 1}  # TRL <= 1.10 hears it when it inits
    first.close()
    assert second.status("/server_info", method="GET") == 200 and updates._client is None


def test_a_server_that_takes_no_weights_says_so_before_a_group_is_joined(port):
    http = Http(port(Layout("they are quantized"))[0])
    assert http("/server_info", method="GET")["vllm_config"]["weight_transfer_config"] is None
    with pytest.raises(Refusal, match="they are quantized"):
        http("/get_world_size", method="GET")


def test_a_pause_ends_when_the_trainer_has_gone_that_had_the_group(port, args):
    url, updates = port(_layout(args))
    trainer, other = Http(url), Http(url)
    trainer("/init_communicator/", {"port": 1, "world_size": 2})
    trainer("/pause?mode=keep")
    assert other("/is_paused", method="GET") == {"is_paused": True}
    trainer.close()
    asyncio.run(asyncio.wait_for(_until(lambda: not updates.delivery.paused), 30))
    other("/pause?mode=keep")  # by nobody who had the group: it lasts
    asyncio.run(asyncio.sleep(1.0))
    assert other("/is_paused", method="GET") == {"is_paused": True}


def test_a_pause_of_somebody_without_the_group_has_an_end(port, args):
    """However often it is asked for again."""
    url, updates = port(_layout(args))
    http = Http(url)
    updates._args = args.replace(sync_timeout=2.0)
    http("/pause?mode=keep")
    began = updates._paused
    http("/pause?mode=keep")
    assert updates._paused == began
    asyncio.run(asyncio.wait_for(_until(lambda: not updates.delivery.paused), 60))
    http.close()


def test_what_is_half_sent_is_closed(port, args, monkeypatch):
    monkeypatch.setattr(bodies, "REST_SECONDS", 0.5)
    url, _ = port(_layout(args))
    host, port_ = url.removeprefix("http://").split(":")
    for text in (b"POST /pause HTTP/1.1\r\nHost: localhost\r\n", b"POST /pause HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"):
        with socket.create_connection((host, int(port_)), timeout=300) as half:
            half.sendall(text)
            while half.recv(1000):
                pass
    with socket.create_connection((host, int(port_)), timeout=300) as idle:  # of a client that lives
        idle.sendall(b"GET /is_paused HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in idle.recv(1000)
        idle.settimeout(2.0)
        with pytest.raises(TimeoutError):
            idle.recv(1000)


async def _until(there):
    while not there():
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("before", ["the weights before", None])
def test_weights_that_came_in_a_pause_are_proven_when_it_ends(port, args, monkeypatch, capfd, before):
    """What fails then is taken back, under a version of its own; without weights to go back to nothing is generated."""
    url, updates = port(_layout(args))
    delivery, http, brought = updates.delivery, Http(url), []
    engine = SimpleNamespace(url="e", name="engine", num_replicas=1, capabilities=SimpleNamespace(digests=False))
    session = SimpleNamespace(engines=[engine], renew=lambda: None, resume=lambda: brought.append("resumed"))
    going_back = SimpleNamespace(transfer=lambda way: brought.append(before))
    monkeypatch.setattr(delivery, "_session", lambda *given: going_back)
    scores = [-1.0] * delivery._proof.probe.num_scores
    monkeypatch.setattr(delivery, "_probe", lambda session: {"e": scores})
    http("/pause?mode=keep")
    delivery.version, delivery._current, delivery._scores = 4, "new", {"e": scores}
    delivery._unproven = _Unproven(session, True, before)
    with pytest.raises(Refusal, match="still scores as with the weights before") as raised:
        http("/resume")
    assert raised.value.status == 503 and "still scores" in capfd.readouterr().out
    assert brought == ["resumed", before][: 2 if before else 1] and (delivery.version, delivery._current) == (5, before)
    assert bool(delivery.broken) == (before is None) and not delivery.paused and updates._paused is None
    http("/resume")  # nothing is left to prove
