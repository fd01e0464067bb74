"""The supervisor of every subprocess that instep starts: workers, engines, routers.

A child's output goes to a log file; its death is noticed and reported. It never outlives its parent: the parent has one
end of a socket pair (the lifeline), which closes only on the parent's death or on `stop`. The kernel kills the child
with its parent, too. In the other direction the lifeline carries a heartbeat, which shows whether a child hangs
or works. A child that is stopped (SIGSTOP) is noticed sooner, by its state in the kernel.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from os import _exit  # the original function, even after `raise_for_exit` replaced it
from pathlib import Path
from typing import Protocol, TypeVar

from instep.errors import ConfigError, writing
from instep.system import fork_server, kernel, locks
from instep.system.endings import cause_in, end_of_log, fault_of, last_words
from instep.system.kernel import allow_descriptors, catches, die_with_parent, family, state_of
from instep.system.run_context import carried

LIFELINE_VARIABLE = "INSTEP_LIFELINE_FD"
# Engine and trainer take turns on the same cores: a thread may spin about 50 us for its next piece of work, then it
# sleeps. GNU's default (milliseconds) starves the other process; no spinning doubles the step time of a small model.
OPENMP_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}
# Without these the libraries may change the order of sums from one run to the next.
DETERMINISTIC_ENV = {"MKL_CBWR": "AUTO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
T = TypeVar("T")
LOOK_SECONDS = 0.2  # between two checks of the run's processes during a wait
BEAT_SECONDS = 0.5
_pulse: threading.Event | None = None  # of the working thread, if heartbeats depend on it


class Ending(Protocol):
    """A process or connection that ends at some time."""

    def alive(self) -> bool: ...

    def died_within(self, seconds: float) -> bool:
        """Return whether it ends within `seconds`; sockets of a dead process close a moment before it can be reaped."""
        deadline = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


class Process(Ending, Protocol):
    """A child process from its owner's side, on this host or (`cluster/ray_remote.py`) on another one."""

    name: str
    log_path: Path

    @property
    def pid(self) -> int: ...

    def log_tail(self, num_lines: int = 15) -> str: ...
    def fault(self) -> str | None: ...
    def describe(self) -> str: ...
    def remedy(self) -> str: ...
    def dump_stacks(self) -> None: ...
    def terminate(self) -> None: ...
    def wait(self, seconds: float) -> None: ...
    def kill(self) -> None: ...


