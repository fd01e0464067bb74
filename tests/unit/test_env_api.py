"""`instep env-api`: the routes of the Atropos API, over HTTP, and what it does beyond Atropos' own server."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from instep.cli import main
from instep.system.ports import free_port
from instep_neighbours.atropos.batches import Queued, cut, indices_with_sum
from tests.atropos import REGISTRATION, Client, group, serving


@pytest.fixture
def api() -> Iterator[Client]:
    with serving() as client:
        yield client


def test_before_a_trainer_registers(api: Client) -> None:
    assert api.get("/") == {"message": "AtroposLib API"}
    assert api.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert api.get("/wandb_info") == {"group": None, "project": None}
    assert api.get("/status") == {"current_step": 0, "queue_size": 0}
    answer = api.get("/batch")
    assert api.status == 200 and answer["status"] == "error" and answer["batch"] == []
    body = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 4}
    assert api.post("/register-env", body) == {"status": "wait for trainer to start"}
    api.post("/register", REGISTRATION)
    assert api.post("/register-env", body) == {"status": "wait for trainer to start"}  # until it asks for a batch
    assert api.get("/latest_example")["tokens"] == []


def test_a_trainer_and_an_environment(api: Client) -> None:
    api.register()
    body = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 4}
    for number in range(2):
        assert api.post("/register-env", body) == {
            **{"status": "success", "env_id": number, "wandb_name": f"e_{number}", "checkpoint_dir": "/tmp/c"},
            **{"starting_step": 3, "checkpoint_interval": 5, "num_steps": 10},
        }
    assert api.get("/info") == {"batch_size": 8, "max_token_len": 64}
    assert api.get("/wandb_info") == {"group": "g", "project": "p"}
    assert api.post_gzip("/scored_data", group(4, 0, first=20)) == {"status": "received"}
    answer = api.post("/scored_data_list", [group(4, 1, first=21), group(4, 0, first=22)])
    assert answer == {"status": "received", "groups_processed": 2}
    assert api.get("/status") == {"current_step": 3, "queue_size": 3}
    status = api.get("/status-env", {"env_id": 0})
    assert status == {
        **{"current_step": 3, "queue_size": 3, "unallocated_fraction": 1.0, "self_queue_size": 2},
        **{"max_group_size": 4, "env_weight": 0.5},
    }
    (first, second) = api.get("/batch")["batch"]
    assert first == {**dict.fromkeys(second), **group(4, 0, first=20)} and second["tokens"][0][0] == 21
    assert api.get("/batch") == {"batch": None} and api.get("/status") == {"current_step": 4, "queue_size": 1}
    assert api.get("/latest_example")["tokens"][0][0] == 22
    known = api.get("/environments")["environments"]
    assert [(e["env_id"], e["name"], e["sequences_waiting"]) for e in known] == [(0, "e", 4), (1, "e", 0)]
    assert api.post("/disconnect-env", {"env_id": 1}) == {"status": "success"}
    assert api.post("/disconnect-env", {"env_id": 9})["status"] == "failure"
    assert api.get("/status-env", {"env_id": 0})["env_weight"] == 1.0
    assert api.get("/reset_data") == "Reset successful" and api.get("/info")["batch_size"] == -1


def test_groups_of_other_sizes_wait_until_some_make_the_size(api: Client) -> None:
    api.register()
    env = api.register_env(4)
    assert api.post("/scored_data", group(3, env, first=20)) == {"status": "buffered", "buffer_size": 3}
    answer = api.post("/scored_data_list", [group(2, env, first=21), group(1, env, first=22)])
    assert answer == {"status": "received", "groups_processed": 2, "buffered": 2, "last_buffer_size": 2}
    api.post("/scored_data", group(4, env, first=23))
    assert api.batches() == []  # 3 + 1 of the first environment, and 4, but groups of 3 fill no pack of 4
    assert api.get("/status")["queue_size"] == 3


def test_batches_leave_in_the_order_in_which_they_were_cut(api: Client) -> None:
    api.register()
    env = api.register_env(4)
    for first in range(20, 26):
        api.post("/scored_data", group(4, env, first=first))
    assert api.get("/batch")["batch"][0]["tokens"][0][0] == 20
    assert api.get("/status") == {"current_step": 6, "queue_size": 0}
    assert api.batches() == [[22, 23], [24, 25]]


def test_an_environment_of_an_earlier_server_goes_on(api: Client) -> None:
    """Atropos' environments end when /status-env fails three times, as it does in Atropos after a new start."""
    assert api.get("/status-env", {"env_id": 2})["queue_size"] == 0
    api.register()
    assert api.post("/scored_data", group(4, 2, first=20)) == {"status": "received"}
    assert api.post("/scored_data", group(4, 2, first=21)) == {"status": "received"}
    status = api.get("/status-env", {"env_id": 2})
    assert (status["queue_size"], status["current_step"], status["env_weight"]) == (2, 3, 1.0)
    assert api.batches() == [[20, 21]] and api.register_env() == 3


