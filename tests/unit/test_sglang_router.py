"""sglang-router as a run starts it, in front of two servers that stand for SGLang engines."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from instep.cluster.engine_plan import RouterSpec, describe_engines, plan_engines, plan_routers
from instep.cluster.engine_start import start_router
from instep.engines import keys
from instep.engines.engine import Engine
from instep.engines.kind import kind_of
from instep.engines.router import Router
from instep.engines.sglang import SglangKind
from instep.engines.sglang_router import SglangRouter
from instep.errors import ConfigError, EngineError
from instep.rollout.http import post
from instep.rollout.request_gate import gate
from instep_engine.sglang import expand
from tests.bounds import until
from tests.plans import arguments
from tests.sglang_worker import ABOUT, Worker
from tests.unit.test_sglang_labels import EXPERTS, Request, is_packed

ARGS: Any = SimpleNamespace(rollout_timeout=60.0, router_overrides={}, api_key_file=None)


@pytest.fixture(scope="module")
def both() -> Iterator[list[Worker]]:
    workers = [Worker("key-of-0"), Worker("key-of-1")]
    yield workers
    for worker in workers:
        worker.shutdown()
        worker.server_close()


@pytest.fixture
def workers(both: list[Worker]) -> Iterator[list[Worker]]:
    gate().reset()
    for worker in both:
        worker.reset()
    yield both
    gate().reset()


@pytest.mark.parametrize(
    "device, threshold, what", [("cpu", 1.0, "takes the likeliest tokens"), ("cuda", 0.9, "would accept more drafts")]
)
def test_an_engine_whose_samples_would_not_follow_the_policy_is_refused(
    workers: list[Worker], monkeypatch: Any, device: str, threshold: float, what: str
) -> None:
    engine = Engine("engine 0", workers[0].url)
    monkeypatch.setitem(ABOUT, "device", device)
    assert SglangKind().identify(engine) is not None
    about = {f"speculative_accept_threshold_{which}": 1.0 for which in ("single", "acc")}
    for name, value in {**about, "speculative_algorithm": "EAGLE"}.items():
        monkeypatch.setitem(ABOUT, name, value)
    monkeypatch.setitem(ABOUT, "speculative_accept_threshold_acc", threshold)
    with pytest.raises(ConfigError, match=what):
        SglangKind().identify(engine)
    monkeypatch.setitem(ABOUT, "device", "cuda")
    monkeypatch.setitem(ABOUT, "speculative_accept_threshold_acc", 1.0)
    assert SglangKind().identify(engine) is not None


def started(folder: Any, engines: list[Engine], **spec: Any) -> Router:
    words = tuple(SglangRouter.words(ARGS))
    spec = {"kind": SglangRouter, "flags": words, **spec}
    router = start_router(ARGS, RouterSpec("actor", tuple(range(len(engines))), **spec), engines, folder)
    router.wait_ready(60.0)
    return router


@pytest.fixture(scope="module")
def running(both: list[Worker], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    engines = [Engine(f"engine {i}", worker.url) for i, worker in enumerate(both)]
    router = started(tmp_path_factory.mktemp("router"), engines)
    yield router
    router.stop()


@pytest.fixture
def router(running: Router, workers: list[Worker]) -> Router:
    keys.know(running.url, keys.run_key(), user=os.geteuid())
    running.set_members([worker.url for worker in workers])
    return running


def ask(url: str, payload: Any = None, key: str | None = None) -> int:
    """Return the status of an answer; `key` None: that of the address."""
    headers = {"Content-Type": "application/json", **keys.bearer(keys.key_of(url) if key is None else key)}
    data = None if payload is None else json.dumps(payload).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def prompt(*ids: int) -> dict[str, Any]:
    return {"input_ids": list(ids), "sampling_params": {"max_new_tokens": 1}}


# ---- who may ask, and where it listens


@pytest.mark.sglang_router
def test_it_asks_for_the_runs_key_and_sends_engines_theirs(router: Router, workers: list[Worker]) -> None:
    for key in ("", "another"):
        assert ask(router.url + "/workers", key=key) == ask(router.url + "/generate", prompt(1), key) == 401
    assert not any(worker.asked for worker in workers)
    assert ask(router.url + "/generate", prompt(1)) == 200
    ((worker, (sent, _)),) = [(worker, one) for worker in workers for one in worker.asked]
    assert sent == f"Bearer {worker.key}" and worker.key != keys.run_key()


@pytest.mark.sglang_router
def test_it_listens_on_loopback_alone_and_shows_no_key(router: Router) -> None:
    assert router.process is not None
    process = psutil.Process(router.process.pid)
    listening = [one.laddr for one in process.net_connections() if one.status == psutil.CONN_LISTEN]
    assert {at.ip for at in listening} == {"127.0.0.1"}
    words = process.cmdline()
    wanted = {int(words[words.index(flag) + 1]) for flag in ("--port", "--prometheus-port")}
    assert wanted == {at.port for at in listening} and len(wanted) == 2
    assert not any(keys.run_key() in word for word in words)


# ---- who answers


@pytest.mark.sglang_router
@pytest.mark.parametrize("status", [500, 503])
def test_a_request_that_fails_is_sent_once(router: Router, workers: list[Worker], status: int) -> None:
    """And an engine that fails often is asked all the same: its process decides whether it is dead."""
    router.set_members([workers[0].url])
    workers[0].status = status
    assert [ask(router.url + "/generate", prompt(1, 2, 3)) for _ in range(12)] == [status] * 12
    assert len(workers[0].asked) == 12
    workers[0].status = 200
    assert ask(router.url + "/generate", prompt(1, 2, 3)) == 200


@pytest.mark.sglang_router
def test_members_share_requests(router: Router, workers: list[Worker]) -> None:
    for worker in workers:
        worker.delay = 0.2
    with ThreadPoolExecutor(40) as pool:
        answers = pool.map(lambda i: ask(router.url + "/generate", prompt(*range(i * 50, i * 50 + 40))), range(40))
        assert list(answers) == [200] * 40
    counts = [len(worker.asked) for worker in workers]
    assert sum(counts) == 40 and min(counts) >= 10, counts


@pytest.mark.sglang_router
def test_engines_leave_and_join(router: Router, workers: list[Worker]) -> None:
    first, second = (worker.url for worker in workers)
    router.set_members([second])
    assert router.listed() == {second} and router.members == [second]
    assert [ask(router.url + "/generate", prompt(i)) for i in range(4)] == [200] * 4
    assert [len(worker.asked) for worker in workers] == [0, 4]
    router.set_members([])
    assert router.listed() == set() and ask(router.url + "/generate", prompt(1)) == 503
    router.set_members([first, second])
    assert router.listed() == {first, second}


@pytest.mark.sglang_router
def test_an_external_router_gives_engines_the_key_of_its_clients(router: Router, workers: list[Worker]) -> None:
    router.set_members([])
    theirs = SglangRouter(router.url)
    theirs.wait_ready(10.0)
    theirs.set_members([workers[0].url])
    assert ask(router.url + "/generate", prompt(1)) == 200
    assert [key for key, _ in workers[0].asked] == [f"Bearer {keys.key_of(router.url)}"]
    keys.know(router.url, "wrong")
    with pytest.raises(ConfigError, match="does not accept the key"):
        theirs.listed()


@pytest.mark.sglang_router
def test_an_engine_that_is_not_there_does_not_join(
    router: Router, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instep.engines.sglang_router.CALL_SECONDS", 1.0)
    with pytest.raises(EngineError, match="the router takes no http://127.0.0.1:9 within 1 s") as caught:
        router.set_members([workers[0].url, "http://127.0.0.1:9"])
    assert caught.value.where == router.url and "do /health, /model_info" in caught.value.remedy


@pytest.mark.sglang_router
def test_a_dead_router_is_noticed_and_a_hung_request_is_dropped(workers: list[Worker], tmp_path: Any) -> None:
    router = started(tmp_path, [Engine("engine 0", workers[0].url)])
    try:
        router.set_members([workers[0].url])
        workers[0].delay = 30.0
        with ThreadPoolExecutor(1) as pool:
            hung = pool.submit(ask, router.url + "/generate", prompt(1))
            until(lambda: workers[0].asked)
            router.drop_requests()
            assert isinstance(hung.exception(timeout=10), OSError)
        assert router.listed() == {workers[0].url}
        assert router.process is not None
        os.kill(router.process.pid, 9)
        until(lambda: router.process is not None and not router.process.alive())
        with pytest.raises(EngineError, match=r"the router died \(SIGKILL\)"):
            router.check_alive()
    finally:
        router.stop()


@pytest.mark.sglang_router
def test_prefill_and_decode(workers: list[Worker], tmp_path: Any) -> None:
    """Both get the request, with the place where they meet. They join while the router runs."""
    engines = [Engine("engine 0", workers[0].url, role="prefill", bootstrap_port=9123)]
    engines.append(Engine("engine 1", workers[1].url, role="decode"))
    router = started(tmp_path, engines, disaggregated=True)
    try:
        assert router.process is not None
        words, pid = psutil.Process(router.process.pid).cmdline(), router.process.pid
        assert "--pd-disaggregation" in words and not {"--prefill", "--decode"} & {*words}
        router.set_members([workers[0].url])
        router.set_members([worker.url for worker in workers])
        assert router.process.pid == pid
        assert ask(router.url + "/generate", prompt(1, 2)) == 200
        sent = [one for worker in workers for one in worker.asked]
        assert [body["input_ids"] for _, body in sent] == [[1, 2]] * 2
        assert {(body["bootstrap_host"], body["bootstrap_port"]) for _, body in sent} == {("127.0.0.1", 9123)}
        assert len({body["bootstrap_room"] for _, body in sent}) == 1
        assert {key for key, _ in sent} == {f"Bearer {keys.run_key()}"}  # its client's, which is the run's
    finally:
        router.stop()


# ---- what it drops


FIELDS: dict[str, Any] = {
    **{"rid": "a", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, "token_ids_logprob": [1]},
    **{"return_text_in_logprobs": True, "return_hidden_states": True, "return_bytes": True, "return_entropy": True},
    **{"image_data": ["x"], "video_data": ["x"], "audio_data": ["x"], "modalities": ["image"], "lora_path": "a"},
    **{"session_params": {"id": "a"}, "custom_logit_processor": "x", "lora_id": "b", "conversation_id": "c"},
    **{"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 1, "data_parallel_rank": 1, "priority": 1},
    **{"bootstrap_pair_key": "k", "extra_key": "k", "no_logs": True, "log_metrics": False, "background": True},
    **{"custom_labels": {"a": "b"}, "model": "m", "stream": False, "session_id": "s", "mm_hashes": ["a"]},
    **{"return_sampling_mask": True, "return_flat_raw_top_logprobs": True, "return_routed_experts": True},
    **{"routed_experts_start_len": 1, "return_indexer_topk": True, "routed_dp_rank": 1, "routing_key": "r"},
    **{"require_reasoning": True, "max_thinking_tokens": 4, "return_prompt_token_ids": True},
}
SAMPLING: dict[str, Any] = {
    **{"max_new_tokens": 5, "min_new_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "n": 2},
    **{"frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "stop": ["a"], "regex": "a"},
    **{"stop_token_ids": [1], "ignore_eos": True, "skip_special_tokens": False, "no_stop_trim": True, "ebnf": "a"},
    **{"sampling_seed": 1, "json_schema": "{}", "custom_params": {"a": 1}, "logit_bias": {"1": 1.0}},
    **{"stop_regex": ["a"], "structural_tag": "a", "stream_interval": 2, "spaces_between_special_tokens": False},
}


@pytest.mark.sglang_router
def test_what_the_router_is_known_to_drop(router: Router, workers: list[Worker]) -> None:
    router.set_members([workers[0].url])
    requests = [{**prompt(5), name: value} for name, value in FIELDS.items()]
    requests += [{"input_ids": [5], "sampling_params": {name: value}} for name, value in SAMPLING.items()]
    for payload in requests:
        assert ask(router.url + "/generate", payload) == 200, payload
        _, body = workers[0].asked.pop()
        params = body["sampling_params"]
        arrived = {**body, "sampling_params": {k: params[k] for k in payload["sampling_params"] if k in params}}
        assert ({**arrived, **payload} != arrived) is is_packed(payload), payload
    assert sum(map(is_packed, requests)) == 12 + 6


@pytest.mark.sglang_router
def test_what_the_router_drops_reaches_the_engine(router: Router, workers: list[Worker]) -> None:
    gate().guarded, gate().packed = router.url, router.packed
    asyncio.run(post(router.url + "/generate", {**EXPERTS, "custom_labels": {"a": "b"}}))
    ((_, body),) = [one for worker in workers for one in worker.asked]
    assert "return_routed_experts" not in body and "custom_params" not in body["sampling_params"]
    asked = Request(**{name: value for name, value in body.items() if name in Request.__annotations__})
    expand(None, asked)
    assert asked.return_routed_experts is True and asked.sampling_params == EXPERTS["sampling_params"]
    assert asked.custom_labels == {"a": "b"}


# ---- its command line, and older ones


def test_its_flags_and_their_replacements() -> None:
    words = SglangRouter.words(ARGS)
    assert words[:6] == ["--policy", "cache_aware", "--balance-abs-threshold", "10", "--balance-rel-threshold", "1.2"]
    assert {"--disable-retries", "--disable-circuit-breaker"} < {*words} and "--disable-health-check" not in words
    assert words[-2:] == ["--request-timeout-secs", "60"]
    given: Any = SimpleNamespace(rollout_timeout=60.0, router_overrides={"policy": ["--policy", "round_robin"]})
    assert SglangRouter.words(given) == [*words[2:], "--policy", "round_robin"]
    given.router_overrides = {"decode_policy": ["--decode-policy", "power_of_two"]}
    with pytest.raises(ConfigError, match="its engines join later") as caught:
        SglangRouter.words(given)
    assert caught.value.where == "--router-decode-policy power_of_two"
    spec = RouterSpec("actor", (0, 1), ("--x",), disaggregated=True, kind=SglangRouter)
    assert spec.arguments("h", 1, 2) == ["--host", "h", "--port", "1", "--prometheus-port", "2", "--x"] + [
        "--pd-disaggregation"
    ]


def test_the_kind_of_the_engines_chooses_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("--rollout-num-gpus 2")
    assert [router.kind for router in plan_routers(args, plan_engines(args))] == [Router]
    monkeypatch.setattr(type(kind_of("vllm")), "router", SglangRouter, raising=False)
    (router,) = plan_routers(args, plan_engines(args))
    assert router.kind is SglangRouter and list(router.flags) == SglangRouter.words(args)
    assert any("router: sglang-router --host HOST --port PORT" in line for line in describe_engines(args))


def test_it_says_when_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="sglang-router is not installed here") as caught:
        SglangRouter.command([])
    assert "--rollout-backend sglang" in caught.value.where
    assert "pip install sglang-router, or name one with --sglang-router-ip" in caught.value.remedy


class _Old(BaseHTTPRequestHandler):
    """An older router: it lists, adds and removes engines by other routes; `/workers` says no ids."""

    urls: set[str]

    def do_GET(self) -> None:
        path, _, url = urllib.parse.unquote(self.path).partition("?url=")
        known = {"/list_workers": lambda: None, "/workers": lambda: None, "/add_worker": lambda: self.urls.add(url)}
        known["/remove_worker"] = lambda: self.urls.discard(url)
        self.send_response(200 if path in known else 404)
        self.end_headers()
        known.get(path, lambda: None)()
        self.wfile.write(
            json.dumps({"urls": sorted(self.urls), "workers": [{"url": url} for url in self.urls]}).encode()
        )

    do_POST = do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_an_older_external_router() -> None:
    _Old.urls = {"http://10.0.0.1:1"}
    with ThreadingHTTPServer(("127.0.0.1", 0), _Old) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        router = SglangRouter(f"http://127.0.0.1:{server.server_port}")
        router.wait_ready(10.0)
        router.set_members(["http://10.0.0.2:2"])
        assert router.listed() == _Old.urls == {"http://10.0.0.1:1", "http://10.0.0.2:2"}
        router.set_members([])
        assert _Old.urls == {"http://10.0.0.1:1"}
        server.shutdown()