class SupervisedProcess(Ending):
    """A running child with an owner.

    Args:
        name: its name in errors, such as "engine 0".
        argv: program and arguments.
        log_path: the file for its stdout and stderr.
        env: variables added to the environment.
        pass_fds: further descriptors for the child.
        heartbeat: a child that called `follow_parent` is faulty after this many silent seconds; None: never.
        outlives: it continues after the end of this process.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        heartbeat: float | None = None,
        outlives: bool = False,
    ):
        self.name, self.log_path = name, log_path
        self._heartbeat = heartbeat
        self._silent: float | None = None  # seconds since the last heartbeat
        self._stopped: float | None = None  # seconds since it was stopped
        self._looked = 0.0  # time of the last check
        self._lifeline, theirs = socket.socketpair()
        self._lifeline.setblocking(False)
        with theirs, writing(log_path):
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with open(log_path, "ab") as log, open(os.devnull) as null:
                self._process = fork_server.start(
                    argv,
                    {**os.environ, **(env or {}), LIFELINE_VARIABLE: str(theirs.fileno())},
                    (null.fileno(), log.fileno(), log.fileno()),
                    [theirs.fileno(), *pass_fds],
                    outlives,
                )

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def fault(self) -> str | None:
        """Return the fault, such as "died (SIGKILL)", "is stopped" or "has not answered for 60 s"; None while it runs.

        Call it repeatedly: it measures the duration of a state from call to call. If a call comes late, all processes
        of the run may have been stopped (SLURM suspends jobs this way), and may still seem stopped or silent for a
        moment. So the time between two calls counts as one second at most.
        """
        code = self._process.poll()
        if code is not None:
            said = last_words(self.log_tail().splitlines())
            return f"died ({signal.Signals(-code).name})" if code < 0 else f"died with exit code {code}: {said}"
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 1.0), now
        before, still = self._stopped, state_of(self.pid) == "stopped"
        self._stopped = (0.0 if before is None else before + passed) if still else None
        try:
            if self._lifeline.recv(1 << 16):
                self._silent = 0.0
        except OSError:  # no heartbeat since the last check
            if self._silent is not None:
                self._silent += passed
        if (self._stopped or 0.0) >= kernel.STOPPED_SECONDS:
            return "is stopped"
        if self._heartbeat is not None and (self._silent or 0.0) > self._heartbeat:
            return f"has not answered for {self._silent:.0f} s"
        return None

    def log_tail(self, num_lines: int = 15) -> str:
        """Return the last lines of its output."""
        return "\n".join(end_of_log(self.log_path, 20_000)[-num_lines:])

    def describe(self) -> str:
        """Describe its state or how it ended, with the last lines of its output; for a fault of Python the stack."""
        code, num_lines = self._process.poll(), 15
        if code is None and (still := self._standing()):
            pids = " ".join(map(str, still))
            how = f"is stopped: SIGSTOP was sent to {pids} (kill -CONT {pids} continues it)"
        elif code is None:
            how = f"is running, and its last heartbeat came {self._silent or 0.0:.0f} s ago"
            self.dump_stacks()  # also if it hangs with the interpreter's lock held
            time.sleep(0.3)
            num_lines = 60  # enough for the stacks
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += "; if no one did so by hand, the machine may have run out of memory"
            elif (fault := fault_of("\n".join(end_of_log(self.log_path, 200_000)))).what:
                return f"{self.name} (pid {self.pid}) {how}; in {self.log_path}:\n{fault.text}"
        else:
            how = f"exited with code {code}"
            if (cause := cause_in(end_of_log(self.log_path, 200_000))) and cause not in self.log_tail(num_lines):
                how += f", and before that said {cause!r}"
        return f"{self.name} (pid {self.pid}) {how}; the end of {self.log_path}:\n{self.log_tail(num_lines)}"

    def remedy(self) -> str:
        """Return the remedy for a `fault`."""
        slow = " (or raise --heartbeat-timeout, if it is only slow)" if self.alive() and not self._standing() else ""
        return f"see its log; run again to resume from the last checkpoint{slow}"

    def _standing(self) -> list[int]:
        """Return the pids of stopped processes: of it and its descendants."""
        return [pid for pid in family(self.pid) if state_of(pid) == "stopped"]

    def dump_stacks(self) -> None:
        """Ask the child and its descendants to write all stacks into its log, if they called `follow_parent`."""
        if not self.alive():
            return
        for pid in (pid for pid in family(self.pid) if catches(pid, signal.SIGUSR1)):  # others would end
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.1)  # they write into the same log

    def stop(self, grace: float = 3.0) -> None:
        """End the child and all of its process group: SIGTERM, then SIGKILL after `grace` seconds."""
        stop_all([self], grace)

    def terminate(self) -> None:
        """Ask it to end, if it is alive."""
        if self.alive():
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process would not get the SIGTERM

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, at most `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """End it and its process group at once."""
        self._signal(signal.SIGKILL)
        self._process.wait(10)
        self._lifeline.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def stop_all(processes: Sequence[Process], grace: float = 3.0) -> None:
    """End several children at once, within about `grace` seconds."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + grace
    for process in processes:
        process.wait(max(0.05, deadline - time.monotonic()))
    for process in processes:
        process.kill()


