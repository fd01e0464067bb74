"""The engines of a run and their routers, one router per model: which engines serve, died or came back.

An engine serves while it has proven weights and is healthy: its process lives, and it answers (`health.py`).
When an engine dies, its router sends it no more requests, and other engines get its open requests again. It is
restarted while the run continues. It serves again once a session has brought it the current weights; if its model
keeps its weights, as soon as it is ready. The run ends when the last engine of a model dies, or its last engine that
prefills or decodes.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from instep.arguments.args import Runtime
from instep.arguments.settings import Settings
from instep.cluster.engine_plan import has_router, plan_engines, plan_routers
from instep.cluster.engine_start import start_gate, start_router
from instep.controller.health import unreachable, watch_health
from instep.engines import keys
from instep.engines.engine import Engine
from instep.engines.gate import Gate, needs_gate
from instep.engines.router import Router
from instep.engines.topology import policy_model, served_models
from instep.errors import ConfigError, EngineError, InstepError
from instep.system.processes import Process, in_thread, stop_all

MAX_RESTARTS = 3  # of one engine; a fourth death is not an accident
ASK_SECONDS = 10.0  # to ask an engine about itself
ROUTER_SECONDS = 5.0  # for a router to add or remove an engine: it may refuse at first

# dead: waits for `start_dead`; planned: a sync has restarted it and not brought its weights yet
State = Literal["serving", "starting", "ready", "lost", "dead", "planned"]


class Fleet:
    """All engines of a run.

    Args:
        engines: started, maybe not ready yet; without engines the fleet does nothing.
        restart: restarts engine `index` at its address, on another `checkpoint` if one is given; with None a dead
            engine stays away.
        status: reports to the user what happened.
        takes_turns: engines share GPUs with a trainer: only `start_dead` restarts a dead engine.
        last_comes_back: the last engine of a model is restarted, too (`instep serve`: only clients wait for it).
        with_gates: clients get a gate where they need one; False: the caller puts something else before the engines.
    """

    def __init__(
        self,
        args: Settings,
        engines: Sequence[Engine],
        *,
        restart: Callable[..., None] | None,
        log_dir: Path,
        status: Callable[[str], None],
        last_comes_back: bool = False,
        with_gates: bool = True,
        takes_turns: bool = False,
    ):
        self._args, self.engines, self._restart, self._status = args, list(engines), restart, status
        self._log_dir, self._last_comes_back, self._takes_turns = log_dir, last_comes_back, takes_turns
        self._states: dict[str, State] = {engine.url: "starting" for engine in self.engines}
        self._ready = False  # becomes True when all were ready; before, an engine's death ends the run
        self._restarts = dict.fromkeys(self._states, 0)
        self._lock = threading.RLock()
        self._away = set[str]()  # engines that served before, but not now
        self._closed = threading.Event()
        self._found: set[str] = set()  # engines of an external router at the start: they stay in it
        self._fault: EngineError | None = None  # found by another thread; `check` raises it
        self._default = policy_model(served_models(args)).name if self.engines else ""
        self.routers: dict[str, Router] = {}  # by model; a model with one engine may need no router
        self.gates: dict[str, Gate] = {}  # by model; in front of its router or its engine
        specs = plan_routers(args, plan_engines(args)) if self.engines else []
        for spec in specs:
            mine, suffix = self.of_model(spec.model), "" if len(specs) == 1 else f"-{spec.model}"
            if routed := has_router(args, len(mine)):
                self.routers[spec.model] = start_router(args, spec, mine, log_dir, f"router{suffix}")
            if with_gates and needs_gate(args, routed):
                self.gates[spec.model] = start_gate(args, spec, self._inner_url(spec.model), log_dir, f"gate{suffix}")
        self._key_file: Path | None = None
        shown = self.engines and with_gates and not args.no_api_key
        if shown and (key := keys.key_of(self._client_url(self._default))):
            self._key_file = keys.write(Path(args.run_dir), key)

    def of_model(self, model: str) -> list[Engine]:
        return [engine for engine in self.engines if engine.model == model]

    def hook_attributes(self) -> Runtime:
        """Return the attributes of `args` that give hooks the addresses of routers and engines."""
        addresses = {}
        for engine in self.engines:
            url = urlsplit(self._client_url(engine.model))
            addresses[engine.model] = (str(url.hostname), int(url.port or 0))
        host, port = addresses.get(self._default, ("127.0.0.1", 0))
        policy = self.of_model(self._default)
        return {
            "vllm_router_ip": host,
            "vllm_router_port": port,
            "vllm_model_routers": addresses,
            "rollout_engine_urls": [engine.url for engine in policy],
            "rollout_engine_kind": policy[0].kind.name if policy else "",
            "vllm_model_engine_urls": {name: [engine.url for engine in self.of_model(name)] for name in addresses},
        }

    def num_cached_tokens(self) -> float:
        """Return the tokens that the KV caches of the policy's engines hold together; infinity if one is unknown."""
        engines = [engine for engine in self.of_model(self._default) if engine.role != "prefill"]
        return sum(engine.kind.num_cached_tokens(engine, ASK_SECONDS) for engine in engines) or math.inf

    @property
    def policy_router(self) -> Router | None:
        """The router of the model that is trained; None if its only engine answers by itself."""
        return self.routers.get(self._default)

    def _inner_url(self, model: str) -> str:
        router = self.routers.get(model)
        return router.url if router is not None else self.of_model(model)[0].url

    def _client_url(self, model: str) -> str:
        """Return the URL for requests of clients and hooks."""
        gate = self.gates.get(model)
        return gate.url if gate is not None else self._inner_url(model)

    @property
    def processes(self) -> list[Process]:
        """The processes of engines, routers and gates that this run started."""
        owners: list[Engine | Router | Gate] = [*self.engines, *self.routers.values(), *self.gates.values()]
        return [owner.process for owner in owners if owner.process is not None]

    def wait_ready(self, timeout: float) -> None:
        """Wait until all engines and routers answer."""
        if not self.engines:
            return
        external = [engine.url for engine in self.engines if engine.process is None]
        external += [router.url for router in self.routers.values() if self._args.vllm_router_ip is not None]
        for address in unreachable(external):
            self._status(f"{address} does not answer yet: waiting {timeout:.0f} s (--engine-start-timeout)")
        for outcome in as_completed([in_thread(partial(e.wait_ready, timeout), e.name) for e in self.engines]):
            outcome.result()
        for router in self.routers.values():
            router.wait_ready(timeout)
            if self._args.vllm_router_ip is not None:
                self._check_theirs(router)
        for gate in self.gates.values():
            gate.wait_ready(timeout)
        for engine in self.engines:
            if engine.process is None:
                engine.identify()
                self._check_router_of(engine)
        self._states = dict.fromkeys(self._states, "ready")
        self._ready = True
        for engine in self.engines:
            if engine.process is None or not engine.kind.sends_heartbeats:
                watch_health(engine, self._args.heartbeat_timeout, self._notice, self._is_well, self._closed)

    def _check_router_of(self, engine: Engine) -> None:
        router, needed = self.routers.get(engine.model), engine.kind.router.program
        if router is not None and router.program != needed:
            raise ConfigError(
                f"{engine.name} needs {needed}, but the run has {router.program}",
                where=f"--rollout-backend: {engine.url}",
                remedy=f"use --rollout-backend {engine.kind.name}, and engines of one kind only",
            )

    def _check_theirs(self, router: Router) -> None:
        """Check that an external router has only this run's engines: all its engines would get requests."""
        self._found = router.listed()
        if others := sorted(self._found - self._states.keys()):
            raise EngineError(
                f"the router has engines that are not the run's: {', '.join(others)}",
                where=f"{router.external_flags}: {router.url}",
                remedy=f"name them with --rollout-external-engine-addrs, or remove them ({router.remove_route})",
            )

    def available(self) -> list[Engine]:
        """Return the engines of the next sync: all that are healthy and get weights."""
        return [e for e in self.engines if e.update_weights and self._states[e.url] in ("serving", "ready")]

    def serves(self) -> bool:
        """Return whether an engine of the policy serves. Without a router an engine answers even before it should."""
        return any(self._states[engine.url] == "serving" for engine in self.of_model(self._default))

    def waiting(self) -> list[Engine]:
        """Return the engines that are ready, but do not have the current weights yet."""
        return [e for e in self.engines if self._states[e.url] == "ready"]

    @property
    def is_starting(self) -> bool:
        """Whether an engine is being restarted after its death."""
        return any(self._states[e.url] == "starting" and e.process is not None for e in self.engines)

    def start_dead(self) -> None:
        """Restart the engines that died and may come back."""
        with self._lock:
            for engine in [e for e in self.engines if self._states[e.url] == "dead"]:
                self._states[engine.url] = "starting"
                in_thread(partial(self._start_anew, engine), f"restart {engine.name}")

    def admit(self, engines: Iterable[Engine]) -> None:
        """Let engines serve from now on: they have the right weights."""
        with self._lock:
            for engine in engines:
                if self._states[engine.url] == "ready":
                    self._states[engine.url] = "serving"
                    if engine.url in self._away:
                        self._away.discard(engine.url)
                        self._status(f"{engine.name} serves again")
            self._tell_routers()

    def start_on(self, engines: Sequence[Engine], checkpoint: Path) -> None:
        """End engines of this run, as planned, and restart them on `checkpoint`; `synced` follows.

        Until then only the caller checks whether they live, and they get no requests.
        """
        assert self._restart is not None
        with self._lock:
            for engine in engines:
                self._states[engine.url] = "planned"
            self._tell_routers()
        stop_all([engine.process for engine in engines if engine.process is not None])
        for engine in engines:
            self._restart(self.engines.index(engine), checkpoint)

    def synced(self, began: Iterable[Engine], held: Sequence[Engine]) -> None:
        """Record a sync: of the engines it `began` with, those that `held` its weights serve, the others wait."""
        with self._lock:
            for engine in began:
                planned = self._states[engine.url] == "planned"
                if planned and engine not in held:
                    self._lose(engine, "did not come back after its restart")
                elif planned:
                    self._states[engine.url] = "ready"
                elif engine not in held and self._states[engine.url] == "serving":
                    self._states[engine.url] = "ready"
                    self._away.add(engine.url)
            self.admit(held)

    def check(self) -> None:
        """Notice engines that died.

        Raises:
            EngineError: a router died, or the last engine of a model (or of a role in it).
        """
        if self._closed.is_set():
            return
        with self._lock:
            if self._fault is not None:
                raise self._fault
            fronts: list[Router | Gate] = [*self.routers.values(), *self.gates.values()]
            for front in fronts:
                front.check_alive()
            for engine in self.engines:
                if not self._ready:
                    engine.check_alive()
                state = self._states[engine.url]
                if state in ("serving", "ready") and engine.process is not None and engine.process.fault() is not None:
                    self._lose(engine, str(engine.process.fault()))
            left = {(e.model, e.role) for e in self.engines if self._states[e.url] != "lost"}
            for engine in self.engines:
                if (engine.model, engine.role) not in left:
                    what = f"no {engine.role} engine of model {engine.model} is left"
                    raise EngineError(what, where=str(self._log_dir), remedy="look for the cause in the engines' logs")

    def check_reachable(self, engine: Engine) -> None:
        """Raise EngineError for an external engine that is given up for now.

        The death of an engine of this run ends a call to it; an external engine may just hang.
        """
        if self._ready and engine.process is None and self._states[engine.url] == "starting":
            raise EngineError(f"{engine.name} does not answer any more", where=engine.url, remedy="see its log")

    def close(self) -> None:
        """Stop routers and gates, and remove the run's engines from an external router."""
        self._closed.set()
        for engine in self.engines:
            engine.lease.end()
        for router in self.routers.values():
            if self._args.vllm_router_ip is not None and router.members:
                with contextlib.suppress(EngineError):  # the run ends, whatever happens to its router
                    router.set_members([url for url in router.members if url in self._found])
            router.stop()
        for gate in self.gates.values():
            gate.stop()
        if self._key_file is not None:
            self._key_file.unlink(missing_ok=True)

    # ---- death and return ----------------------------------------------------------------------------------------

    def _notice(self, engine: Engine, fault: str, silent: bool) -> None:
        """Lose an engine after a thread that watches it found a fault.

        Args:
            silent: requests to this engine may never be answered. They fail when its process is ended. The process of
                an external engine is not ended: all open requests of the router are made again.
        """
        if self._states[engine.url] not in ("serving", "ready"):
            return
        try:
            process = engine.process
            where = process.describe() if process is not None else engine.url  # with its stacks, before its end
            with self._lock:
                known = self._states[engine.url] in ("serving", "ready") and engine.process is process
                if not known or self._closed.is_set():
                    return
                self._lose(engine, fault, where)
                if silent and process is None and engine.model in self.routers:
                    self.routers[engine.model].drop_requests()
        except Exception as error:  # noqa: BLE001 - a thread ends here: nothing else would report it
            found = EngineError(f"{engine.name} {fault}", where=f"{engine.url}: {error!r}", remedy="see its log")
            self._fault = error if isinstance(error, EngineError) else found

    def _is_well(self, engine: Engine) -> None:
        with self._lock:
            if engine.process is None and self._states[engine.url] == "starting":
                engine.begin_anew()
                self._states[engine.url] = "ready"

    def _lose(self, engine: Engine, fault: str, where: str = "") -> None:
        alike = [e for e in self.of_model(engine.model) if e.role == engine.role and e is not engine]
        enough = ("serving", "ready", *(["starting", "dead"] if self._last_comes_back else []))
        others = any(self._states[e.url] in enough for e in alike)
        comes_back = engine.process is None or (self._restart is not None and self._restarts[engine.url] < MAX_RESTARTS)
        if not others and not (self._last_comes_back and comes_back):  # no other engine can answer in its place
            engine.check_alive()
            remedy = "it was the last engine of its kind"
            remedy += f"; {engine.process.remedy() if engine.process else 'start it again, then this run'}"
            raise EngineError(f"{engine.name} {fault}", where=where or engine.url, remedy=remedy)
        if not comes_back:
            what = "the run continues without it"
            self._states[engine.url] = "lost"
            in_thread(engine.stop, f"stop {engine.name}")  # the rest of its process may keep a GPU
        else:
            what = "the run waits for it" if engine.process is None else "it is restarted"
            self._states[engine.url] = "starting" if engine.process is None else "dead"
            self._away.add(engine.url)
        self._status(f"{engine.name} {fault}: {what}")
        self._tell_routers()
        if comes_back and engine.process is not None:
            self._restarts[engine.url] += 1
            if self._takes_turns:
                # If it hangs, its callers wait for its answers. `start_dead` may replace the process meanwhile.
                in_thread(partial(stop_all, [engine.process]), f"stop {engine.name}")
            else:
                self.start_dead()

    def _start_anew(self, engine: Engine) -> None:
        assert self._restart is not None
        try:
            engine.stop()  # an engine that hangs keeps its GPU
            if self._closed.is_set():
                return
            self._restart(self.engines.index(engine))
            engine.begin_anew()
            engine.wait_ready(self._args.engine_start_timeout)
            with self._lock:
                self._states[engine.url] = "ready"
                if not engine.update_weights and not self._closed.is_set():
                    self.admit([engine])
        except Exception as error:  # noqa: BLE001 - a thread ends here: nothing else would report it
            try:
                engine.stop()  # before another process gets the GPU
            finally:
                self._states[engine.url] = "lost"
            what = error.what if isinstance(error, InstepError) else repr(error)
            if not self._closed.is_set():
                self._status(f"{engine.name} did not come back, the run continues without it: {what}")
            return
        self._closed.wait()  # the kernel ends a process with the thread that started it (`follow_parent`)

    def _tell_routers(self) -> None:
        for model, router in self.routers.items():
            urls = [e.url for e in self.of_model(model) if self._states[e.url] == "serving"]
            deadline = time.monotonic() + ROUTER_SECONDS
            while True:
                try:
                    router.set_members(urls)
                    break
                except EngineError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
