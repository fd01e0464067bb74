"""A running engine: its process, its health, and the control calls that go to it directly."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from instep.arguments.settings import EngineSettings
from instep.engines import keys
from instep.engines.held_lease import HeldLease
from instep.engines.http import check_open, check_server, open_directly, open_without_key
from instep.engines.kind import Capabilities, EngineKind, all_kinds
from instep.engines.router import Server
from instep.engines.topology import POLICY, ServerRole
from instep.errors import EngineError
from instep.system.processes import Process, watched
from instep.system.run_context import RunThreads
from instep.system.spans import span
from instep.weights.way import SINGLE_COPY

WEIGHTS, KV_CACHE = "weights", "kv_cache"  # vLLM's names of the memory that sleep frees
TAGS = frozenset({WEIGHTS, KV_CACHE})
RESET_SECONDS = 3.0  # for a paused engine to release its KV cache
HealthAnswer = Literal["well", "unwell", "silent", "away"]


class Engine(Server):
    """One running engine: its address, its process and its control calls.

    Args:
        process: None for an external engine.
        kind: None for an external engine before `identify`.
        model: the name of the model that it serves; role: regular, prefill or decode.
        update_weights: whether it gets the trainer's weights.
        num_replicas: the number of data-parallel replicas, each of which has the weights.
        sleeps: whether it sleeps while the trainer works.
        written_in_place: whether the trainer's steps write into the memory that it computes with.
        bootstrap_port: where decode engines ask a prefill engine for the KV cache, if the router tells them.
        prefills: those engines, for a decode engine.
    """

    def __init__(
        self,
        name: str,
        url: str,
        process: Process | None = None,
        kind: EngineKind | None = None,
        *,
        model: str = POLICY,
        role: ServerRole = "regular",
        update_weights: bool = True,
        num_replicas: int = 1,
        sleeps: bool = False,
        written_in_place: bool = False,
        bootstrap_port: int | None = None,
    ):
        self.name, self.title, self.url, self.process, self._kind = name, name, url, process, kind
        self.model, self.role, self.update_weights = model, role, update_weights
        self.num_replicas, self.sleeps, self.written_in_place = num_replicas, sleeps, written_in_place
        self.bootstrap_port = bootstrap_port
        self.prefills: Sequence[Engine] = ()
        self.asleep = frozenset[str]()  # the TAGS without memory now
        self.has_weights = True  # sleep has not dropped them since the last sync
        self.watch: Callable[[], None] = self.check_alive  # called while a control call waits
        self.lease = HeldLease(name, self._ask_lease)  # from the start of a session or pause until the resume
        self._calls, self._last_call = set[object](), 0.0  # the running control calls, and when the last one ended

    @property
    def kind(self) -> EngineKind:
        assert self._kind is not None, f"{self.name} has not been identified yet"
        return self._kind

    @property
    def capabilities(self) -> Capabilities:
        return self.kind.capabilities

    def wait_ready(self, timeout: float) -> None:
        """Wait until `/health` answers 200.

        Raises:
            EngineError: the process ends, another program listens at its port, or `timeout` seconds are over.
            ConfigError: it refuses us (401, 403).
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process is not None and not self.process.alive():
                end = self.process.describe()
                remedy = self.kind.start_remedy(end) or "its log says why"
                raise EngineError(f"{self.name} ended before it was ready", where=end, remedy=remedy)
            self.watch()
            health = self.health(2.0)
            if health == "well":
                check_server(self.name, self.url)
                return
            if health == "unwell":
                check_open(self.url + "/health", timeout=2.0)
            time.sleep(0.05)
        tail = self.process.log_tail() if self.process is not None else ""
        what = f"{self.name} was not ready after {timeout:.0f} s"
        raise EngineError(what, where=f"{self.url}\n{tail}", remedy="raise --engine-start-timeout if it is only slow")

    def healthy(self, timeout: float) -> bool:
        """Return whether `/health` answers 200 now."""
        return self.health(timeout) == "well"

    def health(self, timeout: float) -> HealthAnswer:
        """Ask `/health`: well (200), unwell (error: vLLM's core is dead), silent (no answer in time) or away."""
        try:
            with open_without_key(self.url + "/health", timeout=timeout):  # another program may listen there
                return "well"
        except urllib.error.HTTPError:
            return "unwell"
        except TimeoutError:
            return "silent"
        except (OSError, http.client.HTTPException):
            return "away"

    def computes(self, timeout: float) -> bool:
        """Return False if the computing process is silent for `timeout` seconds and no control call keeps it busy.

        Control calls have their own bounds. An engine that cannot be reached counts as computing.
        """
        return self.answers(timeout) or bool(self._calls) or time.monotonic() - self._last_call < timeout

    def answers(self, timeout: float) -> bool:
        """Return False if the computing process does not answer the kind's `core_route` within `timeout` seconds."""
        try:
            with open_directly(self.url + self.kind.core_route, timeout=timeout):
                return True
        except TimeoutError:
            return False
        except (OSError, http.client.HTTPException):
            return True

    def identify(self) -> None:
        """Ask an external engine for its kind.

        Raises:
            EngineError: it does not say, or its kind is not known.
            ConfigError: its kind is known, but instep cannot use it as it was started.
        """
        found: EngineKind | None = None
        known = ", ".join(kind.title for kind in all_kinds())
        what, cause = f"{self.name} is not an engine that instep knows: {known}", None
        try:
            found = next((kind for known in all_kinds() if (kind := known.identify(self)) is not None), None)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            what, cause = f"{self.name} does not say what it is: {error!r}", error
        if found is None:
            remedy = "check the address, or start a vLLM with instep's plugin there (docs/engines.md)"
            raise EngineError(what, where=self.url, remedy=remedy) from cause
        self._kind = found

    def post(
        self, path: str, body: dict[str, Any] | None = None, *, timeout: float, replica: int | None = None, **query: Any
    ) -> dict[str, Any]:
        """POST JSON to a control route, and watch the processes of the run meanwhile. Return the JSON of the answer.

        Args:
            replica: the data-parallel replica that must answer; None: any of them, or all if the route means all.

        Raises:
            EngineRefusal: the engine answered with an error.
            EngineError: it did not answer.
        """
        self._calls.add(call := object())
        try:
            work = partial(self._post, path, body, timeout, replica, query)
            with span(path, self.name):
                return watched(work, f"{self.name} {path}", lambda: self.watch())
        finally:
            self._last_call = time.monotonic()
            self._calls.discard(call)

    def _ask_lease(self, about: dict[str, Any], timeout: float, aside: bool) -> bool:
        """Ask for the lease of a pause. With `aside` it is no sign of life, and nothing is watched meanwhile."""
        if self.process is not None or (call := self.kind.lease(about)) is None:
            return False
        if aside:
            self._post(*call, timeout, None, {})
        else:
            self.post(*call, timeout=timeout)
        return True

    def _post(
        self, path: str, body: dict[str, Any] | None, timeout: float, replica: int | None, query: dict[str, Any]
    ) -> dict[str, Any]:
        url = self.url + path + ("?" + urllib.parse.urlencode(query) if query else "")
        headers = {"Content-Type": "application/json"}
        if replica is not None:
            headers["X-data-parallel-rank"] = str(replica)
        request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers, method="POST")
        try:
            with open_directly(request, timeout=max(0.1, timeout)) as answer:
                text = answer.read()
                return json.loads(text) if text.strip() else {}
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise EngineRefusal.from_answer(self, path, error.code, text) from None
        except ValueError as error:
            raise EngineError(
                f"{self.name} answered {path} with something that is not JSON: {error}",
                where=url,
                remedy="see its log; check that no other program answers at its address",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            if self.process is not None and not isinstance(error, TimeoutError):
                self.process.died_within(1.0)
            self.check_alive()
            what = f"{self.name} did not answer {path} within {timeout:.0f} s: {error}"
            raise EngineError(what, where=url, remedy="see its log; raise --sync-timeout if it is only slow") from error

    # ---- control calls, as its kind makes them (see EngineKind) ------------------------------------------------------

    def pause(self, mode: str, *, timeout: float) -> None:
        """Stop generating. An external engine resumes, or ends, when this process has died."""
        self.lease.take(timeout)
        self.kind.pause(self, mode, timeout=timeout)
        if self.written_in_place:
            self.lease.take(timeout, in_place=True)

    def sleep(self, level: int, *, timeout: float) -> None:
        """Free the GPU if it is not free yet. Level 1 keeps the weights on the host, level 2 drops them."""
        if self.sleeps and not self.asleep:
            room = "its weights need room in host memory, and " if level == 1 else ""
            remedy = f"{room}no other process may use memory of its GPU meanwhile"
            with self._changing("does not fall asleep", remedy):
                self.kind.sleep(self, level, timeout=timeout)
            self.asleep, self.has_weights = TAGS, level == 1

    def wake(self, tag: str, *, timeout: float) -> None:
        """Allocate the memory of `tag` again. When the last one is back the engine generates."""
        if tag in self.asleep:
            rest = "the trainer and other processes leave free on its GPU (see the metrics memory/...)"
            remedy = f"lower {self.kind.memory_flags} to what {rest}"
            with self._changing(f"does not get the memory of its {tag} back", remedy):
                self.kind.wake(self, tag, timeout=timeout)
            self.asleep -= {tag}

    @contextlib.contextmanager
    def _changing(self, what: str, remedy: str) -> Iterator[None]:
        """If the engine refuses to take or free memory, report what it does not do, and what helps."""
        try:
            yield
        except EngineRefusal as refusal:
            error = EngineError(f"{self.name} {what}: {refusal.what}", where=self.url, remedy=f"see its log; {remedy}")
            raise error from refusal

    def begin_anew(self) -> None:
        """Forget the state of the former process: the new one is awake."""
        self.asleep, self.has_weights = frozenset(), True
        self.lease.begin_anew()

    def reset_cache(self, *, timeout: float) -> None:
        """Drop all cached keys and values. Raises EngineRefusal: some are in use for RESET_SECONDS."""
        deadline = time.monotonic() + min(timeout, RESET_SECONDS)
        while self.kind.reset_cache(self, timeout=timeout) is False:
            if time.monotonic() > deadline:
                what = f"{self.name} keeps cached keys and values of old weights"
                raise EngineRefusal(what, where=self.url, remedy="see its log for requests that do not end")
            time.sleep(0.05)

    def resume(self, *, timeout: float) -> None:
        self.lease.check(timeout)
        self.kind.resume(self, timeout=timeout)
        self.lease.end()

    def abort_requests(self, *, timeout: float) -> None:
        """End all requests of the engine. They return the tokens that they have."""
        self.post(self.kind.wire.abort_route, timeout=timeout)

    def start_update(self, version: str, nonce: str, *, timeout: float) -> None:
        self.lease.take(timeout)
        self.kind.start_update(self, version, nonce, timeout=timeout)

    def update(self, info: dict[str, Any], *, timeout: float) -> None:
        self.lease.check(timeout)
        self.kind.update(self, info, timeout=timeout)

    def finish_update(self, version: str, names: Sequence[str], *, timeout: float) -> None:
        self.lease.check(timeout)
        self.kind.finish_update(self, version, names, timeout=timeout)

    def weight_digests(self, *, timeout: float) -> dict[str, str]:
        return self.kind.weight_digests(self, timeout=timeout)

    def prompt_log_probs(self, tokens: Sequence[int], *, timeout: float, replica: int | None = None) -> list[float]:
        """Return log-probs of `tokens` from the second on, at temperature 1, under the engine's present weights."""
        return self.kind.prompt_log_probs(self, tokens, timeout=timeout, replica=replica)

    def sample(self, tokens: Sequence[int], num_tokens: int, *, num: int, timeout: float) -> list[list[int]]:
        """Return `num` texts of exactly `num_tokens` after `tokens`, at temperature 1; always the same ones."""
        from instep.engines.wire import GenerationRequest  # numpy

        asked = {"max_tokens": num_tokens, "temperature": 1.0, "seed": 0, "ignore_eos": True}
        request = GenerationRequest(self.url, "", tokens, asked)

        async def send(payload: dict[str, Any]) -> tuple[dict[str, Any], None]:
            return self.kind.generate(self, payload, timeout=timeout), None

        with RunThreads(1) as pool:  # in a notebook this thread already runs a loop
            made = pool.submit(asyncio.run, self.kind.wire.complete_n(request, num, send)).result()
        return [one.token_ids for one in made]

    def stop(self) -> None:
        """End its process. An external engine resumes, or ends, as when this process dies."""
        self.lease.end()
        super().stop()


class EngineRefusal(EngineError):
    """An engine answered a control call with an HTTP error, `code`.

    `tensor` is the one that it names; "" if it refuses weights without a name; None for any other error.
    """

    def __init__(self, what: str, *, where: str = "", remedy: str = "", tensor: str | None = None, code: int = 400):
        super().__init__(what, where=where, remedy=remedy)
        self.tensor, self.code = tensor, code

    @property
    def is_deliberate(self) -> bool:
        """Return whether a live engine has refused the weights or the call. A dying one answers with 500, too."""
        return self.code < 500 or self.tensor is not None

    @classmethod
    def from_answer(cls, engine: Engine, path: str, code: int, text: str) -> EngineRefusal:
        try:
            message, tensor = engine.kind.read_refusal(json.loads(text)["error"])
        except (ValueError, KeyError, TypeError, AttributeError):
            message, tensor = text[:500], None
        return cls(f"{engine.name} refused {path} with {code}: {message}", where=engine.url, tensor=tensor, code=code)


def external_engines(args: EngineSettings) -> list[Engine]:
    """Return the engines of `--rollout-external-engine-addrs`. `identify` asks for their kind once they are ready."""
    addresses = args.rollout_external_engine_addrs or ()
    in_place = args.weight_sync == SINGLE_COPY
    engines = [Engine(f"engine {i}", f"http://{at}", written_in_place=in_place) for i, at in enumerate(addresses)]
    for engine in engines:
        keys.know(engine.url, keys.given_key(args))
    return engines
