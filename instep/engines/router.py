"""The router in front of the engines: vllm-router, or an external one. Only generation goes through it.

`sglang_router.py` has the other router. The kind of the engines says which of the two a run starts.

The router proxies an unknown path to one engine of its choice, so every control call goes to each engine directly.
Engines join when they hold proven weights and leave when they die. If an engine dies, the client repeats its requests.
The router's own retries are off, because they would run whole generations unseen.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from instep.arguments.settings import Settings
from instep.engines.flags import router_arguments
from instep.engines.http import REFUSED, check_server, open_directly, refusal
from instep.engines.topology import ServerRole
from instep.errors import ConfigError, EngineError
from instep.system.processes import Process, SupervisedProcess, stop_all
from instep_engine.guard import KEY_VARIABLE

CALL_SECONDS = 10.0
START_SECONDS = 60.0  # of a restarted router, on a busy machine; it asks all engines first
# Of both routers.
COMMON_FLAGS: Mapping[str, Sequence[str]] = {
    "disable_retries": [],
    "disable_circuit_breaker": [],  # it would exclude an engine that is only paused for a sync
    "worker_startup_check_interval": ["1"],
    "health_check_interval_secs": ["2"],
    "health_failure_threshold": ["2"],
    "health_success_threshold": ["1"],
    "cors_allowed_origins": ["http://127.0.0.1"],  # an empty list would mean all
}
Start = Callable[[Sequence[str]], SupervisedProcess]


class Server:
    """An engine, or a server before engines: its name in errors, its address and its process (None: external)."""

    title: str
    url: str
    process: Process | None

    def check_alive(self) -> None:
        """Raise EngineError if its process has ended, was stopped or hangs."""
        if self.process is not None and (fault := self.process.fault()) is not None:
            raise EngineError(f"{self.title} {fault}", where=self.process.describe(), remedy=self.process.remedy())

    def stop(self) -> None:
        if self.process is not None:
            stop_all([self.process])


class Member(Protocol):
    """The parts of an engine that a router uses; `engine.Engine` is one."""

    url: str
    role: ServerRole
    bootstrap_port: int | None


class Router(Server):
    """A router: its address, its process (None for an external one) and the engines behind it.

    Args:
        start: starts the process at `url`; None: the router is external.
        engines: the engines that may join.

    Attributes:
        program: its name; package: the Python package that has it; main: the module that runs it.
        external_flags: the flags for an external one; remove_route: how a user removes an engine there.
    """

    title = "the router"
    program, package, main = "vllm-router", "vllm_router", "instep.engines.router_main"
    external_flags, remove_route = "--vllm-router-ip and --vllm-router-port", "POST /remove_worker?url=..."
    how_to_install = "instep install router"
    own_flags: ClassVar[Mapping[str, Sequence[str]]] = {
        "policy": ["sticky_least_loaded"],  # a group's samples share their prompt, so they stay with one engine
        "max_concurrent_requests": ["32768"],
        "queue_size": ["32768"],
        "log_level": ["warning"],
        **COMMON_FLAGS,
    }
    _starts_empty = True

    def __init__(self, url: str, start: Start | None = None, engines: Iterable[Member] = ()):
        self.url, self._start, self._engines = url, start, {engine.url: engine for engine in engines}
        self.process = start(()) if start is not None and self._starts_empty else None
        self._members: set[str] = set()
        self._lock = threading.Lock()

    # ---- the command line --------------------------------------------------------------------------------------------

    @classmethod
    def command(cls, arguments: Sequence[str]) -> list[str]:
        """Return the arguments of the Python interpreter that run it with `arguments`.

        Raises:
            ConfigError: it is not installed.
        """
        if importlib.util.find_spec(cls.package) is None:
            raise ConfigError(
                f"{cls.program} is not installed here",
                where=f"several engines, or --rollout-backend {cls.package.removesuffix('_router')}",
                remedy=f"{cls.how_to_install}, or name one with {cls.external_flags}",
            )
        return ["-m", cls.main, *arguments]

    @classmethod
    def words(cls, args: Settings) -> list[str]:
        """Return the flags of every router that instep starts: its own choices, which `--router-*` replace."""
        own = {**cls.own_flags, "request_timeout_secs": [str(round(args.rollout_timeout))]}
        left = {field: words for field, words in own.items() if field not in args.router_overrides}
        own_words = [word for field, words in left.items() for word in ("--" + field.replace("_", "-"), *words)]
        return [*own_words, *router_arguments(args)]

    @classmethod
    def disaggregated_words(cls, kv_connector: str, members: Iterable[tuple[ServerRole, str]]) -> list[str]:
        """Return the flags for prefill and decode engines; `members` are role and URL of those that serve."""
        words = ["--vllm-pd-disaggregation", *(["--kv-connector", kv_connector] if kv_connector else [])]
        return [*words, *(word for role, url in members for word in ("--" + role, url))]

    @classmethod
    def environment(cls, key: str) -> dict[str, str]:
        """Return the variables of its process, which asks for `key`. It sends OPENAI_API_KEY to prefill and decode."""
        return {"RUST_LOG": "warn", KEY_VARIABLE: key, "OPENAI_API_KEY": key}

    @classmethod
    def disaggregated(cls) -> type[Router]:
        """Return the class in front of prefill and decode engines."""
        return DisaggregatedRouter

    @classmethod
    def packed(cls, path: str, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a request in a form of which it drops nothing."""
        return payload

    # ---- a running router --------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[str]:
        """The URLs of the engines that get requests."""
        with self._lock:
            return sorted(self._members)

    def wait_ready(self, timeout: float) -> None:
        """Wait until the router answers.

        Raises:
            EngineError: its process ends, another program listens at its port, or `timeout` seconds are over.
            ConfigError: it is external, and refuses us (401, 403).
        """
        deadline = time.monotonic() + timeout
        while True:
            self.check_alive()
            check_server("the router", self.url)
            try:
                self.listed()
                return
            except EngineError:
                if time.monotonic() > deadline:
                    tail = self.process.log_tail() if self.process is not None else ""
                    raise EngineError(
                        f"the router did not answer within {timeout:.0f} s",
                        where=f"{self.url}\n{tail}",
                        remedy="see its log" if self.process is not None else f"check {self.external_flags}",
                    ) from None
            time.sleep(0.1)

    def listed(self) -> set[str]:
        """Return the URLs of all engines that the router knows, also from other processes."""
        return set(self._call("GET", "/list_workers")["urls"])

    def set_members(self, urls: Sequence[str]) -> None:
        """Send requests to exactly these engines, and to those that other processes added.

        Raises:
            EngineError: the router did not accept one of them.
        """
        with self._lock:
            known = self.listed()
            ours = known if self.process is not None else known & self._members
            self._change(sorted(ours - set(urls)), sorted(set(urls) - known))
            self._members = set(urls)

    def _change(self, leave: Sequence[str], join: Sequence[str]) -> None:
        for url in leave:
            self._call("POST", "/remove_worker", url=url)
        for url in join:
            self._call("POST", "/add_worker", url=url)

    def drop_requests(self) -> None:
        """Restart the router at its address, in half a second. Clients repeat the requests that it drops.

        An external router is not restarted. Its process must not be checked meanwhile.
        """
        if self.process is not None:
            self._begin(self.members)

    def _begin(self, urls: Sequence[str]) -> None:
        assert self._start is not None
        with self._lock:
            self.stop()
            self.process, self._members = self._start(()), set()
        self.wait_ready(CALL_SECONDS)
        self.set_members(urls)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None, **query: str) -> Any:
        url = self.url + path + ("?" + urllib.parse.urlencode(query) if query else "")
        data = json.dumps(body).encode() if body is not None else b"" if method == "POST" else None
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"} if body else {}, method=method)
        try:
            with open_directly(request, timeout=CALL_SECONDS) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if self._start is None and error.code in REFUSED:
                raise refusal(url, error.code, text) from None
            what = f"the router refused {path} with {error.code}: {text[:300]}"
            kind = NoRoute if error.code == 404 else EngineError
            raise kind(what, where=url, remedy="see the router's log") from None
        except (OSError, http.client.HTTPException) as error:
            what = f"the router did not answer {path}: {error}"
            raise EngineError(what, where=url, remedy="see the router's log; check that it is still running") from error
        try:
            return json.loads(text)
        except ValueError:
            return text


class NoRoute(EngineError):
    """A router has no such route, or no such engine (404)."""


class DisaggregatedRouter(Router):
    """The router in front of prefill and decode engines.

    vllm-router cannot add such an engine while it runs. So it is started with all serving engines, and restarted when
    one joins. Engines that die are removed as from any router.
    """

    _starts_empty = False

    def wait_ready(self, timeout: float) -> None:
        """Return at once: the router starts with its first engines."""

    def set_members(self, urls: Sequence[str]) -> None:
        if not set(urls) <= set(self.members):
            self._begin(urls)
        elif self.process is not None:
            super().set_members(urls)

    def _begin(self, urls: Sequence[str]) -> None:
        assert self._start is not None
        with self._lock:
            self.stop()
            self.process, self._members = self._start(urls), set(urls)
        super().wait_ready(START_SECONDS)
