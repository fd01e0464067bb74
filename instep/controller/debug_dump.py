"""On SIGUSR1, write what every process of a run is doing into RUN_DIR/logs/dump-<n>.txt; the run continues."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from instep.engines.engine import Engine
from instep.engines.http import get_json
from instep.rollout import runtime
from instep.system.processes import Process
from instep.system.run_context import carried
from instep.system.shared import shared_by_runs

CHILD_SECONDS = 3.0  # for all children to write their stacks
ENGINE_SECONDS = 2.0  # for an engine to report its state

_dumps: list[Callable[[], None]] = []  # of the open runs


def dump_on_signal(dump: Callable[[], None]) -> Callable[[], object]:
    """Let SIGUSR1 call `dump` in a thread; return a function that ends this. Works in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    undo = ExitStack()
    undo.callback(_listen())
    _dumps.append(dump := carried(dump))
    undo.callback(_dumps.remove, dump)
    return undo.close


@shared_by_runs
def _listen() -> Callable[[], object]:
    def begin(number: int, frame: FrameType | None) -> None:
        for dump in _dumps:
            threading.Thread(target=dump, name="dump", daemon=True).start()

    before: Any = signal.signal(signal.SIGUSR1, begin)
    after = signal.SIG_IGN if before in (None, signal.SIG_DFL) else before  # a late signal must not kill the run's end
    return partial(signal.signal, signal.SIGUSR1, after)


def write_dump(folder: Path, queues: Mapping[str, Any], children: Sequence[Process], engines: Sequence[Engine]) -> Path:
    """Write the next dump-<n>.txt: queues, stacks and tasks of this process, stacks of the children, engines' answers.

    Args:
        queues: the controller's facts, by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(n) for p in folder.glob("dump-*.txt") if (n := p.stem[5:]).isdigit()), default=-1)
    path = folder / f"dump-{number}.txt"
    starts = [_size(p.log_path) for p in children]
    for process in children:
        process.dump_stacks()
    sections: dict[str, Iterable[str]] = {
        "Queues": [f"{name}: {value}" for name, value in queues.items()],
        "Threads of the controller": _thread_stacks(),
        "Tasks of the rollout loop": _task_stacks(home.loop if (home := runtime.state().loop) is not None else None),
        "Processes": _processes(),
        **{f"{engine.name} at {engine.url}": _engine_state(engine) for engine in engines},
    }
    with path.open("w", encoding="utf-8") as out:
        out.write(f"instep, pid {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n\n")
        for title, lines in sections.items():
            out.write("\n".join([f"==== {title}", *lines]) + "\n\n")
            out.flush()
        _wait_for_output(children, starts)
        for process, start in zip(children, starts, strict=True):
            with process.log_path.open("rb") as log:
                log.seek(start)
                text = log.read().decode(errors="replace").rstrip()
            silent = "it wrote nothing in time" if process.alive() else process.describe()
            out.write(f"==== Stacks of {process.name} (pid {process.pid})\n{text or silent}\n\n")
    return path


def _thread_stacks() -> Iterator[str]:
    """Yield the name and stack of each thread, the innermost call last."""
    names = {t.ident: t.name for t in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"--- {names.get(ident, 'a thread of C code')} ({ident})"
        yield "".join(traceback.format_stack(frame)).rstrip()


def _task_stacks(loop: asyncio.AbstractEventLoop | None) -> Iterator[str]:
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


def _processes() -> Iterator[str]:
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            with process.oneshot():
                name = " ".join(process.cmdline())[:100] or process.name()
                cpu, memory = process.cpu_times(), process.memory_info().rss / 1e9
                yield f"{process.pid} {process.status()} cpu {cpu.user + cpu.system:.0f} s rss {memory:.2f} GB {name}"
        except psutil.Error:
            continue  # it has ended


def _engine_state(engine: Engine) -> Iterator[str]:
    for route in engine.kind.state_routes:
        try:
            yield f"{route}: {get_json(engine.url + route, ENGINE_SECONDS)}"
        except (OSError, ValueError) as error:
            yield f"{route}: no answer ({error})"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _wait_for_output(processes: Sequence[Process], starts: Sequence[int]) -> None:
    """Wait until each process has written beyond `starts` bytes of its log, and the logs stop growing."""
    deadline, sizes = time.monotonic() + CHILD_SECONDS, list(starts)
    while time.monotonic() < deadline:
        time.sleep(0.3)
        before, sizes = sizes, [_size(p.log_path) for p in processes]
        silent = [size == start and p.alive() for size, start, p in zip(sizes, starts, processes, strict=True)]
        if sizes == before and not any(silent):
            return
