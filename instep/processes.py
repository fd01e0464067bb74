"""One supervisor for every subprocess that instep starts: workers, engines, routers.

A child keeps its output in a log file, its death is noticed and quoted, and it never outlives its parent: the parent
holds the write end of a pipe (the lifeline) that only its own death or `stop` closes, and on Linux the kernel is told
to kill the child with it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LIFELINE_VARIABLE = "INSTEP_LIFELINE_FD"
# Engine and trainer take turns on the same cores: a thread may spin for some 50 us for its next piece of work, then it
# sleeps. GNU's default (milliseconds) starves the other process, no spinning at all doubles a small model's step.
OPENMP_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}
# Without these the libraries may choose another order of summation from one run to the next.
DETERMINISTIC_ENV = {"MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


class SupervisedProcess:
    """A running child with an owner.

    Args:
        name: what errors call it, such as "engine 0".
        argv: program and arguments.
        log_path: file that gets its stdout and stderr.
        env: variables added to the environment.
        pass_fds: further descriptors for the child.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ):
        self.name, self.log_path = name, log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, self._lifeline = os.pipe()
        try:
            with open(log_path, "ab") as log:
                self._process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {}), LIFELINE_VARIABLE: str(read_end)},
                    pass_fds=[read_end, *pass_fds],
                    start_new_session=True,  # a Ctrl-C in the terminal reaches the owner, which ends its children
                )
        finally:
            os.close(read_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def log_tail(self, num_lines: int = 15) -> str:
        """The last lines of its output."""
        with open(self.log_path, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 20_000))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def describe_death(self) -> str:
        """How it ended, and what it said last."""
        code = self._process.poll()
        if code is None:
            how = "is running"
        elif code < 0:
            how = f"was ended by signal {-code} ({signal.Signals(-code).name})"
            if code == -signal.SIGKILL:
                how += "; if nobody did so by hand, the machine may have run out of memory"
        else:
            how = f"exited with code {code}"
        return f"{self.name} (pid {self.pid}) {how}; the end of {self.log_path}:\n{self.log_tail()}"

    def dump_stacks(self) -> None:
        """Ask a child that called `follow_parent` to write all its stacks into its log."""
        if self.alive():
            os.kill(self.pid, signal.SIGUSR1)

    def stop(self, grace: float = 3.0) -> None:
        """End the child and all of its process group: SIGTERM, then SIGKILL after `grace` seconds."""
        stop_all([self], grace)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def stop_all(processes: Sequence[SupervisedProcess], grace: float = 3.0) -> None:
    """End several children at once, within about `grace` seconds."""
    for process in processes:
        if process.alive():
            process._signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    for process in processes:
        try:
            process._process.wait(max(0.05, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
    for process in processes:
        process._signal(signal.SIGKILL)  # also what the child itself has started
        process._process.wait(10)
        process._close_lifeline()


def follow_parent() -> None:
    """For a child's first line: die with the parent, and write stacks to stderr on SIGUSR1."""
    parent = os.getppid()
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.enable()
    if os.getppid() != parent:
        os._exit(1)
    fd = os.environ.pop(LIFELINE_VARIABLE, None)
    if fd is not None:
        threading.Thread(target=_wait_for_eof, args=(int(fd),), name="lifeline", daemon=True).start()


def _wait_for_eof(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os._exit(1)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def num_usable_cpus() -> int:
    """Cores that this process may use (its affinity; a container's quota is not seen)."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
