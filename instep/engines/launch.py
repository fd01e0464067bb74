"""A running engine and the control calls that go to it directly; the command line of the embedded one."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from instep.engines.capabilities import EMBEDDED, PROTOCOL, Capabilities, of_vllm
from instep.engines.topology import POLICY, Role
from instep.errors import ConfigError, EngineError
from instep.processes import DETERMINISTIC_ENV, OPENMP_ENV, Process, stop_all, watched

INFO_SECONDS = 60.0  # for what vLLM says of itself; it looks at its host first
PLUGIN_ENGINE = "instep_shm"  # instep-vllm's name for its weight-transfer engine
DYING_SECONDS = 6.0  # that vLLM's server may take to end after its core (it looks every 5 s); it answers 500 until then
# Engines are on loopback or named by address: a proxy of the environment never stands between.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
Health = Literal["well", "unwell", "silent", "away"]
PLUGIN_MISMATCH = re.compile(r"WeightMismatch\[(.*?)\]: (.*)", re.DOTALL)  # as instep-vllm words its refusals


class Engine:
    """One running engine: its address, its process (None for one that somebody else runs) and its control calls.

    Args:
        model: the name of the model that it serves; role: regular, prefill or decode.
        update_weights: whether it gets the trainer's weights.
        num_replicas: data-parallel ones, of which each has the weights.
    """

    def __init__(
        self,
        name: str,
        url: str,
        process: Process | None = None,
        capabilities: Capabilities = EMBEDDED,
        *,
        model: str = POLICY,
        role: Role = "regular",
        update_weights: bool = True,
        num_replicas: int = 1,
    ):
        self.name, self.url, self.process, self.capabilities = name, url, process, capabilities
        self.model, self.role, self.update_weights = model, role, update_weights
        self.num_replicas = num_replicas
        self.watch: Callable[[], None] = self.check_alive  # called while a control call waits
        self._calls, self._last_call = set[object](), 0.0  # control calls under way, and when one has ended

    def check_alive(self) -> None:
        """Raise EngineError if the process has ended, or has been stopped."""
        fault = self.process.fault() if self.process is not None else None
        if self.process is not None and fault is not None:
            raise EngineError(
                f"{self.name} {fault}",
                where=self.process.describe(),
                remedy=self.process.remedy(),
            )

    def wait_ready(self, timeout: float) -> None:
        """Until `/health` answers 200."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process is not None and not self.process.alive():
                raise EngineError(
                    f"{self.name} ended before it was ready",
                    where=self.process.describe(),
                    remedy="the last lines of its log say why",
                )
            self.watch()
            if self.healthy(2.0):
                return
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

    def health(self, timeout: float) -> Health:
        """What `/health` says: 200, an error (vLLM's core is dead), nothing in time; or nobody is there."""
        try:
            with _open(self.url + "/health", timeout=timeout):
                return "well"
        except urllib.error.HTTPError:
            return "unwell"
        except TimeoutError:
            return "silent"
        except (OSError, http.client.HTTPException):
            return "away"

    def computes(self, timeout: float) -> bool:
        """False if the process that computes is silent for so long, and no control call keeps it busy.

        A call has a bound of its own. Of an engine that cannot be reached this says nothing: True.
        """
        return self.answers(timeout) or bool(self._calls) or time.monotonic() - self._last_call < timeout

    def answers(self, timeout: float) -> bool:
        """False if `/is_paused` gets no answer: vLLM's server asks its core for it (and not for that of `/health`)."""
        try:
            with _open(self.url + "/is_paused", timeout=timeout):
                return True
        except TimeoutError:
            return False
        except (OSError, http.client.HTTPException):
            return True

    def identify(self) -> None:
        """Ask an engine that somebody else runs what it is. Raises EngineError or ConfigError: nothing usable."""
        try:
            with _open(self.url + "/version", timeout=10.0) as answer:
                self.capabilities = of_vllm(json.loads(answer.read())["version"])
            with _open(self.url + "/server_info?config_format=json", timeout=INFO_SECONDS) as answer:
                config = json.loads(answer.read())["vllm_config"]
            self.num_replicas = int(config["parallel_config"]["data_parallel_size"])
            log_probs = config["model_config"]["logprobs_mode"]
            transfer = (config["weight_transfer_config"] or {}).get("backend", "none")
        except urllib.error.HTTPError as error:
            if error.url.endswith("/version"):
                self.capabilities = EMBEDDED
                return
            what = f"{self.name} has no control routes"
            raise ConfigError(what, where=self.url, remedy="start it with VLLM_SERVER_DEV_MODE=1") from None
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise EngineError(f"{self.name} does not say what it is: {error!r}", where=self.url) from error
        if log_probs != "processed_logprobs":
            what = f"{self.name} answers with {log_probs}, not with those of the distribution that it samples from"
            raise ConfigError(what, where=self.url, remedy="start it with --logprobs-mode processed_logprobs")
        if self.update_weights and transfer != PLUGIN_ENGINE:
            what = f"{self.name} takes weights by {transfer}, not by {PLUGIN_ENGINE}"
            remedy = f"""start it with instep-vllm and --weight-transfer-config '{{"backend": "{PLUGIN_ENGINE}"}}'"""
            raise ConfigError(what, where=self.url, remedy=remedy)

    def post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float,
        replica: int | None = None,
        **query: Any,
    ) -> dict[str, Any]:
        """POST JSON to a control route; the processes of the run are watched meanwhile.

        Args:
            replica: which one is to answer; None: any, or, where all are meant (a pause, say), all of them.

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
            with _open(request, timeout=max(0.1, timeout)) as answer:
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

    # ---- a weight session (docs/architecture.md), the same steps for every kind --------------------------------------

    def start_update(self, version: str, nonce: str, *, timeout: float) -> None:
        """Announce a session; a former one that never ended is abandoned."""
        session = {"version": version, "nonce": nonce}
        if not self.capabilities.plugin:
            self.post("/start_weight_update", session, timeout=timeout)
            return
        announced = {"init_info": {"protocol": PROTOCOL, **session}}
        try:
            self.post("/init_weight_transfer_engine", announced, timeout=timeout)
        except EngineRefusal as refusal:
            if "a session is active" not in refusal.what:
                raise
            with contextlib.suppress(EngineRefusal):  # of a worker on which it is over already
                self.post("/finish_weight_update", timeout=timeout)
            self.post("/init_weight_transfer_engine", announced, timeout=timeout)
        self.post("/start_weight_update", timeout=timeout)

    def update(self, info: dict[str, Any], *, timeout: float) -> None:
        """One bucket, or a checkpoint on disk: checked, then loaded."""
        self.post("/update_weights", {"update_info": info}, timeout=timeout)

    def finish_update(self, version: str, names: Sequence[str], *, timeout: float) -> None:
        """End the session; refused if one of `names`, or another weight of the model, was not delivered."""
        if self.capabilities.plugin:
            self.update({"backend": "complete", "names": list(names)}, timeout=timeout)
        self.post("/finish_weight_update", {"weight_version": version}, timeout=timeout)

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
            error = json.loads(text)["error"]
            message, tensor = str(error.get("message", text)), error.get("tensor")
            if match := PLUGIN_MISMATCH.search(message):
                message, tensor = match[2], match[1] or None
        except (ValueError, KeyError, TypeError, AttributeError):
            message, tensor = text[:500], None
        return cls(f"{engine.name} refused {path} with {code}: {message}", where=engine.url, tensor=tensor, code=code)


def embedded_command(args: Any, path: str, words: Sequence[str], host: str, port: int | str) -> list[str]:
    """What follows the interpreter, for an embedded engine that serves `path` on `host` only.

    Args:
        words: of `--max-model-len`, `--max-num-seqs` and `--dtype` those that are set.
    """
    command = ["-m", "instep.engines.embedded", "--model", path, "--host", host, "--port", str(port)]
    command += ["--device", args.device, *([] if "--dtype" in words else ["--dtype", engine_dtype(args)]), *words]
    return [*command, "--batch-invariant"] if args.deterministic_mode else command


def embedded_env(args: Any, num_threads: int) -> dict[str, str]:
    env = {"OMP_NUM_THREADS": str(num_threads), **OPENMP_ENV}
    return env | (DETERMINISTIC_ENV if args.deterministic_mode else {})


def engine_dtype(args: Any) -> str:
    """Of an engine's weights where `--vllm-dtype` does not say it: the trainer's. `auto` of a plan is a GPU's."""
    full = args.precision == "fp32" or (args.precision == "auto" and args.device == "cpu")
    return "float32" if full else "bfloat16"
