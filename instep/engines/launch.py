"""Starting an inference engine as a supervised process, and the control calls that go to each engine directly."""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from instep.errors import ConfigError, EngineError
from instep.processes import DETERMINISTIC_ENV, OPENMP_ENV, SupervisedProcess, free_port, port_is_free

# Engines are on loopback or named by address: a proxy of the environment never stands between.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class Engine:
    """One running engine: its address, its process (None for one that somebody else runs) and its control calls."""

    def __init__(self, name: str, url: str, process: SupervisedProcess | None = None):
        self.name, self.url, self.process = name, url, process

    def check_alive(self) -> None:
        """Raise EngineError if the process has ended."""
        if self.process is not None and not self.process.alive():
            raise EngineError(
                f"{self.name} died",
                where=self.process.describe_death(),
                remedy="see its log; run again to resume from the last checkpoint",
            )

    def wait_ready(self, timeout: float) -> None:
        """Until `/health` answers 200."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process is not None and not self.process.alive():
                raise EngineError(
                    f"{self.name} ended before it was ready",
                    where=self.process.describe_death(),
                    remedy="the last lines of its log say why",
                )
            try:
                with _open(self.url + "/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (OSError, http.client.HTTPException):
                time.sleep(0.05)
        tail = self.process.log_tail() if self.process is not None else ""
        raise EngineError(
            f"{self.name} was not ready after {timeout:.0f} s",
            where=f"{self.url}\n{tail}",
            remedy="raise --engine-start-timeout if it is only slow",
        )

    def post(self, path: str, body: dict[str, Any] | None = None, *, timeout: float, **query: Any) -> dict[str, Any]:
        """POST JSON to a control route.

        Raises:
            EngineRefusal: the engine answered with an error.
            EngineError: it did not answer.
        """
        url = self.url + path + ("?" + urllib.parse.urlencode(query) if query else "")
        request = urllib.request.Request(
            url, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with _open(request, timeout=max(0.1, timeout)) as answer:
                text = answer.read()
                return json.loads(text) if text.strip() else {}
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise EngineRefusal.from_answer(self, path, error.code, text) from None
        except (OSError, http.client.HTTPException) as error:
            self.check_alive()
            raise EngineError(
                f"{self.name} did not answer {path} within {timeout:.0f} s: {error}",
                where=url,
                remedy="see its log; raise --sync-timeout if it is only slow",
            ) from error

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()


class EngineRefusal(EngineError):
    """An engine answered a control call with an HTTP error."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "", tensor: str | None = None):
        super().__init__(what, where=where, remedy=remedy)
        self.tensor = tensor

    @classmethod
    def from_answer(cls, engine: Engine, path: str, code: int, text: str) -> EngineRefusal:
        try:
            error = json.loads(text)["error"]
            message, tensor = str(error.get("message", text)), error.get("tensor")
        except (ValueError, KeyError, TypeError, AttributeError):
            message, tensor = text[:500], None
        return cls(f"{engine.name} refused {path} with {code}: {message}", where=engine.url, tensor=tensor)


def start_embedded(args: Any, index: int, *, num_threads: int, log_dir: Path, port: int | None = None) -> Engine:
    """Start an embedded engine on loopback; it is not ready yet when this returns.

    Raises:
        ConfigError: the wanted port is taken.
    """
    if port is not None and not port_is_free(port):
        raise ConfigError(
            f"port {port} is taken", where="--engine-port", remedy="name a free port, or leave the flag out"
        )
    port = port or free_port()
    command = [sys.executable, "-m", "instep.engines.embedded", "--model", str(args.hf_checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", args.device]
    dtypes = {"auto": "bfloat16" if args.precision == "bf16" else "float32", "half": "float16", "float": "float32"}
    command += ["--dtype", dtypes.get(args.vllm_dtype, args.vllm_dtype)]
    if args.vllm_max_model_len:
        command += ["--max-model-len", str(args.vllm_max_model_len)]
    if args.vllm_max_num_seqs:
        command += ["--max-num-seqs", str(args.vllm_max_num_seqs)]
    if args.deterministic_mode:
        command.append("--batch-invariant")
    env = {"OMP_NUM_THREADS": str(num_threads)} | OPENMP_ENV | (DETERMINISTIC_ENV if args.deterministic_mode else {})
    process = SupervisedProcess(f"engine {index}", command, log_dir / f"engine-{index}.log", env)
    return Engine(f"engine {index}", f"http://127.0.0.1:{port}", process)
