"""Calls from one process to another over a pipe: asyncio on one side, a computing loop on the other.

A call is (number, name, arguments). Answers are lists of (number, result, exception or `Part`), sent when they are
ready. Messages are pickled: both processes belong to one program.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from instep.system.processes import BEAT_SECONDS, pulse
from instep.system.spans import span


@dataclass(frozen=True)
class Part:
    """A part of an answer; any number of parts may come before the answer itself."""

    value: Any


class Caller:
    """The asyncio side; its process ends when the other process does."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._parts: dict[int, Callable[[Any], None]] = {}  # functions that take the parts of an answer
        self._listening = False

    def expect(self) -> tuple[int, asyncio.Future[Any]]:
        """Return a new number, and the future that its answer resolves."""
        if not self._listening:
            asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._receive)
            self._listening = True
        number = next(self._numbers)
        self._answers[number] = future = asyncio.get_running_loop().create_future()
        return number, future

    def call(self, name: str, *given: Any) -> asyncio.Future[Any]:
        number, future = self.expect()
        self._pipe.send((number, name, given))
        return future

    async def call_each(self, name: str, items: Sequence[Any], *, cancel: str) -> list[Any]:
        """Make one call with all `items`, and return their answers in order; each item gets a `number`.

        Args:
            cancel: the function to call with the numbers if the caller is cancelled.
        """
        futures = []
        for item in items:
            item.number, future = self.expect()
            futures.append(future)
        self.send(name, items)
        try:
            return await asyncio.gather(*futures)
        except asyncio.CancelledError:
            self.send(cancel, {item.number for item in items})
            raise

    async def stream_each(
        self, name: str, items: Sequence[Any], *, cancel: str
    ) -> AsyncGenerator[tuple[int, Part | asyncio.Future[Any]]]:
        """Make one call with all `items`, like `call_each`. Yield the index of an item with each part of its answer,
        in order, and at last with the future of the answer."""
        arrived: asyncio.Queue[tuple[int, Part | asyncio.Future[Any]]] = asyncio.Queue()
        for index, item in enumerate(items):
            item.number, future = self.expect()
            put = partial(lambda index, answer: arrived.put_nowait((index, answer)), index)
            future.add_done_callback(put)
            self._parts[item.number] = put
        left = set(range(len(items)))
        try:
            self.send(name, items)
            while left:
                index, answer = await arrived.get()
                if isinstance(answer, asyncio.Future):
                    left.remove(index)
                yield index, answer
        finally:
            for item in items:
                del self._parts[item.number]
            if left:  # the client is gone
                self.send(cancel, {items[index].number for index in left})

    def send(self, name: str, *given: Any) -> None:
        """Make a call without an answer."""
        self._pipe.send((-1, name, given))

    def _receive(self) -> None:
        try:
            answers = self._pipe.recv()
        except (EOFError, OSError):
            os._exit(1)
        for number, answer in answers:
            if isinstance(answer, Part):
                if number in self._parts:
                    self._parts[number](answer)
                continue
            future = self._answers.pop(number, None)
            if future is None or future.done():  # no one waits any more
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


class CallQueue:
    """The computing side; its process ends when the other process does.

    Args:
        expected: the exceptions of the functions that are sent unchanged as answers.
        failed: makes the answer for any other exception, a fault of instep, whose stack is printed here.
    """

    def __init__(
        self,
        pipe: Connection,
        functions: dict[str, Callable[..., Any]],
        expected: type[Exception],
        failed: Callable[[str], Exception],
    ):
        self._pipe, self._functions, self._expected, self._failed = pipe, functions, expected, failed
        self._queue: queue.SimpleQueue[tuple[int, str, tuple[Any, ...]]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="calls", daemon=True).start()

    def _listen(self) -> None:  # a thread: the caller can send at any time, even during a computing step
        try:
            while True:
                self._queue.put(self._pipe.recv())
        except (EOFError, OSError):
            print(f"process {os.getpid()}: the process at the other end of its pipe has ended", flush=True)
            os._exit(1)

    def work(self, idle: Callable[[], bool]) -> None:
        """Do the calls that have arrived; wait for more while `idle()` is true."""
        while True:
            pulse()
            try:
                number, name, given = self._queue.get(block=idle(), timeout=BEAT_SECONDS)
            except queue.Empty:
                if idle():
                    continue
                return
            try:
                with span(name):
                    answer = self._functions[name](*given)
            except self._expected as error:
                answer = error
            except Exception as error:  # noqa: BLE001 - the caller in the other process gets it
                traceback.print_exc()
                answer = self._failed(f"{name} failed: {type(error).__name__}: {error}")
            if number >= 0:
                self.answer([(number, answer)])

    def answer(self, answers: Iterable[tuple[int, Any]]) -> None:
        if answers := list(answers):
            self._pipe.send(answers)
