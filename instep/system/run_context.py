"""The state of a run in this process. A process may have several runs at a time (`instep.Run`, notebooks, tests).

Code asks a `PerRun` for the value of the run that it works for. Tasks of asyncio work for the run of the code that
starts them, and so do `RunThreads`. Another thread, such as a hook's own, works for the run that is open here.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, ParamSpec, TypeVar

from instep.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


class RunContext:
    """A run's values, one of each `PerRun` that the run has asked for."""

    def __init__(self) -> None:
        self.values: dict[PerRun[Any], Any] = {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let threads that belong to no run work for this one meanwhile, if no other is open."""
        _open.append(self)
        try:
            yield
        finally:
            _open.remove(self)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let the block work for this run, and the tasks that it starts."""
        before = _current.get()
        _current.set(self)
        try:
            yield
        finally:
            _current.set(before)


_current: contextvars.ContextVar[RunContext | None] = contextvars.ContextVar("run", default=None)
_open: list[RunContext] = []
_of_process = RunContext()  # of a command, and of the processes that it starts: they have one run


def current() -> RunContext:
    """Return the run that this code works for.

    Raises:
        ConfigError: this thread belongs to no run, and several are open.
    """
    run = _current.get()
    if run is not None:
        return run
    runs = list(_open)
    if len(runs) > 1:
        what = f"{len(runs)} runs are open, and this code works for none of them"
        remedy = "start a thread with `threading.Thread(target=contextvars.copy_context().run, args=(function,))`"
        raise ConfigError(what, where="a thread of a hook, or the body of a loop", remedy=remedy)
    return runs[0] if runs else _of_process


def carried(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` for another thread, where it works for the run of this code."""
    run = current()

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with run.entered():
            return function(*args, **kwargs)

    return call


class RunThreads(ThreadPoolExecutor):
    """Threads that work for the run of the code that gives them work."""

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return super().submit(carried(function), *args, **kwargs)


class PerRun(Generic[T]):
    """A value that every run has of its own; `make` makes it when a run first asks for it."""

    def __init__(self, make: Callable[[], T]):
        self._make = make

    def __call__(self) -> T:
        values = current().values
        if self not in values:
            values.setdefault(self, self._make())
        value: T = values[self]
        return value


def cached_per_run(function: Callable[P, T]) -> Callable[P, T]:
    """Cache the results of `function` for the rest of a run. Threads that call it at once get one result."""
    caches = PerRun[dict[Any, T]](dict)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        results, key = caches(), (args, *sorted(kwargs.items()))
        # Not `functools.cache`: there each thread gets the result of its own call, such as a key of its own.
        return results[key] if key in results else results.setdefault(key, function(*args, **kwargs))

    call.cache_clear = lambda: caches().clear()  # type: ignore[attr-defined]
    return call
