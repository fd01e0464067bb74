"""Who of the engines serves: those that die, come back, never start; beside a router of somebody else's."""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from instep.arguments.parse import parse
from instep.cluster.base import JointProcess
from instep.controller import fleet as fleet_module
from instep.controller import health
from instep.controller.device import resolve_on_machine
from instep.controller.fleet import Fleet
from instep.engines.engine import Engine, external_engines
from instep.engines.kind import kind_of
from instep.engines.vllm import SILENT_HEARTBEATS, VllmKind
from instep.errors import ConfigError, EngineError
from instep.system.ports import free_port
from instep.system.processes import SupervisedProcess
from tests.bounds import allowed, until
from tests.e2e.commands import grpo_arguments
from tests.sglang_worker import Worker


class Server(ThreadingHTTPServer):
    """An engine's `/health`, and what a router answers."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.well, self.hangs, self.version, self.workers = True, False, None, []
        self.mode, self.num_api_servers = "processed_logprobs", 1
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"127.0.0.1:{self.server_port}"

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        path, version = urlsplit(self.path).path, self.server.version
        while path == "/is_paused" and self.server.hangs:
            time.sleep(0.05)
        code = 404 if path == "/version" and version is None else 200 if self.server.well else 503
        parallel = {"data_parallel_size": 2, "_api_process_count": self.server.num_api_servers}
        config = {"parallel_config": parallel, "model_config": {"logprobs_mode": self.server.mode}}
        config["weight_transfer_config"] = {"backend": "instep_shm"}
        answer = {"urls": self.server.workers, "version": version, "vllm_config": config}
        text = json.dumps(answer | {"data": [{"owned_by": "vllm" if version else "instep"}]}).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self):
        (url,) = parse_qs(urlsplit(self.path).query)["url"]
        (self.server.workers.append if "add" in self.path else self.server.workers.remove)(url)
        self.do_GET()


def fleet_arguments(tiny, tmp_path, engines, *words):
    addresses = ["--rollout-external-engine-addrs", *(engine.address for engine in engines)]
    return parse(grpo_arguments(tiny, tmp_path, "--rollout-backend", "embedded", *addresses, *words)[1:], "train")


def fleet_of(tiny, tmp_path, engines, router=None, status=lambda _: None):
    words = []
    if router is not None:
        words = ["--vllm-router-ip", "127.0.0.1", "--vllm-router-port", str(router.server_port)]
    args = fleet_arguments(tiny, tmp_path, engines, *words)
    return Fleet(args, external_engines(args), restart=None, log_dir=tmp_path, status=status)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.1)


def test_a_server_of_somebody_else_that_does_not_answer_is_told_at_once(tiny, tmp_path):
    with Server() as engine, Server() as router:
        said: list[str] = []
        fleet = fleet_of(tiny, tmp_path, [engine], router, said.append)
        router.shutdown()
        router.server_close()
        with pytest.raises(EngineError, match="the router did not answer within 0 s"):
            fleet.wait_ready(0.2)
    (line,) = said
    assert f"127.0.0.1:{router.server_port} does not answer yet: waiting" in line and "--engine-start-timeout" in line


def test_the_loss_of_the_last_engine_of_somebody_else_is_told(tiny, tmp_path, fast):
    with Server() as engine:
        fleet = fleet_of(tiny, tmp_path, [engine])
        fleet.wait_ready(10)
        fleet.admit(fleet.engines)
        fleet.check()
        engine.well = False
        with pytest.raises(EngineError, match="engine 0 has not answered /health"):
            until(fleet.check)
        fleet.close()


def test_a_vllm_of_somebody_else_says_what_it_is(tiny, tmp_path):
    with Server() as engine:
        engine.version = "0.32.0"
        fleet = fleet_of(tiny, tmp_path, [engine])
        fleet.wait_ready(10)
        found = fleet.engines[0]
        assert found.num_replicas == 2 and found.capabilities == VllmKind("0.32.0").capabilities
        fleet.close()
        engine.mode = "raw_logprobs"
        with pytest.raises(ConfigError, match="engine 0 answers with raw_logprobs"):
            fleet_of(tiny, tmp_path, [engine]).wait_ready(10)
        engine.mode, engine.num_api_servers = "processed_logprobs", 2  # vLLM's default with two replicas
        with pytest.raises(
            ConfigError, match="engine 0 has 2 API servers: each control call reaches only one"
        ) as caught:
            fleet_of(tiny, tmp_path, [engine]).wait_ready(10)
        assert caught.value.remedy == "start it with --api-server-count 1"


def test_an_engine_of_somebody_else_comes_back(tiny, tmp_path, fast):
    with Server() as first, Server() as second, Server() as router:
        fleet = fleet_of(tiny, tmp_path, [first, second], router)
        fleet.wait_ready(10)
        fleet.admit(fleet.engines)
        urls = [engine.url for engine in fleet.engines]
        assert router.workers == sorted(urls)
        first.well = False
        until(lambda: router.workers == urls[1:])
        fleet.check()
        first.well = True
        until(fleet.waiting)
        fleet.admit(fleet.waiting())
        assert sorted(router.workers) == sorted(urls)
        fleet.close()


def test_engines_of_sglang_need_no_flag_for_their_router(tiny, tmp_path):
    with Server() as router:
        engine = Worker("key")
        engine.address = engine.url.removeprefix("http://")
        fleet = fleet_of(tiny, tmp_path, [engine], router)
        with pytest.raises(ConfigError, match="engine 0 needs sglang-router, but the run has vllm-router") as caught:
            fleet.wait_ready(10)
        assert caught.value.remedy == "use --rollout-backend sglang, and engines of one kind only"
        fleet.close()
        for named, found in (("auto", "sglang"), ("embedded", "embedded")):
            args = fleet_arguments(tiny, tmp_path, [engine], "--rollout-backend", named)
            assert resolve_on_machine(args, with_engines=True).rollout_backend == found
        engine.shutdown()
        engine.server_close()
        args = args.replace(rollout_backend="auto")
        assert resolve_on_machine(args, with_engines=True).rollout_backend == "embedded"  # it does not answer yet


def of_processes(tiny, tmp_path, codes, router_port=1, kind=None, **options):
    """A fleet whose engines are these programs, which get their port; the first of `kind`, the others embedded."""
    words = ["--rollout-backend", "embedded", "--rollout-num-gpus", str(len(codes)), "--debug-rollout-only"]
    words += ["--vllm-router-ip", "127.0.0.1", "--vllm-router-port", str(router_port)]
    args = parse(grpo_arguments(tiny, tmp_path, *words)[1:], "train")
    engines = []
    for i, code in enumerate(codes):
        port = free_port()
        process = SupervisedProcess(f"engine {i}", [sys.executable, "-c", code, str(port)], tmp_path / f"{i}.log")
        mine = kind if kind is not None and i == 0 else kind_of("embedded")
        engines.append(Engine(f"engine {i}", f"http://127.0.0.1:{port}", process, mine))
        engines[-1].watch = lambda: None
    return Fleet(args, engines, log_dir=tmp_path, status=lambda _: None, **{"restart": None, **options})


def end(fleet):
    fleet.close()
    for engine in fleet.engines:
        engine.stop()


SERVE = """\
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SLEEP = "import time; time.sleep(60)"


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("codes", [[SLEEP, "raise SystemExit('no luck')"], ["raise SystemExit('no luck')", SLEEP]])
def test_an_engine_that_does_not_start_is_told_before_the_others_are_ready(tiny, tmp_path, codes, watched):
    """Also if the run's watch sees it first."""
    fleet = of_processes(tiny, tmp_path, codes)
    try:
        for engine in fleet.engines:
            engine.watch = fleet.check if watched else engine.watch
        began = time.monotonic()
        with pytest.raises(EngineError, match=f"engine {1 - codes.index(SLEEP)} (ended|died)"):
            fleet.wait_ready(60)
        assert time.monotonic() - began < allowed(10)
    finally:
        end(fleet)


