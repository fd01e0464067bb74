"""Python code in a sandbox: without network, files and processes of the host, within limits of memory and time.

bubblewrap makes the sandbox if it is installed and the user is not root; else `namespaces.py` does. If neither can,
nothing runs, unless the user sets `--unsafe-local-exec`: then only the limits hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from instep.errors import ConfigError

LAUNCHER, BOOT, CALLS = map(Path(__file__).with_name, ("namespaces.py", "boot.py", "system_calls.txt"))
END_SECONDS = 5.0  # until a killed process must be gone
FILES_BYTES = 16 << 20  # of all files of a sandbox
OUTPUT_BYTES = 1 << 20  # of standard output, and of standard error: more is cut, and ends the code
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/dev/null", "/dev/urandom")


@dataclass(frozen=True)
class Limits:
    """What the code may use.

    Attributes:
        seconds: limit of wall-clock time, and of the CPU time of each process.
        memory: bytes of address space of each process; Python itself takes some 20 MB.
        processes: processes and threads at a time, with the first one.
        file_bytes: limit of one file; all files together have FILES_BYTES.
    """

    seconds: float = 10.0
    memory: int = 512 << 20
    processes: int = 1
    file_bytes: int = 1 << 20


class Outcome(NamedTuple):
    """The result of the code.

    Attributes:
        status: its exit status. Below 0 or above 128: a signal ended it. None: it was ended for its time or its output.
    """

    stdout: str
    stderr: str
    status: int | None


async def run_python(code: str, stdin: str = "", *, limits: Limits = Limits(), unsafe: bool = False) -> Outcome:  # noqa: B008
    """Run a Python program in a new sandbox and return what it has written.

    Args:
        unsafe: where no sandbox is possible, run with the limits alone (`args.unsafe_local_exec`).

    Raises:
        ConfigError: no sandbox is possible on this host.
    """
    means = None if unsafe and (await _available())[0] is None else await check_sandbox()
    return await _in_sandbox(means or "none", code, stdin, limits)


async def check_sandbox() -> str:
    """Return what makes sandboxes on this host. Raises: ConfigError, nothing can make one."""
    means, reason = await _available()
    if means is None:
        raise ConfigError(
            f"this host has no sandbox for the code of a model: {reason}",
            where="instep.rollout.sandbox",
            remedy="install bubblewrap, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; a "
            "container with CAP_SYS_ADMIN); --unsafe-local-exec runs the code with all your rights",
        )
    return means


_found: tuple[str | None, str] | None = None  # what makes sandboxes here, and why nothing can


async def _available() -> tuple[str | None, str]:
    """Try once what can make a sandbox on this host."""
    global _found
    if _found is None:
        reasons = []
        for means in ("bubblewrap", "namespaces"):
            if means == "bubblewrap" and (os.geteuid() == 0 or shutil.which("bwrap") is None):
                continue  # for root it would not limit processes
            outcome = await _in_sandbox(means, "print(6 * 7)", "", Limits(seconds=30))
            if outcome.stdout == "42\n":
                _found = (means, "")
                return _found
            reasons.append(outcome.stderr.strip()[-200:] or f"{means} gave no answer in time")
        _found = (None, "; ".join(reasons))
    return _found


async def _in_sandbox(means: str, code: str, stdin: str, limits: Limits) -> Outcome:
    """Run the program by `bubblewrap`, by `namespaces`, or with limits alone (`none`)."""
    limited = {
        "RLIMIT_AS": limits.memory,
        "RLIMIT_CPU": max(1, math.ceil(limits.seconds)),
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    if means != "none":  # without a sandbox it would count all processes of the user
        limited["RLIMIT_NPROC"] = limits.processes + 1  # and process 1 of the namespace
    program = code.encode(errors="replace")
    settings = {"limits": limited, "sandbox": means != "none", "calls": CALLS.read_text(), "size": len(program)}
    boot = [os.path.realpath(sys.executable), "-I", "-S", "-c", BOOT.read_text(), json.dumps(settings)]
    own = sys.base_prefix if not sys.base_prefix.startswith("/usr") else "/usr"
    binds = [path for path in dict.fromkeys((*_SYSTEM, own)) if os.path.lexists(path)]
    if means == "bubblewrap":
        boot = [str(shutil.which("bwrap")), *_bubblewrap_flags(binds), *boot]
    else:
        words = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid())]
        boot = [*words, json.dumps(binds if means == "namespaces" else None), *boot]
    return await _run(boot, program + stdin.encode(errors="replace"), limits.seconds)


def _bubblewrap_flags(binds: list[str]) -> list[str]:
    words = "--unshare-all --die-with-parent --new-session --clearenv --cap-drop ALL".split()
    words += ["--size", str(FILES_BYTES), "--tmpfs", "/tmp"]
    for path in binds:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif not path.startswith("/dev/"):
            words += ["--ro-bind", path, path]
    # Its /dev is a separate file system without a size limit.
    return [*words, "--dev", "/dev", "--remount-ro", "/dev", "--chdir", "/tmp", "--remount-ro", "/"]


async def _run(words: list[str], data: bytes, seconds: float) -> Outcome:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *words, stdin=pipe, stdout=pipe, stderr=pipe, env={}, cwd="/", start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    out, err, over = bytearray(), bytearray(), False
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            tasks.create_task(_feed(process.stdin, data))
            tasks.create_task(_read(process.stdout, out))
            tasks.create_task(_read(process.stderr, err))
            tasks.create_task(process.wait())
    except (TimeoutError, ExceptionGroup):  # too slow, or `_read` reports too much output
        over = True
    finally:  # also when the rollout was cancelled
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # without a sandbox, a process that left its session may hold a pipe
            async with asyncio.timeout(END_SECONDS):
                while any([await stream.read(OUTPUT_BYTES) for stream in (process.stdout, process.stderr)]):
                    pass  # asyncio sees its end only when the pipes are empty
                await process.wait()
    status = None if over else process.returncode
    return Outcome(out.decode(errors="replace"), err.decode(errors="replace"), status)


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    try:
        stream.write(data)
        await stream.drain()
        stream.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it has ended, or reads nothing


async def _read(stream: asyncio.StreamReader, into: bytearray) -> None:
    while part := await stream.read(OUTPUT_BYTES - len(into) + 1):
        if len(into) + len(part) > OUTPUT_BYTES:
            raise OverflowError
        into += part
