"""The router in front of the engines: vllm-router, or an external one. Only generation goes through it.

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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from instep.engines.flags import router_arguments
from instep.engines.http import REFUSED, check_server, open_directly, refusal
from instep.errors import ConfigError, EngineError
from instep.system.processes import Process, SupervisedProcess, stop_all

if TYPE_CHECKING:
    from instep.arguments.settings import Settings

CALL_SECONDS = 10.0
START_SECONDS = 60.0  # of a restarted router, on a busy machine; it asks all engines first
_DEFAULTS = {
    "policy": ["sticky_least_loaded"],  # a group's samples share their prompt, so they stay with one engine
    "disable_retries": [],
    "disable_circuit_breaker": [],  # it would exclude an engine that is only paused for a sync
    "max_concurrent_requests": ["32768"],
    "queue_size": ["32768"],
    "worker_startup_check_interval": ["1"],
    "health_check_interval_secs": ["2"],
    "health_failure_threshold": ["2"],
    "health_success_threshold": ["1"],
    "log_level": ["warning"],
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


class Router(Server):
    """A router: its address, its process (None for an external one) and the engines behind it.

    Args:
        start: starts the process at `url`; None: the router is external.
    """

    title = "the router"
    _starts_empty = True

    def __init__(self, url: str, start: Start | None = None):
        self.url, self._start = url, start
        self.process = start(()) if start is not None and self._starts_empty else None
        self._members: set[str] = set()
        self._lock = threading.Lock()

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
                self._call("GET", "/list_workers")
                return
            except EngineError:
                if time.monotonic() > deadline:
                    tail = self.process.log_tail() if self.process is not None else ""
                    raise EngineError(
                        f"the router did not answer within {timeout:.0f} s",
                        where=f"{self.url}\n{tail}",
                        remedy="see its log" if self.process is not None else "check --vllm-router-ip/-port",
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
            for url in sorted(ours - set(urls)):
                self._call("POST", "/remove_worker", url=url)
            for url in sorted(set(urls) - known):
                self._call("POST", "/add_worker", url=url)
            self._members = set(urls)

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

    def _call(self, method: str, path: str, **query: str) -> Any:
        url = self.url + path + ("?" + urllib.parse.urlencode(query) if query else "")
        request = urllib.request.Request(url, b"" if method == "POST" else None, method=method)
        try:
            with open_directly(request, timeout=CALL_SECONDS) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            if self._start is None and error.code in REFUSED:
                raise refusal(url, error.code, text) from None
            what = f"the router refused {path} with {error.code}: {text[:300]}"
            raise EngineError(what, where=url, remedy="see the router's log") from None
        except (OSError, http.client.HTTPException) as error:
            what = f"the router did not answer {path}: {error}"
            raise EngineError(what, where=url, remedy="see the router's log; check that it is still running") from error
        try:
            return json.loads(text)
        except ValueError:
            return text


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


def router_command(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of the Python interpreter that run vllm-router with `arguments`.

    Raises:
        ConfigError: vllm-router is not installed.
    """
    if importlib.util.find_spec("vllm_router") is None:
        raise ConfigError(
            "vllm-router is not installed here",
            where="several engines, or --rollout-backend vllm",
            remedy="pip install vllm-router (make install-vllm does so on a CPU), or name one with --vllm-router-ip",
        )
    return ["-m", "instep.engines.router_main", *arguments]


def router_words(args: Settings) -> list[str]:
    """Return the flags of every router that instep starts: its own choices, which `--router-*` replace."""
    own = {**_DEFAULTS, "request_timeout_secs": [str(round(args.rollout_timeout))]}
    words = [w for f, ws in own.items() if f not in args.router_overrides for w in ("--" + f.replace("_", "-"), *ws)]
    return [*words, *router_arguments(args)]
