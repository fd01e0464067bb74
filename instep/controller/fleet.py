"""The engines of a run and the router before them: who serves, who died, who comes back.

An engine serves while it holds proven weights and its process (or, if somebody else runs it, its `/health`) is well.
When it dies it leaves the router at once, so that requests that were on it are made again elsewhere; it is started anew
beside the run, and serves again after a session has brought it the current weights. The death of the last one ends the
run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from instep.engines.launch import Engine
from instep.engines.router import Router, start_router
from instep.errors import EngineError, InstepError

MAX_RESTARTS = 3  # of one engine; a fourth death is no accident
HEALTH_SECONDS = 1.0  # between two looks at an engine that somebody else runs
HEALTH_FAILURES = 3  # in a row: then it counts as dead
State = Literal["serving", "starting", "ready", "lost"]


def is_routed(args: Any, num_engines: int) -> bool:
    """Whether a router stands before the engines."""
    return num_engines > 1 or args.vllm_router_ip is not None or args.rollout_backend == "vllm"


class Fleet:
    """All engines of a run.

    Args:
        engines: started, not ready yet; without any the fleet does nothing.
        restart: starts engine `index` anew at its address; None: a dead engine stays away.
        last_comes_back: nobody but clients waits for an answer, so that the last engine is started anew, too.
        status: tells the user what happened.
    """

    def __init__(
        self,
        args: Any,
        engines: Sequence[Engine],
        *,
        restart: Callable[[int], None] | None,
        log_dir: Path,
        status: Callable[[str], None],
        last_comes_back: bool = False,
    ):
        self._args, self.engines, self._restart, self._status = args, list(engines), restart, status
        self._log_dir = log_dir
        self._last_comes_back = last_comes_back
        self._states: dict[str, State] = {engine.url: "ready" for engine in self.engines}
        self._restarts = dict.fromkeys(self._states, 0)
        self._lock = threading.RLock()
        self._closed = threading.Event()
        routed = self.engines and is_routed(args, len(self.engines))
        self.router: Router | None = start_router(args, log_dir) if routed else None

    @property
    def address(self) -> tuple[str, int]:
        """Where generation goes: the router, or the one engine."""
        if self.router is not None:
            return self.router.address
        url = urlsplit(self.engines[0].url if self.engines else "http://127.0.0.1:0")
        return str(url.hostname), int(url.port or 0)

    def wait_ready(self, timeout: float) -> None:
        """Until every engine and the router answer; of several failures the first engine's is raised."""
        if not self.engines:
            return
        with ThreadPoolExecutor(len(self.engines)) as pool:
            for outcome in [pool.submit(engine.wait_ready, timeout) for engine in self.engines]:
                outcome.result()
        if self.router is not None:
            self.router.wait_ready(timeout)
        outside = [engine for engine in self.engines if engine.process is None]
        for engine in outside:
            engine.identify()
        if outside:
            threading.Thread(target=self._watch_health, args=(outside,), name="health", daemon=True).start()

    def available(self) -> list[Engine]:
        """Those that take part in the next session: all that are well."""
        return [e for e in self.engines if self._states[e.url] in ("serving", "ready")]

    def waiting(self) -> list[Engine]:
        """Those that could serve, if they had the current weights."""
        return [e for e in self.engines if self._states[e.url] == "ready"]

    def admit(self, engines: Iterable[Engine]) -> None:
        """These hold the current weights: they serve from now on."""
        with self._lock:
            for engine in engines:
                if self._states[engine.url] == "ready":
                    self._states[engine.url] = "serving"
            self._tell_router()

    def check(self) -> None:
        """Notice who has died.

        Raises:
            EngineError: no engine is left that serves, or the router has died.
        """
        if self._closed.is_set():
            return
        with self._lock:
            if self.router is not None:
                self.router.check_alive()
            for engine in self.engines:
                state = self._states[engine.url]
                if state in ("serving", "ready") and engine.process is not None and engine.process.fault() is not None:
                    self._lose(engine, str(engine.process.fault()))
            if self._last_comes_back and set(self._states.values()) == {"lost"}:
                raise EngineError("no engine is left", where=str(self._log_dir), remedy="the engines' logs say why")

    def close(self) -> None:
        self._closed.set()
        if self.router is not None:
            self.router.stop()

    # ---- death and return ----------------------------------------------------------------------------------------

    def _lose(self, engine: Engine, fault: str) -> None:
        others = [e for e in self.engines if e is not engine and self._states[e.url] in ("serving", "ready")]
        comes_back = engine.process is None or (self._restart is not None and self._restarts[engine.url] < MAX_RESTARTS)
        if not others and not (self._last_comes_back and comes_back):  # nobody could answer in its place
            engine.check_alive()
            raise EngineError(f"{engine.name} {fault}", where=engine.url, remedy="it was the last engine")
        self._states[engine.url] = "starting" if comes_back else "lost"
        what = "it is started anew" if comes_back and engine.process is not None else "it is waited for"
        self._status(f"{engine.name} {fault}: {what if comes_back else 'the run goes on without it'}")
        self._tell_router()
        if comes_back and engine.process is not None:
            self._restarts[engine.url] += 1
            threading.Thread(
                target=self._start_anew, args=(engine,), name=f"restart {engine.name}", daemon=True
            ).start()

    def _start_anew(self, engine: Engine) -> None:
        assert self._restart is not None
        try:
            self._restart(self.engines.index(engine))
            if self._closed.is_set():
                engine.stop()
                return
            engine.wait_ready(self._args.engine_start_timeout)
        except InstepError as error:
            with self._lock:
                self._states[engine.url] = "lost"
            if not self._closed.is_set():
                self._status(f"{engine.name} did not come back, the run goes on without it: {error.what}")
            return
        with self._lock:
            self._states[engine.url] = "ready"
        self._closed.wait()  # the kernel ends a process with the thread that has started it (`follow_parent`)

    def _watch_health(self, engines: Sequence[Engine]) -> None:
        failures = dict.fromkeys((e.url for e in engines), 0)
        while not self._closed.wait(HEALTH_SECONDS):
            for engine in engines:
                failures[engine.url] = 0 if engine.healthy(HEALTH_SECONDS) else failures[engine.url] + 1
                with self._lock:
                    state = self._states[engine.url]
                    if state == "starting" and not failures[engine.url]:
                        self._states[engine.url] = "ready"
                    elif state in ("serving", "ready") and failures[engine.url] >= HEALTH_FAILURES:
                        try:
                            self._lose(engine, f"has not answered /health for {HEALTH_FAILURES} s")
                        except EngineError:
                            self._states[engine.url] = "lost"  # requests to it fail, and say so

    def _tell_router(self) -> None:
        if self.router is None:
            return
        urls = [e.url for e in self.engines if self._states[e.url] == "serving"]
        deadline = time.monotonic() + 5.0
        while True:
            try:
                self.router.set_members(urls)
                return
            except EngineError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
