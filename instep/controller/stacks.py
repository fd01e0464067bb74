"""SIGUSR1 writes what every process of a run is doing into RUN_DIR/logs/dump-<n>.txt; the run goes on.

The work is done in a thread that the signal only wakes, so that it is also done while the main thread is in C code.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from instep.cluster.local import WorkerGroup
from instep.data.ledger import Ledger
from instep.engines.engine import Engine
from instep.engines.http import get_json
from instep.rollout import runtime
from instep.system.processes import Process

CHILD_SECONDS = 3.0  # for all children to have written their stacks
ENGINE_SECONDS = 2.0  # for an engine to say what it holds


class DumpOnSignal:
    """A context manager: while it is open, SIGUSR1 calls `dump` in a thread. It acts in the main thread only."""

    def __init__(self, dump: Callable[[], None]):
        self._dump = dump
        self._in_main = threading.current_thread() is threading.main_thread()
        self._before: Any = None

    def __enter__(self) -> DumpOnSignal:
        if self._in_main:
            self._wake, self._sleep = socket.socketpair()
            self._sleep.setblocking(False)
            self._fd_before = signal.set_wakeup_fd(self._sleep.fileno(), warn_on_full_buffer=False)
            self._before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
            threading.Thread(target=self._listen, name="dump-on-signal", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._in_main:
            unset = self._before in (None, signal.SIG_DFL)  # the end of a run must not be killed by a late one
            signal.signal(signal.SIGUSR1, signal.SIG_IGN if unset else self._before)
            signal.set_wakeup_fd(self._fd_before)
            self._sleep.close()

    def _listen(self) -> None:
        with self._wake:
            while signals := self._wake.recv(64):
                if signal.SIGUSR1 in signals:
                    try:
                        self._dump()
                    except Exception:  # noqa: BLE001 - the border of a diagnosis: a full disk, say, must not end it for good
                        traceback.print_exc()


def write_dump(
    folder: Path,
    facts: Callable[[], Mapping[str, Any]],
    children: Sequence[Process],
    engines: Sequence[Engine],
) -> Path:
    """Write the next dump-<n>.txt: queues, stacks and tasks of this process, stacks of the children, engines' answers.

    Args:
        facts: is called once, and returns what the controller knows of its queues.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(n) for p in folder.glob("dump-*.txt") if (n := p.stem[5:]).isdigit()), default=-1)
    path = folder / f"dump-{number}.txt"
    sizes = [_size(p.log_path) for p in children]
    for process in children:
        process.dump_stacks()
    with path.open("w", encoding="utf-8") as out:
        for part in (
            [f"instep, pid {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}"],
            _section("Queues", _lines(facts)),
            _section("Threads of the controller", thread_stacks()),
            _section("Tasks of the rollout loop", task_stacks(runtime.background_loop())),
            _section("Processes", _processes()),
        ):
            out.write("\n".join(part) + "\n\n")
            out.flush()
        for engine in engines:
            out.write("\n".join(_section(f"{engine.name} at {engine.url}", _engine_state(engine))) + "\n\n")
        for process, text in zip(children, _new_output(children, sizes), strict=True):
            out.write("\n".join(_section(f"Stacks of {process.name} (pid {process.pid})", [text])) + "\n\n")
    return path


def describe_queues(step: str, ledger: Ledger, groups: Sequence[WorkerGroup]) -> dict[str, Any]:
    """Return the ledger's counts, the requests of the rollout, and the calls that the workers are busy with."""
    return {
        "phase": step,
        "ledger": ledger.counts() | {"num_buffered": ledger.num_buffered, "num_outstanding": ledger.num_outstanding},
        "groups, done of total": runtime.last_progress or "no rollout yet",
        "requests in flight": {u: n for u, n in runtime.requests_in_flight.items() if n} or "none",
        "call to the workers": "; ".join(f"{g.role}: {g.waits_for}" for g in groups if g.waits_for) or "none",
    }


def thread_stacks() -> Iterator[str]:
    """Yield the name and stack of each thread, the innermost call last."""
    names = {t.ident: t.name for t in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"--- {names.get(ident, 'a thread of C code')} ({ident})"
        yield "".join(traceback.format_stack(frame)).rstrip()


def task_stacks(loop: asyncio.AbstractEventLoop | None) -> Iterator[str]:
    """Yield each task of `loop` and its chain of coroutines, down to what it waits for."""
    for task in sorted(asyncio.all_tasks(loop), key=lambda t: t.get_name()) if loop is not None else ():
        yield f"--- {task.get_name()}"
        yield from _awaits(task.get_coro())


def _awaits(awaitable: Any) -> Iterator[str]:
    while awaitable is not None:
        frame: FrameType | None = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        if frame is None:
            yield f"  waits for {awaitable!r:.160}"
            return
        yield f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        if frame.f_code.co_qualname == "bounded_steps.__await__":  # it drives its coroutine by hand
            awaitable = frame.f_locals["self"].coro
        else:
            awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)


def _section(title: str, lines: Iterable[str]) -> list[str]:
    try:
        return [f"==== {title}", *lines]
    except Exception:  # noqa: BLE001 - a dump says what it can: what changes while it is looked at must not end it
        return [f"==== {title}", "could not be looked at:", traceback.format_exc()]


def _lines(facts: Callable[[], Mapping[str, Any]]) -> Iterator[str]:
    for name, value in facts().items():
        yield f"{name}: {value}"


def _processes() -> Iterator[str]:
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            with process.oneshot():
                name = " ".join(process.cmdline())[:100] or process.name()
                cpu, memory = process.cpu_times(), process.memory_info().rss / 1e9
                yield f"{process.pid} {process.status()} cpu {cpu.user + cpu.system:.0f} s rss {memory:.2f} GB {name}"
        except psutil.Error:
            continue  # it ended meanwhile


def _engine_state(engine: Engine) -> Iterator[str]:
    for route in engine.kind.state_routes:
        try:
            yield f"{route}: {get_json(engine.url + route, ENGINE_SECONDS)}"
        except (OSError, ValueError) as error:
            yield f"{route}: no answer ({error})"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _new_output(processes: Sequence[Process], before: Sequence[int]) -> list[str]:
    """Return what each process has written into its log beyond `before` bytes, once nothing more comes."""
    deadline, sizes = time.monotonic() + CHILD_SECONDS, list(before)
    while time.monotonic() < deadline:
        time.sleep(0.3)
        now = [_size(p.log_path) for p in processes]
        waited = [s == b and p.alive() for s, b, p in zip(now, before, processes, strict=True)]
        if now == sizes and not any(waited):
            break
        sizes = now
    texts = []
    for process, start in zip(processes, before, strict=True):
        with process.log_path.open("rb") as log:
            log.seek(start)
            text = log.read().decode(errors="replace").rstrip()
        texts.append(text or ("it wrote nothing within the time" if process.alive() else process.describe()))
    return texts