def test_those_that_start_anew_count_until_they_fail(tiny, tmp_path):
    """Where the last one comes back, too: no death ends it before none is left, and then it ends."""
    gate = threading.Event()

    def restart(index):
        gate.wait(30)
        raise OSError("no more processes")

    with Server() as router:
        options = {"restart": restart, "last_comes_back": True}
        fleet = of_processes(tiny, tmp_path, [SERVE, SERVE], router.server_port, **options)
        try:
            fleet.wait_ready(30)
            fleet.admit(fleet.engines)
            fleet._restarts[fleet.engines[1].url] = fleet_module.MAX_RESTARTS
            for engine in fleet.engines:
                engine.process.kill()
                fleet.check()
            assert router.workers == []
            gate.set()
            with pytest.raises(EngineError, match="no regular engine of model actor is left"):
                until(fleet.check)
        finally:
            end(fleet)


@pytest.mark.parametrize("code, state", [(SERVE, "ready"), (SLEEP, "lost")])
def test_the_gpu_of_an_engine_is_given_on_when_it_is_ready_or_gone(tiny, tmp_path, code, state):
    """One that hangs gives its own at once; and when the run ends none is started."""
    restarted = []

    def restart(index):
        restarted.append(index)
        words = [sys.executable, "-c", code, str(urlsplit(first.url).port)]
        first.process = SupervisedProcess("engine 0", words, tmp_path / "anew.log")

    with Server() as router:
        options = {"restart": restart, "takes_turns": True}
        fleet = of_processes(tiny, tmp_path, [SERVE] * 3, router.server_port, **options)
        try:
            fleet._args = fleet._args.replace(engine_start_timeout=10.0 if code == SERVE else 1.0)
            fleet.wait_ready(30)
            fleet.admit(fleet.engines)
            first, _, third = fleet.engines
            fleet._notice(first, "hangs", True)
            until(lambda: not first.process.alive())
            time.sleep(0.2)
            assert not restarted and not fleet.is_starting, "the trainer has the GPU"
            fleet.start_dead()
            assert fleet.is_starting
            until(lambda: not fleet.is_starting)
            assert (fleet._states[first.url], first.process.alive()) == (state, code == SERVE) and restarted == [0]
            fleet._notice(third, "hangs", True)
            fleet.close()
            fleet.start_dead()
            until(lambda: "restart engine 2" not in [thread.name for thread in threading.enumerate()])
            assert restarted == [0]
        finally:
            end(fleet)


