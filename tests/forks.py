"""Programs of the tests, forked from a process that has imported torch and transformers: most of their time is that.

What runs is real: processes with their own command line, environment, signals and descriptors. Within `cold()` they
start as a user starts them: for tests of starting, and of what acts at an import.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from instep.system import fork_server
from instep.system.fork_server import Forked, ForkServer, Program
from instep.system.processes import OPENMP_ENV

OF_A_RUN = (
    "instep.training.worker instep.training.hf.backend instep.controller.controller instep.train_sync "
    "instep.engines.embedded.scheduler instep.engines.embedded.server tests.no_plots "
    "transformers.models.qwen3.modeling_qwen3 math_verify pytest"
).split()
OF_VLLM = (
    "vllm.entrypoints.cli.main vllm.entrypoints.cli.serve vllm.entrypoints.openai.api_server vllm.v1.engine.core "
    "vllm.v1.engine.async_llm vllm.v1.worker.cpu_worker vllm.v1.executor.uniproc_executor "
    "vllm.model_executor.models.qwen3 instep_engine.vllm"
).split()
COLD = subprocess.Popen
ROOT = Path(__file__).parents[1]
# What every program of the tests gets; the last is set by the import of vLLM, too.
OURS = {**OPENMP_ENV, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
ENVIRONMENT = {"LD_LIBRARY_PATH": "", **os.environ, **OURS}  # before a test, or what it imports, changes it


class OfTests(ForkServer):
    """One of this process of the tests, with some modules; it starts when it is first asked.

    Args:
        parent: it is forked from this one, with the modules of which it begins.
    """

    def __init__(self, modules: Sequence[str], parent: OfTests | None = None) -> None:
        self._modules, self._parent = modules, parent
        self._process: Program | None = None
        self.pid = -1
        self._lock = threading.Lock()

    def fits(self, argv: Sequence[str], env: Any) -> bool:
        with self._lock:
            if self._process is None and list(argv[1:2]) == ["-m"]:
                self._begin()
        imported = {"LD_LIBRARY_PATH": ENVIRONMENT.get("LD_LIBRARY_PATH", "")}  # an import of OpenCV changes it
        return super().fits(argv, {**env, **imported})

    def _begin(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command, fds = [sys.executable, "-m", "tests.forks", str(theirs.fileno())], [theirs.fileno()]
            if self._parent is not None and self._parent.fits(command, ENVIRONMENT):
                self._process = self._parent.start(command, ENVIRONMENT, (0, 1, 2), fds, False, str(ROOT))
            else:
                self._process = COLD(command, cwd=ROOT, env=ENVIRONMENT, pass_fds=fds)
        super().__init__(ours, self._process.pid)
        super().preload(self._modules, ENVIRONMENT)

    def preload(self, modules: Iterable[str], env: Any) -> None:
        """Nothing: a run in the tests' own process asks for it."""

    def close(self) -> None:
        """End it, and let its CPU time count as that of this process."""
        if self._process is not None:
            self._control.close()
            self._process.wait(60)


SERVER = OfTests(OF_A_RUN)
VLLM = OfTests(OF_VLLM, SERVER)  # for tests with the mark `vllm`
SGLANG = OfTests(["tests.sglang_on_cpu"], SERVER)  # for tests with the mark `sglang`
MEGATRON = OfTests(["tests.megatron_on_cpu"], SERVER)  # with its stand-ins for CUDA
SERVERS = (MEGATRON, SGLANG, VLLM, SERVER)
OF_MARKS = {"vllm": VLLM, "sglang": SGLANG}


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` of a program that is forked, where that can be."""

    _forked: Forked | None = None

    def _execute_child(self, args: Any, executable: Any, preexec: Any, close: Any, *more: Any) -> None:  # type: ignore[override]
        pass_fds, cwd, env, _, _, _, stdin, to_stdin, from_stdout, stdout, from_stderr, stderr, *_, session, _ = more
        env = dict(os.environ if env is None else env)
        server = fork_server.current
        if preexec is not None or server is None or not server.fits(args, env):
            super()._execute_child(args, executable, preexec, close, *more)  # type: ignore[misc]
            return
        given = [own if fd == -1 else fd for own, fd in enumerate((stdin, stdout, stderr))]
        words, folder = [os.fspath(word) for word in args], None if cwd is None else os.fspath(cwd)
        self._forked = server.start(words, env, (given[0], given[1], given[2]), pass_fds, session, folder)
        self.pid, self._child_created = self._forked.pid, True
        self._close_pipe_fds(stdin, to_stdin, from_stdout, stdout, from_stderr, stderr)  # type: ignore[attr-defined]

    def __del__(self, *args: Any, **kwargs: Any) -> None:
        if self._forked is None:  # the fork server waits for the others
            super().__del__(*args, **kwargs)  # type: ignore[misc]

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._forked is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc]
        self.returncode = self._forked.poll()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._forked is None:
            return super()._wait(timeout)  # type: ignore[misc]
        self.returncode = self._forked.wait(timeout)
        return self.returncode


def install() -> None:
    """Let all that the tests of this process start be forked."""
    os.environ.update(OURS)
    fork_server.current = SERVER
    subprocess.Popen = Popen  # type: ignore[misc]


@contextlib.contextmanager
def using(server: OfTests | None) -> Iterator[None]:
    """Within, programs are forked from `server`; without one, each gets an interpreter of its own."""
    before, fork_server.current = fork_server.current, server
    try:
        yield
    finally:
        fork_server.current = before


def cold() -> contextlib.AbstractContextManager[None]:
    return using(None)


if __name__ == "__main__":
    fork_server.serve(socket.socket(fileno=int(sys.argv[1])))
