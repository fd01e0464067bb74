"""The health of engines over HTTP: it shows what no process tells.

That is an engine of somebody else's that does not answer, and a vLLM whose core hangs. vLLM's server answers `/health`
with 503 when its core is dead (its own end follows seconds later), but does not notice a core that hangs. So the core
is asked as well, by a question that the server cannot answer alone.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import urlsplit

from instep.engines.engine import Engine

LOOK_SECONDS = 0.5  # between two looks at /health
ANSWER_SECONDS = 1.0  # for its answer
CONNECT_SECONDS = 2.0
FAILURES = 3  # in a row, after at most 4.5 s: then it counts as dead


def unreachable(urls: Iterable[str]) -> Iterator[str]:
    """HOST:PORT of each URL at which no server accepts a connection."""
    for at in map(urlsplit, urls):
        try:
            socket.create_connection((str(at.hostname), int(at.port or 80)), CONNECT_SECONDS).close()
        except OSError:
            yield at.netloc


class HealthWatch:
    """Watches one engine until `closed`, in threads of its own.

    Args:
        lost: called with the engine, what is wrong, and whether its requests may never be answered.
        back: called when the engine answers that it is well.
    """

    def __init__(
        self,
        engine: Engine,
        heartbeat_timeout: float,
        *,
        lost: Callable[[Engine, str, bool], None],
        back: Callable[[Engine], None],
        closed: threading.Event,
    ):
        self._engine, self._lost, self._back, self._closed = engine, lost, back, closed
        self._patience = engine.kind.core_patience(heartbeat_timeout)
        self._hangs = False
        for look in (self._look, *([self._ask_core] if self._patience is not None else [])):
            threading.Thread(target=look, name=f"health of {engine.name}", daemon=True).start()

    def _look(self) -> None:
        failures = 0
        while not self._closed.wait(LOOK_SECONDS):
            health = self._engine.health(ANSWER_SECONDS)
            ours = self._engine.process is not None
            late = ours and health == "silent"  # a busy server; its process is watched
            failures = 0 if health == "well" or late else failures + 1
            if failures >= FAILURES:
                what = f"has not answered /health with 200, {FAILURES} times in a row"
                if health != "silent" and self._patience is not None:  # its server outlives its core for a while
                    how = "answers /health with an error" if health == "unwell" else "takes no connection any more"
                    what = f"died: its server {how}"
                self._lost(self._engine, what, health == "silent")
            elif health == "well" and not self._hangs:
                self._back(self._engine)

    def _ask_core(self) -> None:
        assert self._patience is not None
        while not self._closed.wait(LOOK_SECONDS):
            began = time.monotonic()
            self._hangs = not self._engine.computes(self._patience)
            if self._hangs:
                silent = time.monotonic() - began
                self._lost(self._engine, f"hangs: it has computed nothing for {silent:.0f} s", True)
