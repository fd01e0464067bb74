"""A process with slow imports already done; workers and engines are forked from it.

Workers and engines are `python -m MODULE ...`; most of their start is the import of torch and transformers. The fork
server imports these once, while the command that owns it prepares its run. It starts no thread and uses no GPU. Forked
processes share the memory of the imports. Otherwise they run as in a fresh interpreter, with their own environment,
folder, descriptors, session, signals and command line. (multiprocessing's fork server runs functions, and gives them
none of these.)
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import re
import runpy
import select
import signal
import site
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import _exit  # the original function, even if a hook replaces it
from typing import NoReturn

from instep.system.kernel import die_with_parent

# Variables that act when Python starts or a library is imported: another value needs a separate interpreter.
_EARLY = re.compile(r"(PYTHON|LD_|OMP_|GOMP_|MALLOC_|PYTORCH_|TORCH_|HF_|TRANSFORMERS_)")
# These are set after the fork; Ray sets PYTHONBREAKPOINT, which Python reads at each breakpoint().
_IN_TIME = {"OMP_NUM_THREADS", "PYTHONBREAKPOINT", "PYTHONPATH", "PYTHONUNBUFFERED", "TORCH_COMPILE_DISABLE"}
_CHUNK = 1 << 16
_MOST_FDS = 32  # the most descriptors for one process
_ANSWER_SECONDS = 120.0  # for the server to import and fork, on a busy machine


class Forked:
    """A process that a fork server started; see `subprocess.Popen`."""

    def __init__(self, line: socket.socket, argv: Sequence[str], pid: int):
        self._line, self.args, self.pid = line, list(argv), pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self._ended_within(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code. Raises subprocess.TimeoutExpired."""
        code = self._ended_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def kill(self) -> None:
        """End it, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _ended_within(self, seconds: float | None) -> int | None:
        if self.returncode is None and _readable(self._line, seconds):  # several threads may wait
            with self._lock:
                if self.returncode is None:
                    code = self._line.recv(100)  # empty: the server was killed, and this process with it
                    self.returncode = int(code) if code else -signal.SIGKILL
        return self.returncode

    def __del__(self) -> None:
        self._line.close()


Program = subprocess.Popen[bytes] | Forked


class ForkServer:
    """The owner's end of a fork server. The server ends with its owner, and its forked processes end with it.

    Args:
        control: the socket to `serve`, which has the other end.
        pid: the pid of the server, a child of this process.
    """

    def __init__(self, control: socket.socket, pid: int):
        self._control, self.pid = control, pid
        self._early: dict[str, str] | None = None

    @classmethod
    def fork(cls) -> ForkServer:
        """Fork this process, which must have no other thread."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if (pid := os.fork()) == 0:
            ours.close()
            die_with_parent()
            serve(theirs)
        theirs.close()
        return cls(ours, pid)

    def preload(self, modules: Iterable[str], env: Mapping[str, str]) -> None:
        """Let it import `modules` with the variables `env`, without waiting for it."""
        self._control.send(json.dumps({"modules": list(modules), "env": dict(env)}).encode())
        self._early = _early(env)

    def fits(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether a program can be forked from the imported modules."""
        return list(argv[:2]) == [sys.executable, "-m"] and _early(env) == self._early

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdio: tuple[int, int, int],
        pass_fds: Sequence[int] = (),
        new_session: bool = True,
        cwd: str | None = None,
    ) -> Forked:
        """Run `argv` with only the variables `env`, in `cwd` (default: here); `stdio` and `pass_fds` are descriptors.

        Raises:
            OSError: the server has ended, there is no such folder, or there is no room for a process.
        """
        os.umask(umask := os.umask(0o077))
        request = {"argv": list(argv), "env": dict(env), "cwd": cwd or os.getcwd(), "new_session": new_session}
        request |= {"fds": [0, 1, 2, *pass_fds], "umask": umask}
        data = json.dumps(request).encode()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._control, [b"fork"], [theirs.fileno(), *stdio, *pass_fds])
        for at in range(0, len(data), _CHUNK):
            ours.send(data[at : at + _CHUNK])
        ours.shutdown(socket.SHUT_WR)
        answer = ours.recv(_CHUNK) if _readable(ours, _ANSWER_SECONDS) else b"it does not answer"
        if not answer.startswith(b"pid "):
            ours.close()
            raise OSError(f"the fork server started no process: {answer.decode() or 'it has ended'}")
        return Forked(ours, argv, int(answer[4:]))

    def close(self) -> None:
        """End it, even during an import, and all processes forked from it."""
        self._control.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


current: ForkServer | None = None  # the fork server of this process


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """Run a fork server beside this process, which must have no other thread yet."""
    global current
    before, server = current, ForkServer.fork()
    current = server
    try:
        yield
    finally:
        server.close()
        current = before


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    stdio: tuple[int, int, int],
    pass_fds: Sequence[int] = (),
    outlives: bool = False,
) -> Program:
    """Run a program in a new session: a Ctrl-C in the terminal reaches only its owner. Raises: OSError.

    Fork it from `current` if possible. A program that outlives this process is not forked: forked ones end with it.
    """
    if current is not None and not outlives and current.fits(argv, env):
        return current.start(argv, env, stdio, pass_fds)
    stdin, stdout, stderr = stdio
    return subprocess.Popen(
        list(argv), stdin=stdin, stdout=stdout, stderr=stderr, env=env, pass_fds=pass_fds, start_new_session=True
    )


def _early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if _EARLY.match(name) and name not in _IN_TIME}


def _readable(line: socket.socket, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * max(seconds, 0.0)))


# ---- the server ------------------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> NoReturn:
    """Import and fork for the owner until it closes its end of `control`; forked processes are killed then."""
    import setproctitle

    os.setsid()
    setproctitle.setproctitle("instep: fork server")
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # ignored signals stay ignored, as for any program
            signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # otherwise pipes of the owner would stay open after its end
        os.dup2(null, fd)
    own = [os.getcwd(), "", *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    libraries = [entry for entry in sys.path if entry not in own]
    running: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a process -> its pid, and its owner's socket
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                poll.unregister(fd)
                os.close(fd)
                _say_code(*running.pop(fd))
                continue
            data, fds, _, _ = socket.recv_fds(control, 1 << 20, _MOST_FDS)
            if not data:
                _exit(0)
            if not fds:
                _preload(**json.loads(data))
                continue
            line = socket.socket(fileno=fds[0])
            try:
                pid = os.fork()
            except OSError as error:
                line.send(str(error).encode())
                line.close()
            else:
                if pid == 0:
                    _run_forked(line, fds[1:], libraries)
                process = os.pidfd_open(pid)
                running[process] = pid, line
                poll.register(process, select.POLLIN)
            for given in fds[1:]:
                os.close(given)


def _say_code(pid: int, line: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    with line, contextlib.suppress(OSError):  # the owner no longer needs it
        line.send(str(os.waitstatus_to_exitcode(status)).encode())


def _preload(modules: Sequence[str], env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    gc.disable()  # see `importing.first_import`
    for name in modules:
        with contextlib.suppress(ImportError):  # the process that needs the module reports it
            importlib.import_module(name)
    gc.freeze()


def _run_forked(line: socket.socket, fds: Sequence[int], libraries: Sequence[str]) -> NoReturn:
    """Run the requested process, from here to its end."""
    code = 1
    try:
        request = json.loads(b"".join(iter(lambda: line.recv(_CHUNK), b"")))
        argv, env = request["argv"], request["env"]
        die_with_parent()
        if request["new_session"]:
            os.setsid()
        os.umask(request["umask"])
        try:
            os.chdir(request["cwd"])
        except OSError as error:
            line.send(str(error).encode())
            _exit(1)
        line.send(f"pid {os.getpid()}".encode())
        _set_descriptors(fds, request["fds"])
        _become(argv, env, request["cwd"], libraries)
        code = _exit_code(lambda: runpy.run_module(argv[2], run_name="__main__", alter_sys=True))
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # never return to the server's code
        _exit(code)


def _set_descriptors(have: Sequence[int], want: Sequence[int]) -> None:
    """Give the descriptors `have` the numbers `want`, and close all others."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(want) + 1) for fd in have]
    for fd, number in zip(moved, want, strict=True):
        os.dup2(fd, number)
    kept = sorted(want)
    for low, high in zip([-1, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
        if low + 1 < high:  # for an empty range Python 3.11 closes all
            os.closerange(low + 1, high)


def _become(argv: Sequence[str], env: Mapping[str, str], cwd: str, libraries: Sequence[str]) -> None:
    """Do what the kernel and Python do for a new program."""
    import setproctitle

    setproctitle.setproctitle(" ".join(argv))
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *libraries]
    importlib.invalidate_caches()
    sys.argv[:], sys.orig_argv[:] = argv[2:], argv
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    gc.enable()
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # otherwise all forks draw the same numbers
    if (torch := sys.modules.get("torch")) is not None and "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    if (dynamo := sys.modules.get("torch._dynamo.config")) is not None:
        dynamo.disable = env.get("TORCH_COMPILE_DISABLE") == "1"  # type: ignore[attr-defined]


def _exit_code(main: Callable[[], object]) -> int:
    """Return the exit code that the interpreter would give for the end of a program."""
    try:
        main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - the process ends here
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0