def follow_parent(partner: socket.socket | None = None, *, own_pulse: bool = False) -> None:
    """For a child's first line: die with the parent, send it heartbeats, and write stacks to stderr on SIGUSR1.

    Args:
        partner: a socket with the heartbeats of a process that this one depends on: this process is silent when the
            partner is, and ends when the partner has ended.
        own_pulse: heartbeats stop when the working thread no longer calls `pulse`.
    """
    global _pulse
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.enable()
    allow_descriptors()
    fd = os.environ.pop(LIFELINE_VARIABLE, None)
    if fd is not None:
        line = socket.socket(fileno=int(fd))
        if partner is None:
            _beat(line)  # at once, because silence is noticed from the first heartbeat on
        _pulse = threading.Event() if own_pulse else None
        threading.Thread(target=_hold_lifeline, args=(line, partner, _pulse), name="lifeline", daemon=True).start()


def pulse() -> None:
    """Give a sign of life from the working thread; it costs less than a microsecond."""
    if _pulse is not None:
        _pulse.set()


def _hold_lifeline(line: socket.socket, partner: socket.socket | None, pulse: threading.Event | None) -> None:
    with line:
        line.settimeout(BEAT_SECONDS)
        try:
            while True:
                try:
                    if not line.recv(1):
                        break
                except TimeoutError:
                    if (partner is None or _beats(partner)) and (pulse is None or pulse.is_set()):
                        _beat(line)
                    if pulse is not None:
                        pulse.clear()
        except OSError:  # closed with beats unread
            pass
    _exit(1)


def _beats(partner: socket.socket) -> bool:
    """Return whether the partner has sent a heartbeat since the last check; this process ends with the partner."""
    try:
        if partner.recv(1 << 16, socket.MSG_DONTWAIT):
            return True
    except BlockingIOError:
        return False
    print(f"process {os.getpid()}: the process at the other end of its pipe has ended", flush=True)
    _exit(1)


def _beat(line: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError, TimeoutError):  # the parent has not read for a long time
        line.send(b".", socket.MSG_DONTWAIT)


class FolderLock:
    """A lock on `folder` until `release` or the end of this process, however it ends (flock).

    Args:
        flag: the flag that named the folder, for the error.

    Raises:
        ConfigError: another process has the lock.
        OutputError: the folder is not writable.
    """

    _fd = -1

    def __init__(self, folder: Path, flag: str):
        with writing(folder, flag):
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)  # children get none
        try:
            locks.lock(self._fd)
        except BlockingIOError:
            holder = os.read(self._fd, 100).decode(errors="replace").strip()
            self.release()
            what = f"another run is at work in {folder}: {holder or 'its process is not known'}"
            raise ConfigError(what, where=flag, remedy="wait for its end (or end it), or name another folder") from None
        with writing(folder, flag):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def release(self) -> None:
        fd, self._fd = self._fd, -1  # first, because a second Ctrl-C may come in between
        locks.close(fd)

    __del__ = release


def lock_folders(folders: Mapping[str, str | None]) -> list[FolderLock]:
    """Lock each folder once; `folders` maps each flag to its path, or to None if it is not set."""
    flags: dict[Path, str] = {}
    for flag, path in folders.items():
        if path:
            flags.setdefault(Path(path).resolve(), flag)
    return [FolderLock(path, flag) for path, flag in flags.items()]


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start `work` in a daemon thread, which does not keep the process alive; return the future of its outcome."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - passed to the waiting thread unchanged
            outcome.set_exception(error)

    threading.Thread(target=carried(run), name=name, daemon=True).start()
    return outcome


def watched(work: Callable[[], T], name: str, watch: Callable[[], None]) -> T:
    """Return the outcome of `work`, whose waits must have limits; call `watch` meanwhile, which may raise."""
    outcome = in_thread(work, name)
    while not wait([outcome], LOOK_SECONDS).done:
        watch()
    return outcome.result()


def num_usable_cpus() -> int:
    """Return the number of cores that this process may use (its affinity; a container's quota is not included)."""
    return len(os.sched_getaffinity(0))
