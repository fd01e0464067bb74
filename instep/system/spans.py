"""The work of a run's processes as spans on one clock. Spans are kept only while a profile records.

`span` marks a block of code. Without a recording it returns one empty context, which costs less than a microsecond.

The clock counts nanoseconds of the wall clock. A process compares the wall clock once with its monotonic clock, and
measures with the latter. So all processes of a host agree within microseconds; hosts agree as well as NTP allows.
Events of torch's profiler use the same clock, within a tenth of a millisecond.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from instep.system.run_context import PerRun

P = ParamSpec("P")
T = TypeVar("T")
Facts = Callable[[], dict[str, Any]]
Lane = str | int

ROLLOUT = "rollout"  # the track of samples, which the controller's process generates
MAIN = "main"  # the lane of a process's main thread
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_CPU = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "overhead")


class Span(NamedTuple):
    """A time with one piece of work.

    Attributes:
        track: the process, or a part of one, that did it, by its name in the profile.
        lane: a row of the track. Numbers are tasks and threads, which come and go: they share rows.
        begin, end: in nanoseconds of the wall clock.
        facts: facts about it, as JSON values. `kind` is torch's category of an event.
    """

    track: str
    lane: Lane
    name: str
    begin: int
    end: int
    facts: dict[str, Any]


class _Recorder:
    def __init__(self, track: str):
        self.track, self.spans = track, list[Span]()
        pairs = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(9)]
        before, wall, after = min(pairs, key=lambda pair: pair[2] - pair[0])
        self._offset = wall - (before + after) // 2

    def now(self) -> int:
        return time.monotonic_ns() + self._offset

    @contextlib.contextmanager
    def block(self, name: str, track: str, facts: Facts | None) -> Iterator[None]:
        begin = self.now()
        try:
            yield
        finally:
            known = facts() if facts is not None else {}
            self.spans.append(Span(track or self.track, _lane(), name, begin, self.now(), known))


class _State:
    recorder: _Recorder | None = None


_state = PerRun(_State)
_NOTHING = contextlib.nullcontext()


def start(track: str) -> None:
    """Record from now on. Spans without a track of their own belong to `track`, the name of this process."""
    _state().recorder = _Recorder(track)


def stop() -> list[Span]:
    """End the recording and return the spans that have ended; an empty list without a recording."""
    of_run = _state()
    recorder, of_run.recorder = of_run.recorder, None
    return recorder.spans if recorder is not None else []


def now() -> int | None:
    """Return the time, in nanoseconds of the wall clock; None without a recording."""
    recorder = _state().recorder
    return recorder.now() if recorder is not None else None


def span(name: str, track: str = "", facts: Facts | None = None) -> AbstractContextManager[None]:
    """Mark the block; while a profile records, call `facts` at its end."""
    recorder = _state().recorder
    return _NOTHING if recorder is None else recorder.block(name, track, facts)


def add(name: str, lane: Lane, begin: int, facts: dict[str, Any]) -> None:
    """Record a span of this process from `begin` (see `now`) until now."""
    if (recorder := _state().recorder) is not None:
        recorder.spans.append(Span(recorder.track, lane, name, begin, recorder.now(), facts))


def timed(function: Callable[P, T], name: str, settle: Callable[[], object] | None = None) -> Callable[P, T]:
    """Return `function` with a span around each call; `settle` is called inside the span, after the function."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with span(name):
            result = function(*args, **kwargs)
            if settle is not None:
                settle()
            return result

    return call


def _lane() -> Lane:
    """Return the running asyncio task, else the thread."""
    import asyncio  # here: it takes a tenth of the time of `instep train --help`, which records nothing

    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        task = None
    if task is not None:
        return id(task)
    return MAIN if threading.current_thread() is threading.main_thread() else threading.get_ident()


def of_torch(path: Path, track: str) -> list[Span]:
    """Return the spans of a trace of torch's profiler: operators, calls of CUDA, kernels and copies.

    Raises: ValueError: the file is incomplete, or not a trace.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            trace = json.load(file)
        events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in (*ON_GPU, *ON_CPU)]
        return [_span(event, int(trace.get("baseTimeNanoseconds", 0)), track) for event in events]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is not a complete trace: {error!r}") from error


def _span(event: dict[str, Any], base: int, track: str) -> Span:
    kind, thread = event["cat"], event["tid"]
    lane = f"GPU {event['pid']} stream {thread}" if kind in ON_GPU else f"thread {thread}"
    begin = base + int(event["ts"] * 1000)
    return Span(track, lane, event["name"], begin, begin + int(event.get("dur", 0) * 1000), {"kind": kind})


def within(spans: Iterable[Span], begin: int, end: int, most: int) -> list[Span]:
    """Return at most `most` of the spans between `begin` and `end`. Spans without a kind (see `Span`) have priority,
    then the GPU's kernels, then the CPU's operators; the longest first."""
    inside = [s for s in spans if begin <= s.begin and s.end <= end]
    if len(inside) > most:
        inside.sort(key=lambda s: ("kind" in s.facts, s.facts.get("kind") not in ON_GPU, s.begin - s.end))
    return inside[:most]