def test_a_trainer_that_hangs_up_does_not_take_the_batch_with_it(api: Client) -> None:
    with serving(max_bytes=64 << 20) as api:
        api.register()
        big = group(4, None, first=20, messages=[[{"role": "user", "content": "x" * (2 << 20)}]] * 4)
        api.post("/scored_data_list", [big, big])
        host, port = api.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as trainer:
            trainer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            trainer.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert trainer.recv(100).startswith(b"HTTP/1.1 200")
        batches: list[list[int]] = []
        for _ in range(50):
            batches += api.batches()
            if batches:
                break
        assert batches == [[20, 20]]


def test_what_no_trainer_could_take_is_refused(api: Client) -> None:
    faults = {
        "masks": [[-100, 6, 7, 9]],
        "scores": [float("nan")],
        "tokens": [[5]],
        "inference_logprobs": [[1.0, -1.0]],
        "overrides": [3],
    }
    for name, value in faults.items():
        answer = api.post("/scored_data", {**group(1, 0), name: value})
        assert api.status == 422 and name in answer["detail"]
    api.post("/scored_data_list", [group(1), {**group(1), "masks": None}])
    assert api.status == 422 and api.get("/status")["queue_size"] == 0
    for path, body in (("/register", {"batch_size": 3}), ("/register", []), ("/scored_data", b"{")):
        api.post(path, body)
        assert api.status == 422
    for body in ({}, {"env_id": -1}, {"env_id": 10**9}):
        api.get("/status-env", body)
        assert api.status == 422
    assert api.ask("POST", "/scored_data", b"no gzip", **{"Content-Encoding": "gzip"}) == "Invalid gzip payload"
    assert api.status == 400
    api.ask("GET", "/status", None, Origin="http://elsewhere.example")
    assert api.status == 403


def test_memory_has_a_bound() -> None:
    with serving(max_bytes=2000) as api:
        while api.post("/scored_data", group(4)) == {"status": "received"}:
            pass
        assert api.status == 503 and 1 < api.get("/status")["queue_size"] < 20
        api.post("/register", REGISTRATION)
        assert api.batches()
        assert api.post("/scored_data", group(4)) == {"status": "received"}


def test_a_batch_has_its_size_and_loses_no_group() -> None:
    rng = random.Random(0)
    for _ in range(300):
        queue = [Queued(rng.choice([1, 2, 4, 8]), rng.choice([0, 1, None]), b"") for _ in range(rng.randrange(30))]
        shares = rng.choice([{}, {0: 0.5}, {0: 0.25, 1: 0.5}, {0: 0.9, 1: 0.9}])
        chosen = cut(queue, 16, shares)
        if chosen is not None:
            assert len(set(chosen)) == len(chosen) and sum(queue[i].size for i in chosen) == 16
            if sum(shares.values()) <= 1:
                for env, share in shares.items():
                    assert sum(queue[i].size for i in chosen if queue[i].env_id == env) >= int(16 * share)


def test_sums() -> None:
    assert indices_with_sum([1, 2, 3], 3) == [0, 1]
    assert indices_with_sum([3, 4, 2, 2], 4) == [2, 3]  # as in Atropos: the last that do
    assert indices_with_sum([3, 3, 2, 2], 4) == [2, 3]
    assert indices_with_sum([3, 3], 4) == [] and indices_with_sum([], 4) == []


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert main(["env-api", "--port", str(port)]) == 2
    assert main(["env-api", "--prot", "1"]) == 2 and main(["env-api", "--max-queue-gb", "0"]) == 2
    text = capsys.readouterr().err
    assert f"port {port} is taken" in text and "--prot" in text and "--max-queue-gb" in text
