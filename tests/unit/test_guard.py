"""Who may ask a server for what: keys, foreign pages and names; and that nobody but the owner can read a key."""

import asyncio
import json
import os
import re
import stat
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from multidict import CIMultiDict

from instep.arguments.engine import api_keys
from instep.arguments.parse import parse
from instep.engines import keys
from instep.errors import ConfigError
from instep.rollout.http import api_key, headers_for
from instep.system.run_context import RunContext
from instep_engine import guard
from instep_engine.guard import EVERYONE, GENERATION_ROUTES, Guard
from instep_engine.vllm.auth import Middleware

SECURITY = Path(__file__).parents[2] / "docs/security.md"
RUN, CLIENT = "the-key-of-the-run", "the-key-of-a-client"
CONTROL = "/pause /resume /update_weights /sleep /wake_up /abort_requests /collective_rpc /start_profile /docs "
CONTROL += (
    "/v1/load_lora_adapter /reset_prefix_cache /server_info /add_worker / /metrics /version /v1/models/ //v1/models"
)


def status(path, key="", generate_key=CLIENT, address="10.0.0.7", **headers):
    if key:
        headers["authorization"] = f"Bearer {key}"
    refusal = Guard(RUN, generate_key).refusal(path, CIMultiDict(headers), address)
    return 200 if refusal is None else refusal[0]


@pytest.mark.parametrize("path", CONTROL.split())
def test_control_routes_open_to_the_runs_key_alone(path):
    assert [status(path, key) for key in ("", "x", CLIENT, RUN)] == [401, 401, 403, 200]
    assert [status(path, key, EVERYONE) for key in ("", "x", EVERYONE, RUN)] == [401, 401, 403, 200]
    assert [status(path, key, "") for key in ("", "x", RUN)] == [401, 401, 200]


@pytest.mark.parametrize("path", sorted(GENERATION_ROUTES))
def test_generation_opens_to_both_keys_or_to_everyone(path):
    assert [status(path, key) for key in ("", "x", RUN[:-1], CLIENT, RUN)] == [401, 401, 401, 200, 200]
    assert [status(path, key, EVERYONE) for key in ("", "x", RUN)] == [200, 200, 200]
    assert [status(path, key, "") for key in ("", "x", RUN)] == [401, 401, 200]


def test_health_is_open_and_a_key_has_one_form():
    assert status("/health") == 200
    for value in (RUN, f"Basic {RUN}", f"Bearer  {RUN}x", "Bearer", "Bearer \udcff", "Bearer é"):
        assert status("/pause", authorization=value) == 401, value
    assert status("/pause", authorization=f"bearer {RUN}") == 200
    for key in ("", "two words", EVERYONE, "k" * 1001):  # no request could carry it, or everybody could guess it
        with pytest.raises(ValueError, match="INSTEP_API_KEY"):
            Guard(key)
    with pytest.raises(ValueError, match="blanks"):
        Guard(RUN, "two words")


