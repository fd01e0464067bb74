"""A running engine: its process, its health, and the control calls that go to it directly."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from instep.engines import keys
from instep.engines.capabilities import Capabilities
from instep.engines.http import check_open, check_server, open_directly, open_without_key
from instep.engines.kind import EngineKind, all_kinds
from instep.engines.topology import POLICY, ServerRole
from instep.errors import EngineError
from instep.processes import Process, stop_all, watched

if TYPE_CHECKING:
    from instep.arguments.settings import Settings

HealthAnswer = Literal["well", "unwell", "silent", "away"]


class Engine:
    """One running engine: its address, its process and its control calls.

    Args:
        process: None for an engine that somebody else runs.
        kind: None for an engine that somebody else runs, until `identify` has asked it.
        model: the name of the model that it serves; role: regular, prefill or decode.
        update_weights: whether it gets the trainer's weights.
        num_replicas: the number of data-parallel replicas, each of which has the weights.
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
    ):
        self.name, self.url, self.process, self._kind = name, url, process, kind
        self.model, self.role, self.update_weights = model, role, update_weights
        self.num_replicas = num_replicas
        self.watch: Callable[[], None] = self.check_alive  # called while a control call waits
        self._calls, self._last_call = set[object](), 0.0  # control calls under way, and when one has ended

    @property
    def kind(self) -> EngineKind:
        assert self._kind is not None, f"{self.name} has not been asked yet what it is"
        return self._kind

    @property
    def capabilities(self) -> Capabilities:
        return self.kind.capabilities

    def check_alive(self) -> None:
        """Raise EngineError if the process has ended, has been stopped or hangs."""
        if self.process is not None and (fault := self.process.fault()) is not None:
            raise EngineError(f"{self.name} {fault}", where=self.process.describe(), remedy=self.process.remedy())

    def wait_ready(self, timeout: float) -> None:
        """Wait until `/health` answers 200.

        Raises:
            EngineError: the process ends, somebody else listens at its port, or `timeout` seconds are over.
            ConfigError: it refuses to answer us (401, 403).
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process is not None and not self.process.alive():
                raise EngineError(
                    f"{self.name} ended before it was ready",
                    where=self.process.describe(),
                    remedy="the last lines of its log say why",
                )
            self.watch()
            health = self.health(2.0)
            if health == "well":
                check_server(self.name, self.url)
                return
            if health == "unwell":
                check_open(self.url + "/health", timeout=2.0)
            time.sleep(0.05)
        tail = self.process.log_tail() if self.process is not None else ""
        raise EngineError(
            f"{self.name} was not ready after {timeout:.0f} s",
            where=f"{self.url}\n{tail}",
            remedy="raise --engine-start-timeout if it is only slow",
        )

    def healthy(self, timeout: float) -> bool:
        """Whether `/health` answers 200 now."""
        return self.health(timeout) == "well"

    def health(self, timeout: float) -> HealthAnswer:
        """Ask `/health`: well (200), unwell (an error: vLLM's core is dead), silent (no answer in time), away (no
        connection)."""
        try:
            with open_without_key(self.url + "/health", timeout=timeout):  # somebody else may listen there first
                return "well"
        except urllib.error.HTTPError:
            return "unwell"
        except TimeoutError:
            return "silent"
        except (OSError, http.client.HTTPException):
            return "away"

    def computes(self, timeout: float) -> bool:
        """False if what computes is silent for `timeout` seconds and no control call keeps it busy.

        Control calls have bounds of their own. An engine that cannot be reached counts as computing.
        """
        return self.answers(timeout) or bool(self._calls) or time.monotonic() - self._last_call < timeout

    def answers(self, timeout: float) -> bool:
        """False if what computes does not answer the kind's `core_route` within `timeout` seconds."""
        try:
            with open_directly(self.url + self.kind.core_route, timeout=timeout):
                return True
        except TimeoutError:
            return False
        except (OSError, http.client.HTTPException):
            return True

    def identify(self) -> None:
        """Ask an engine that somebody else runs of which kind it is.

        Raises:
            EngineError: it does not say, or is of no known kind.
            ConfigError: it is, and instep cannot use it as it was started.
        """
        try:
            found = [kind for known in all_kinds() if (kind := known.identify(self)) is not None]
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise EngineError(
                f"{self.name} does not say what it is: {error!r}",
                where=self.url,
                remedy="is this the address of an engine? start a vLLM with instep-vllm there (docs/engines.md)",
            ) from error
        if not found:
            known = ", ".join(kind.title for kind in all_kinds())
            raise EngineError(
                f"{self.name} is none of the engines that instep knows: {known}",
                where=self.url,
                remedy="start a vLLM with instep-vllm at this address (docs/engines.md)",
            )
        self._kind = found[0]

    def post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float,
        replica: int | None = None,
        **query: Any,
    ) -> dict[str, Any]:
        """POST JSON to a control route, while the processes of the run are watched; returns the JSON of the answer.

        Args:
            replica: the data-parallel replica that is to answer; None: any of them, or all where the route means all.

        Raises:
            EngineRefusal: the engine answered with an error.
            EngineError: it did not answer.
        """
        self._calls.add(call := object())
        try:
            work = partial(self._post, path, body, timeout, replica, query)
            return watched(work, f"{self.name} {path}", lambda: self.watch())
        finally:
            self._last_call = time.monotonic()
            self._calls.discard(call)

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
                f"{self.name} answered {path} with something that is no JSON: {error}",
                where=url,
                remedy="see its log; does something else answer at its address?",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            if self.process is not None and not isinstance(error, TimeoutError):
                self.process.died_within(1.0)
            self.check_alive()
            raise EngineError(
                f"{self.name} did not answer {path} within {timeout:.0f} s: {error}",
                where=url,
                remedy="see its log; raise --sync-timeout if it is only slow",
            ) from error

    # ---- control calls, as its kind makes them (see EngineKind) ------------------------------------------------------

    def pause(self, mode: str, *, timeout: float) -> None:
        self.kind.pause(self, mode, timeout=timeout)

    def reset_cache(self, *, timeout: float) -> None:
        self.kind.reset_cache(self, timeout=timeout)

    def resume(self, *, timeout: float) -> None:
        self.kind.resume(self, timeout=timeout)

    def abort_requests(self, *, timeout: float) -> None:
        """End all requests of the engine; they answer with the tokens that they have."""
        self.post(self.kind.wire.abort_route, timeout=timeout)

    def start_update(self, version: str, nonce: str, *, timeout: float) -> None:
        self.kind.start_update(self, version, nonce, timeout=timeout)

    def update(self, info: dict[str, Any], *, timeout: float) -> None:
        self.kind.update(self, info, timeout=timeout)

    def num_workers(self, timeout: float) -> int:
        """The number of processes that hold its weights, whole or in part."""
        return self.kind.num_workers(self, timeout)

    def finish_update(self, version: str, names: Sequence[str], *, timeout: float) -> None:
        self.kind.finish_update(self, version, names, timeout=timeout)

    def weight_digests(self, *, timeout: float) -> dict[str, str]:
        return self.kind.weight_digests(self, timeout=timeout)

    def prompt_log_probs(self, tokens: Sequence[int], *, timeout: float, replica: int | None = None) -> list[float]:
        """Log-probs of the second to the last of `tokens` at temperature 1, under the engine's present weights."""
        wire = self.kind.wire
        answer = self.post(wire.generate_route, wire.scoring_request(tokens), timeout=timeout, replica=replica)
        return wire.prompt_log_probs(answer, tokens, f"{self.name} at {self.url}")

    def stop(self) -> None:
        if self.process is not None:
            stop_all([self.process])


class EngineRefusal(EngineError):
    """An engine answered a control call with an HTTP error, `code`."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "", tensor: str | None = None, code: int = 400):
        super().__init__(what, where=where, remedy=remedy)
        self.tensor, self.code = tensor, code

    @classmethod
    def from_answer(cls, engine: Engine, path: str, code: int, text: str) -> EngineRefusal:
        try:
            message, tensor = engine.kind.read_refusal(json.loads(text)["error"])
        except (ValueError, KeyError, TypeError, AttributeError):
            message, tensor = text[:500], None
        return cls(f"{engine.name} refused {path} with {code}: {message}", where=engine.url, tensor=tensor, code=code)


def external_engines(args: Settings) -> list[Engine]:
    """The engines of `--rollout-external-engine-addrs`; their kind is asked for when they are ready (`identify`)."""
    addresses = args.rollout_external_engine_addrs or ()
    engines = [Engine(f"engine {i}", f"http://{address}") for i, address in enumerate(addresses)]
    for engine in engines:
        keys.know(engine.url, keys.given_key(args))
    return engines
