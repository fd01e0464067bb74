"""The router before the engines: vllm-router, or one that somebody else runs. Only generation goes through it.

It proxies a path that it does not know to one engine of its choice, so every control call goes to each engine directly.
Engines join when they hold proven weights, and leave when they die; a request that was on a dead one is made again by
the client, which knows what it has asked for (the router's own retries would run whole generations unseen).
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.errors import ConfigError, EngineError
from instep.processes import SupervisedProcess, free_port, stop_all

_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
CALL_SECONDS = 10.0
_DEFAULTS = {
    "policy": ["sticky_least_loaded"],  # a group's samples share their prompt, so they stay with one engine
    "disable_retries": [],
    "disable_circuit_breaker": [],  # it would shut out an engine that is only paused for a sync
    "max_concurrent_requests": ["32768"],
    "queue_size": ["32768"],
    "worker_startup_check_interval": ["1"],
    "health_check_interval_secs": ["2"],
    "health_failure_threshold": ["2"],
    "health_success_threshold": ["1"],
    "log_level": ["warning"],
}


class Router:
    """A running router: its address, its process (None for one that somebody else runs) and who is behind it."""

    def __init__(self, url: str, process: SupervisedProcess | None = None):
        self.url, self.process = url, process
        self._members: set[str] = set()
        self._lock = threading.Lock()

    @property
    def address(self) -> tuple[str, int]:
        parts = urllib.parse.urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return parts.hostname, parts.port

    @property
    def members(self) -> list[str]:
        """URLs of the engines that get requests."""
        with self._lock:
            return sorted(self._members)

    def wait_ready(self, timeout: float) -> None:
        """Until it answers."""
        deadline = time.monotonic() + timeout
        while True:
            self.check_alive()
            try:
                self._call("GET", "/list_workers")
                return
            except EngineError:
                if time.monotonic() > deadline:
                    tail = self.process.log_tail() if self.process is not None else ""
                    raise EngineError(
                        f"the router did not answer within {timeout:.0f} s",
                        where=f"{self.url}\n{tail}",
                        remedy="see its log" if self.process is not None else "is it at --vllm-router-ip/-port?",
                    ) from None
            time.sleep(0.1)

    def check_alive(self) -> None:
        """Raise EngineError if its process has ended, or was stopped."""
        fault = self.process.fault() if self.process is not None else None
        if self.process is not None and fault is not None:
            raise EngineError(f"the router {fault}", where=self.process.describe(), remedy=self.process.remedy())

    def set_members(self, urls: Sequence[str]) -> None:
        """Exactly these engines get requests from now on.

        Raises:
            EngineError: it did not take one.
        """
        with self._lock:
            known = set(self._call("GET", "/list_workers")["urls"])
            ours = known if self.process is not None else known & self._members
            for url in sorted(ours - set(urls)):
                self._call("POST", "/remove_worker", url=url)
            for url in sorted(set(urls) - known):
                self._call("POST", "/add_worker", url=url)
            self._members = set(urls)

    def _call(self, method: str, path: str, **query: str) -> Any:
        url = self.url + path + ("?" + urllib.parse.urlencode(query) if query else "")
        request = urllib.request.Request(url, b"" if method == "POST" else None, method=method)
        try:
            with _open(request, timeout=CALL_SECONDS) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            raise EngineError(
                f"the router refused {path} with {error.code}: {error.read().decode(errors='replace')[:300]}", where=url
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"the router did not answer {path}: {error}", where=url) from error
        try:
            return json.loads(text)
        except ValueError:
            return text

    def stop(self) -> None:
        if self.process is not None:
            stop_all([self.process])


def start_router(args: Any, log_dir: Path, name: str = "router") -> Router:
    """The router that `--vllm-router-ip/-port` name, or a vllm-router of our own on loopback, at `--port` of `instep
    serve` or any free one; not ready yet.

    Raises:
        ConfigError: vllm-router is not installed.
    """
    if args.vllm_router_ip is not None:
        return Router(f"http://{args.vllm_router_ip}:{args.vllm_router_port}")
    if importlib.util.find_spec("vllm_router") is None:
        raise ConfigError(
            "vllm-router is not installed here",
            where="--rollout-backend vllm",
            remedy="pip install vllm-router (make install-vllm does so on a CPU), or name one with --vllm-router-ip",
        )
    port = args.port or free_port()
    command = [sys.executable, "-m", "instep.engines.router_main", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port())]
    for field, words in {**_DEFAULTS, "request_timeout_secs": [str(round(args.rollout_timeout))]}.items():
        if field not in args.router_overrides:
            command += ["--" + field.replace("_", "-"), *words]
    command += [word for words in args.router_overrides.values() for word in words]
    return Router(
        f"http://127.0.0.1:{port}", SupervisedProcess(name, command, log_dir / f"{name}.log", {"RUST_LOG": "warn"})
    )