@pytest.mark.parametrize("path", ["/health", "/pause", "/v1/models"])
@pytest.mark.parametrize("generate_key", [CLIENT, EVERYONE])
def test_foreign_pages_and_names_are_refused_whatever_their_key(path, generate_key):
    """A page's request has its Origin; one whose name was bound to this address meanwhile has that name as its Host."""
    for name, value in (
        ("origin", "https://evil.example"),
        ("origin", "null"),
        ("origin", ""),
        ("origin", "http://127.0.0.1.evil.example"),
        ("origin", "http://localhost@evil.example"),
        ("origin", "http://[::1"),
        ("host", "evil.example"),
        ("host", "evil.example:8000"),
        ("host", "127.0.0.1@evil.example"),
        ("host", "10.0.0.8:8000"),
        ("host", ""),
    ):
        assert status(path, RUN, generate_key, **{name: value}) == 403, (name, value)
    for host in ("127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "10.0.0.7:8000", os.uname().nodename):
        assert status(path, RUN, generate_key, host=host, origin=f"http://{host}") == 200, host


def test_further_names_are_local_where_they_are_allowed(monkeypatch):
    headers = {"host": "rl.example.org:8000", "origin": "https://RL.example.org", "authorization": f"Bearer {RUN}"}
    refused = Guard(RUN).refusal("/pause", headers, "127.0.0.1")
    assert refused[0] == 403 and "--allowed-hosts" in refused[1] and "INSTEP_ALLOWED_HOSTS" in refused[1]
    monkeypatch.setenv(guard.KEY_VARIABLE, RUN)
    monkeypatch.setenv(guard.HOSTS_VARIABLE, "RL.example.org, 10.1.2.3,[fd00::1],")
    allowed = Guard.from_environment()
    assert allowed.refusal("/pause", headers, "127.0.0.1") is None
    for host in ("10.1.2.3:1", "[fd00::1]:1", "localhost"):
        assert allowed.refusal("/pause", {**headers, "host": host}, "127.0.0.1") is None
    for host in ("example.org", "x.rl.example.org", ""):
        assert allowed.refusal("/pause", {**headers, "host": host}, "127.0.0.1")[0] == 403, host
    assert allowed.refusal("/pause", {"host": "rl.example.org"}, "127.0.0.1")[0] == 401  # a name is no key


def test_names_of_the_flag_reach_the_servers(monkeypatch):
    monkeypatch.delenv(guard.HOSTS_VARIABLE, raising=False)
    args = SimpleNamespace(no_api_key=False, command="train", vllm_router_ip=None, allowed_hosts=["a.example", "b"])
    args.api_key_file = args.rollout_external_engine_addrs = args.opd_teacher_url = None
    assert keys.server_environment(args)[guard.HOSTS_VARIABLE] == "a.example,b"
    args.allowed_hosts = None
    monkeypatch.setenv(guard.HOSTS_VARIABLE, "c.example")
    assert keys.server_environment(args)[guard.HOSTS_VARIABLE] == "c.example"
    for name in ("http://a.example", "a.example:80", "10.0.0.7:80", "*", "a b", "a/b", ""):
        args.allowed_hosts = ["b.example", name]
        (problem,) = api_keys(args, set())
        assert problem.where == "--allowed-hosts" and "scheme, port and path" in problem.remedy
    args.allowed_hosts = ["b.example", "10.0.0.7", "fd00::1"]
    assert not list(api_keys(args, set()))
    args.rollout_external_engine_addrs = ["10.0.0.7:8000"]
    (problem,) = api_keys(args, set())
    assert problem.where == "--allowed-hosts" and "INSTEP_ALLOWED_HOSTS" in problem.remedy


def test_the_docs_list_the_routes_of_generation():
    row = next(line for line in SECURITY.read_text().splitlines() if line.startswith("| generation:"))
    assert set(re.findall("`(/.*?)`", row.split("; these paths")[0])) == GENERATION_ROUTES


def test_a_check_costs_microseconds():
    """A request takes at least half a millisecond of an engine's HTTP process."""
    check, headers = Guard(RUN, CLIENT), CIMultiDict({"Host": "127.0.0.1:1", "Authorization": f"Bearer {RUN}"})
    seconds = []
    for _ in range(200):
        began = time.perf_counter()
        for _ in range(10):
            assert check.refusal("/inference/v1/generate", headers, "127.0.0.1") is None
        seconds.append((time.perf_counter() - began) / 10)
    assert statistics.median(seconds) < 1e-4, statistics.median(seconds)


# ---- vLLM's middleware


def through(monkeypatch, *, kind="http", path="/pause", headers=(), key=RUN):
    """What the middleware sends for a request, or the request that it passes on."""
    monkeypatch.setenv(guard.KEY_VARIABLE, key)
    monkeypatch.setenv(guard.GENERATE_VARIABLE, CLIENT)
    sent = []

    async def app(scope, receive, send):
        sent.append(scope)

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": [(k.encode(), v.encode()) for k, v in headers]}
    asyncio.run(Middleware(app)({**scope, "server": ("127.0.0.1", 1)}, None, send))
    return sent


def test_the_middleware_of_vllm(monkeypatch):
    start, body = through(monkeypatch)
    assert start["status"] == 401 and json.loads(body["body"])["error"]["code"] == 401
    assert through(monkeypatch, headers=[("origin", "https://evil.example")])[0]["status"] == 403
    assert through(monkeypatch, headers=[("authorization", f"Bearer {CLIENT}")])[0]["status"] == 403
    for path, key in (("/pause", RUN), ("/v1/models", CLIENT)):
        (passed,) = through(monkeypatch, path=path, headers=[("authorization", f"Bearer {key}")])
        assert passed["path"] == path
    (closed,) = through(monkeypatch, kind="websocket", path="/v1/realtime")
    assert closed["type"] == "websocket.close"
    assert through(monkeypatch, kind="lifespan")[0]["type"] == "lifespan"
    with pytest.raises(ValueError, match="no key"):
        through(monkeypatch, key="")


# ---- where keys come from, and go to


@pytest.fixture
def of_a_run():
    with RunContext().entered():
        yield


def test_a_key_goes_to_its_address_only(of_a_run):
    keys.know("http://127.0.0.1:4000", "secret")
    assert headers_for("http://127.0.0.1:4000/pause?mode=abort") == {"Authorization": "Bearer secret"}
    assert api_key("http://127.0.0.1:4000/v1") == "secret"
    for host in ("localhost", "LOCALHOST", "[::1]"):  # where a hook may ask for it, too
        assert api_key(f"http://{host}:4000/v1") == "secret"
    for url in ("http://127.0.0.1:4001/", "http://localhost/", "https://evil.example/127.0.0.1:4000"):
        assert headers_for(url) == {} and api_key(url) == ""


def test_the_file_of_a_key(tmp_path):
    path = keys.write(tmp_path / "run", "secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text() == "secret\n"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    path.unlink()
    path.symlink_to(elsewhere)
    assert keys.write(tmp_path / "run", "another").read_text() == "another\n" and elsewhere.read_text() == ""
    assert keys._read(str(path)) == "another"
    path.chmod(0o640)
    keys._read.cache_clear()
    with pytest.raises(ConfigError, match="other users can read this key"):
        keys._read(str(path))
    for text in ("", " \n", "two words", "two\nlines", "sch\u00f6n", "*", "k" * 1001, "k" * 20_000):
        path.chmod(0o600)
        path.write_text(text)
        with pytest.raises(ConfigError, match="holds no key"):
            keys._read(str(path))


@pytest.mark.parametrize("key", ["*", "two words", "sch\u00f6n", "k" * 1001])
def test_the_variable_is_checked_as_the_file_is(monkeypatch, key):
    """As the key of clients "*" would mean everyone."""
    monkeypatch.setenv(guard.KEY_VARIABLE, key)
    for command, more in (("serve", []), ("train", ["--rollout-external-engine-addrs", "127.0.0.1:1"])):
        with pytest.raises(ConfigError, match="the variable INSTEP_API_KEY"):
            keys.given_key(SimpleNamespace(api_key_file=None))
        with pytest.raises(ConfigError, match="the variable INSTEP_API_KEY"):
            parse(["--hf-checkpoint", "none", *more], command)
    monkeypatch.setenv(guard.KEY_VARIABLE, " \n")
    assert keys.given_key(SimpleNamespace(api_key_file=None)) == ""
