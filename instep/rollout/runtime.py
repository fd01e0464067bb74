"""The background event loop of a run. It runs rollouts while their caller waits, with a bound.

Any thread of the run may call `run`, or `cancel_all`, which ends all tasks (after the death of an engine, or Ctrl-C). A
coroutine that blocks the loop is noticed if it was started through `bounded_steps`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

import aiohttp

from instep.engines.http import checked_socket
from instep.errors import EngineError, InstepError, RolloutError
from instep.system.hooks import raised_at
from instep.system.hooks.user_code import said
from instep.system.run_context import PerRun, RunThreads, carried
from instep.types import Group

T = TypeVar("T")
ProgressListener = Callable[[int, int, dict[str, Any]], None]

POLL_SECONDS = 0.25
MAX_CONNECTIONS = 2048  # of the shared session, to all hosts; rollouts stay below it by their own bounds
CONNECT_SECONDS = 10.0
_LIMITS = aiohttp.ClientTimeout(total=3600.0, sock_connect=CONNECT_SECONDS)


class _Loop:
    """A running event loop in a daemon thread, with the objects that belong to it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(RunThreads())  # also for what hooks run in it
        self.session: aiohttp.ClientSession | None = None
        self.closers: list[Callable[[], Awaitable[None]]] = []
        self.step: tuple[float, InstepError] | None = None  # deadline and error of the step that runs now
        self.ends = False  # `shutdown` stops the loop
        self.interrupts: set[concurrent.futures.Future[None]] = set()
        self.thread = threading.Thread(target=self._run, name="instep-rollout", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        _of_thread.home = self
        error: BaseException | None = None
        # A hook has closed the loop's own descriptors, or the loop itself.
        while not isinstance(error, OSError) and not self.loop.is_closed():
            what, where = "a hook has stopped the loop of rollouts", "the rollout"
            try:
                self.loop.run_forever()
            except BaseException as raised:  # noqa: BLE001 - asyncio lets SystemExit and the like of a task end its loop
                error, what, where = raised, f"a task that a hook started raised {said(raised)}", raised_at(raised)
            if self.ends:
                return
            remedy = "await the tasks that the hook begins, catch what they raise, and leave the loop running"
            self.interrupt(RolloutError(what, where=where, remedy=remedy))

    async def close(self) -> bool:
        """Cancel the remaining tasks. Return whether all of them have ended."""
        others = refusing = asyncio.all_tasks(self.loop) - {asyncio.current_task()}
        for task in others:  # all are cancelled already, except those that began since
            task.cancel()
        if others:
            _, refusing = await asyncio.wait(others, timeout=1.0)
        for closer in self.closers:
            await closer()
        if self.session is not None:
            await self.session.close()
        return not refusing

    def interrupt(self, error: BaseException) -> None:
        for waiting in list(self.interrupts):
            if not waiting.done():
                waiting.set_exception(error)


class RolloutState:
    """What the rollouts of a run share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # of `loop`
        self.loop: _Loop | None = None
        self.listener: ProgressListener | None = None
        self.kept_listener: Callable[[Group], None] | None = None
        self.last_progress: tuple[int, int, dict[str, Any]] | None = None  # of the rollout or evaluation that ran last
        self.requests_in_flight = Counter[str]()  # by URL
        self.answers_by_form = Counter[str]()  # "arrays" and "json", of engines that may answer in arrays

    def ensured(self) -> _Loop:
        """Return the loop, and start it if none exists. The caller holds the lock."""
        if self.loop is None:
            self.loop = _Loop()
        return self.loop

    def abandon(self, loop: _Loop) -> None:
        with self.lock:
            if self.loop is loop:
                self.loop = None

    def take_array_share(self) -> dict[str, float]:
        """Return `perf/answers_in_arrays`: the share of arrays among the answers since the last call; else nothing."""
        counts = dict(self.answers_by_form)
        self.answers_by_form.clear()
        return {"perf/answers_in_arrays": counts.get("arrays", 0) / sum(counts.values())} if counts else {}


state = PerRun(RolloutState)
_of_thread = threading.local()  # `home`: the loop that runs in this thread; it may have been abandoned


def run(coro: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
    """Run `coro` on the background loop and wait for its result, at most `timeout` seconds.

    Raises:
        RolloutError: the time is over.
        InstepError: the error given to `cancel_all`, or to the `bounded_steps` whose coroutine blocks the loop.
    """
    if is_own_thread():
        coro.close()
        raise RolloutError(
            "a blocking call on the rollout loop's own thread", remedy="use `await` in async hooks", where="a hook"
        )
    interrupt: concurrent.futures.Future[None] = concurrent.futures.Future()
    of_run = state()
    with of_run.lock:  # `shutdown` interrupts this call, or this call gets a new loop
        home = of_run.ensured()
        home.interrupts.add(interrupt)
        future = asyncio.run_coroutine_threadsafe(coro, home.loop)
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        while True:
            waiting: list[concurrent.futures.Future[Any]] = [future, interrupt]
            concurrent.futures.wait(waiting, POLL_SECONDS, concurrent.futures.FIRST_COMPLETED)
            if interrupt.done():
                interrupt.result()
            if future.done():
                return future.result()
            step = home.step
            if step is not None and time.monotonic() > step[0]:
                of_run.abandon(home)  # its thread cannot be stopped: it is abandoned, and ends its work once it is free
                _cancel(home, step[1])
            elif deadline is not None and time.monotonic() > deadline:
                raise RolloutError(
                    f"not done after {timeout:.0f} s", remedy="see the engines' logs", where="--rollout-timeout"
                )
    except concurrent.futures.CancelledError:  # `cancel_all` interrupts this call first
        what, remedy = "a hook has cancelled tasks of the rollout", "let it cancel only tasks that it has started"
        raise RolloutError(what, where="the rollout", remedy=remedy) from None
    finally:
        home.interrupts.discard(interrupt)
        future.cancel()


def cancel_all(error: BaseException | None = None) -> None:
    """End every running task, from any thread. Each waiting `run` raises `error` (default: EngineError) at once."""
    home = state().loop
    if home is not None:
        _cancel(home, error)


def _cancel(home: _Loop, error: BaseException | None = None) -> None:
    def cancel_tasks() -> None:
        for task in asyncio.all_tasks(home.loop):
            task.cancel()

    remedy = "see the message before this one"
    home.interrupt(error or EngineError("the rollout was cancelled", remedy=remedy, where="the rollout"))
    home.loop.call_soon_threadsafe(cancel_tasks)


def shutdown(timeout: float = 2.0) -> None:
    """Cancel all tasks, close session and reward workers, and stop the loop. A later `run` starts a new one."""
    of_run = state()
    home = of_run.loop
    if home is None:
        return
    of_run.abandon(home)  # first, so that no new work begins on it
    _cancel(home)
    try:
        has_ended = asyncio.run_coroutine_threadsafe(home.close(), home.loop).result(timeout)
    except concurrent.futures.TimeoutError:  # it is frozen or busy
        has_ended = False
    if not has_ended:  # leave the daemon thread and silence it: destroying its tasks would run their code
        home.loop.set_exception_handler(lambda loop, context: None)
        return
    home.ends = True
    home.loop.call_soon_threadsafe(home.loop.stop)
    home.thread.join(0.5)
    if not home.thread.is_alive():
        home.loop.close()


def is_own_thread() -> bool:
    """Return whether this module, not a hook, runs the loop of this thread."""
    return hasattr(_of_thread, "home")


def at_shutdown(closer: Callable[[], Awaitable[None]]) -> None:
    """Await `closer()` when the loop shuts down: the loop of this thread, or that of the run."""
    of_run = state()
    with of_run.lock:
        (_of_thread.home if is_own_thread() else of_run.ensured()).closers.append(closer)


@contextlib.asynccontextmanager
async def http_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Yield the loop's shared session; on another loop (a hook's own `asyncio.run`) a session for this call only."""
    home = state().loop
    if home is None or asyncio.get_running_loop() is not home.loop:
        connector = aiohttp.TCPConnector(socket_factory=checked_socket)
        async with aiohttp.ClientSession(connector=connector, timeout=_LIMITS) as session:
            yield session
        return
    if home.session is None:
        connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=30.0, socket_factory=checked_socket)
        home.session = aiohttp.ClientSession(connector=connector, timeout=_LIMITS, cookie_jar=aiohttp.DummyCookieJar())
    yield home.session


