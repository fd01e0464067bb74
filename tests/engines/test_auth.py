"""An engine of any kind, asked by a stranger: only health answers without a key; and a gate before one."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from instep.engines import keys
from instep.engines.engine import Engine as ControlledEngine
from instep.engines.gate import Gate
from instep.errors import ConfigError
from instep.rollout.http import post
from instep.system.ports import free_port
from instep.system.processes import SupervisedProcess
from instep_engine.guard import EVERYONE, GENERATE_VARIABLE, KEY_VARIABLE
from tests.engines.running import Engine
from tests.keys import knowing

CLIENT = "the-key-of-a-client"
CONTROL = (
    "POST /pause POST /resume POST /abort_requests POST /start_weight_update POST /update_weights GET /weight_info "
    "POST /finish_weight_update POST /reset_prefix_cache POST /weight_checker POST /update_weight_version POST /sleep "
    "GET /is_paused POST /wake_up POST /collective_rpc POST /v1/load_lora_adapter POST /start_profile GET /metrics "
    "GET /server_info GET /docs GET /openapi.json"
).split()
GENERATION = (
    "POST /inference/v1/generate POST /generate POST /v1/completions POST /v1/chat/completions GET /v1/models"
).split()


def statuses(engine: Engine, routes: list[str], **headers: str) -> list[int]:
    """Of the answers to requests of which each has a method and a path in `routes`."""
    pairs = zip(routes[::2], routes[1::2], strict=True)
    return [engine.call(path, {}, method=method, headers=headers)[0] for method, path in pairs]


@pytest.mark.parametrize("authorization", ["", "Bearer x", "Basic eDp4"])
def test_nothing_but_health_answers_without_the_key(engine: Engine, authorization: str) -> None:
    assert set(statuses(engine, CONTROL, Authorization=authorization)) == {401}
    assert set(statuses(engine, GENERATION, Authorization=authorization)) == {401}
    assert engine.call("/health", method="GET", headers={"Authorization": authorization})[0] == 200
    assert engine.ok("/is_paused", method="GET") == {"is_paused": False}


def test_a_web_page_is_refused_even_with_the_key(engine: Engine) -> None:
    """A plain text body makes a browser send it without asking; a Host that is foreign is a name bound to loopback."""
    plain = {"Content-Type": "text/plain", "Origin": "https://evil.example"}
    for headers in (plain, {"Origin": "null"}, {"Host": "evil.example"}):
        assert set(statuses(engine, [*CONTROL, *GENERATION, "GET", "/health"], **headers)) == {403}
    assert engine.ok("/is_paused", method="GET", headers={"Origin": "http://localhost:3000"}) == {"is_paused": False}


def test_a_server_without_its_key_is_a_named_error(engine: Engine) -> None:
    stranger = ControlledEngine("engine 0", engine.url)
    keys.know(stranger.url, "")
    with pytest.raises(ConfigError, match="asks for a key, and none was sent") as caught:
        stranger.identify()
    assert "--api-key-file" in caught.value.remedy
    with pytest.raises(ConfigError, match="asks for a key"):
        asyncio.run(post(stranger.url + "/v1/completions", {}))
    keys.know(stranger.url, "another")
    with pytest.raises(ConfigError, match="does not accept the key"):
        stranger.identify()
    knowing(stranger.url)


# ---- a gate


@pytest.fixture(scope="module", params=[CLIENT, EVERYONE], ids=["key", "no key"])
def gate(request: Any, server: ControlledEngine, tmp_path_factory: Any) -> Iterator[tuple[Gate, str]]:
    """A gate before an embedded engine, and the key of its clients."""
    port, log = free_port(), tmp_path_factory.mktemp("gate") / "log.txt"
    command = [
        sys.executable,
        "-m",
        "instep.engines.gate_main",
        "--backend",
        "embedded",
        "--port",
        str(port),
        "--to",
        server.url,
    ]
    env = {KEY_VARIABLE: keys.run_key(), GENERATE_VARIABLE: request.param}
    gate = Gate(f"http://127.0.0.1:{port}", SupervisedProcess("gate", command, log, env))
    gate.wait_ready(30)
    yield gate, request.param
    gate.stop()


def asked(gate: Gate, method: str, path: str, key: str = "", body: str = "{}", **headers: str) -> tuple[int, str]:
    async def ask() -> tuple[int, str]:
        given = {"Authorization": f"Bearer {key}", **headers} if key else headers
        async with aiohttp.ClientSession(headers=given) as http:
            async with http.request(method, gate.url + path, data=body if method == "POST" else None) as answer:
                return answer.status, await answer.text()

    return asyncio.run(ask())


def test_a_gate_has_no_control_routes(gate: tuple[Gate, str]) -> None:
    for key in ("", "x", CLIENT, keys.run_key()):
        for method, path in zip(CONTROL[::2], CONTROL[1::2], strict=True):
            status, text = asked(gate[0], method, path, key)
            assert status == 404 and "/v1/models" in text
    for path in ("/inference/../pause", "/v1/models/../../pause", "//pause", "/%70ause", "/v1/completions/"):
        assert asked(gate[0], "POST", path, CLIENT)[0] == 404, path


def test_a_gate_passes_generation_on(gate: tuple[Gate, str], tiny_model: Path) -> None:
    """With the key of its clients; errors of the engine come back as they are."""
    where, key = gate
    import openai

    client = openai.OpenAI(base_url=f"{where.url}/v1", api_key=key, max_retries=0)
    answer = client.completions.create(model=str(tiny_model), prompt=[5, 6, 7], max_tokens=4)
    assert answer.usage is not None and answer.usage.prompt_tokens == 3
    assert [model.id for model in client.models.list().data] == [str(tiny_model)]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=str(tiny_model), prompt=[5], temperature=-1)
    body = json.dumps({"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "ignore_eos": True}})
    status, text = asked(where, "POST", "/inference/v1/generate", key, body)
    assert status == 200 and len(json.loads(text)["choices"][0]["token_ids"]) == 2
    assert asked(where, "GET", "/health")[0] == 200
    other = "Bearer x" if key == CLIENT else "Bearer -"
    assert asked(where, "GET", "/v1/models", Authorization=other)[0] == (401 if key == CLIENT else 200)
    for headers in ({"Origin": "https://evil.example", "Content-Type": "text/plain"}, {"Host": "evil.example"}):
        assert asked(where, "POST", "/v1/completions", key, **headers)[0] == 403


def test_a_gate_without_an_engine_is_a_503(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "instep.engines.gate_main", "--backend", "embedded", "--port", str(port)]
    command += ["--to", f"http://127.0.0.1:{free_port()}"]
    env = {KEY_VARIABLE: "x", GENERATE_VARIABLE: EVERYONE}
    gate = Gate(f"http://127.0.0.1:{port}", SupervisedProcess("gate", command, tmp_path / "log.txt", env))
    try:
        gate.wait_ready(30)
        status, text = asked(gate, "GET", "/v1/models")
        assert status == 503 and "no engine answers" in text
    finally:
        gate.stop()