HANGS = SERVE.replace(
    "def do_GET(self):",
    """def do_POST(self):
        import time
        time.sleep(3)
        self.do_GET()
    def do_GET(self):
        if "is_paused" in self.path:
            import time
            time.sleep(60)""",
).replace("HTTPServer", "ThreadingHTTPServer")


@pytest.mark.parametrize("num", [1, 2])
def test_a_vllm_whose_core_hangs_is_started_anew_and_the_last_one_ends_the_run(tiny, tmp_path, fast, num):
    """Not while a control call keeps it busy, which has a bound of its own."""
    restarted = []
    with Server() as router:
        codes = [HANGS, SERVE][:num]
        options = {"kind": VllmKind("0.32.0"), "restart": restarted.append}
        fleet = of_processes(tiny, tmp_path, codes, router.server_port, **options)
        try:
            fleet._args = fleet._args.replace(heartbeat_timeout=2.0 / SILENT_HEARTBEATS)
            first = fleet.engines[0]
            fleet.wait_ready(30)
            fleet.admit(fleet.engines)
            first.post("/update_weights", timeout=20)
            assert len(router.workers) == num and not restarted
            if num == 2:
                until(lambda: restarted)
                assert restarted[0] == 0 and fleet.engines[1].url in router.workers
            else:
                with pytest.raises(EngineError, match=r"engine 0 hangs: it has computed nothing for \d+ s"):
                    until(fleet.check)
        finally:
            end(fleet)


def test_a_vllm_of_somebody_else_that_hangs_stays_away(tiny, tmp_path, fast):
    """Though its server is well."""
    with Server() as first, Server() as second, Server() as router:
        fleet = fleet_of(tiny, tmp_path, [first, second], router)
        fleet._args = fleet._args.replace(heartbeat_timeout=1.0 / SILENT_HEARTBEATS)
        first.version = "0.32.0"
        fleet.wait_ready(10)
        fleet.admit(fleet.engines)
        urls = [engine.url for engine in fleet.engines]
        first.hangs = True
        until(lambda: router.workers == urls[1:])
        with pytest.raises(EngineError, match="engine 0 does not answer any more"):  # a control call to it ends so
            fleet.check_reachable(fleet.engines[0])
        fleet.check_reachable(fleet.engines[1])
        time.sleep(2.0)
        assert not fleet.waiting()
        first.hangs = False
        until(fleet.waiting)
        fleet.check_reachable(fleet.engines[0])
        fleet.close()


def test_nothing_of_an_engine_that_stays_away_is_left(tiny, tmp_path):
    with Server() as router:
        fleet = of_processes(tiny, tmp_path, [SERVE, SERVE], router.server_port)
        try:
            first = fleet.engines[0]
            parts = [first.process, SupervisedProcess("node 1", [sys.executable, "-c", SLEEP], tmp_path / "node1.log")]
            first.process = JointProcess(parts)
            fleet.wait_ready(30)
            fleet.admit(fleet.engines)
            parts[0].kill()
            fleet.check()
            until(lambda: not parts[1].alive())
            assert router.workers == [fleet.engines[1].url]
        finally:
            end(fleet)


def test_a_router_of_somebody_else_has_no_engine_but_the_runs(tiny, tmp_path):
    """It is left as it was found."""
    with Server() as first, Server() as second, Server() as router:
        fleet = fleet_of(tiny, tmp_path, [first, second], router)
        urls = [engine.url for engine in fleet.engines]
        router.workers = ["http://127.0.0.1:1", urls[0]]
        with pytest.raises(EngineError, match="not the run's: http://127.0.0.1:1\n"):
            fleet.wait_ready(10)
        fleet.close()
        assert router.workers == ["http://127.0.0.1:1", urls[0]]
        router.workers = urls[:1]
        fleet = fleet_of(tiny, tmp_path, [first, second], router)
        fleet.wait_ready(10)
        fleet.admit(fleet.engines)
        assert router.workers == urls
        fleet.close()
        assert router.workers == urls[:1]