class bounded_steps(Awaitable[T]):  # used like a function: `await bounded_steps(coro, limit, error)`
    """Await `coro`. If one of its steps holds the loop for more than `limit` seconds, `run` raises `error`."""

    def __init__(self, coro: Coroutine[Any, Any, T], limit: float, error: InstepError):
        self.coro, self.limit, self.error = coro, limit, error

    def __await__(self) -> Generator[Any, Any, T]:
        home = state().loop
        if home is not None and asyncio.get_running_loop() is not home.loop:
            home = None  # of an abandoned loop, or a hook's own: its steps are not watched
        wake: BaseException | None = None
        while True:
            if home is not None:
                home.step = (time.monotonic() + self.limit, self.error)
            try:
                waits_for = self.coro.send(None) if wake is None else self.coro.throw(wake)
            except StopIteration as end:
                return end.value
            finally:
                if home is not None:
                    home.step = None
            try:
                yield waits_for
                wake = None
            except BaseException as error:  # noqa: BLE001 - mostly a cancellation: the coroutine's await raises it
                wake = error


def in_daemon_thread(function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
    """Run a blocking function in a thread which, unlike one of an executor, keeps no process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def work() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (future.set_result, function(*args))
        except BaseException as error:  # noqa: BLE001 - passed to the other thread unchanged
            outcome = (future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=carried(work), name=getattr(function, "__name__", "hook"), daemon=True).start()
    return future


async def gather(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. At the first failure, cancel the other jobs, then raise it."""
    if len(jobs) == 1:
        return [await jobs[0]]
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_tasks(tasks)


async def cancel_tasks(tasks: Sequence[asyncio.Task[Any]], timeout: float = 5.0) -> None:
    """Cancel the unfinished tasks and wait at most `timeout` seconds for them: a hook may refuse to end."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=timeout)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # marks it as seen; the first failure is raised


def report_progress(done: int, total: int, **extra: Any) -> None:
    """Store the progress of this rollout or evaluation, and call the run's listener, on the loop's thread."""
    of_run = state()
    of_run.last_progress = (done, total, extra)
    if of_run.listener is not None:
        of_run.listener(done, total, extra)
