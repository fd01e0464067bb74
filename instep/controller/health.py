"""The health of engines over HTTP: it finds faults that the end of a process does not show.

These are an external engine that does not answer, and a vLLM whose core hangs. vLLM's server answers `/health`
with 503 when its core is dead (the server ends seconds later), but does not notice a core that hangs. So the core
gets a question, too, that the server cannot answer alone.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from urllib.parse import urlsplit

from instep.engines.engine import Engine
from instep.system.run_context import carried

LOOK_SECONDS = 0.5  # between two requests to /health
ANSWER_SECONDS = 1.0  # for the answer
CONNECT_SECONDS = 2.0
FAILURES = 3  # in a row, after at most 4.5 s: then the engine counts as dead


def unreachable(urls: Iterable[str]) -> Iterator[str]:
    """Yield HOST:PORT of each URL where no server accepts a connection."""
    for at in map(urlsplit, urls):
        try:
            socket.create_connection((str(at.hostname), int(at.port or 80)), CONNECT_SECONDS).close()
        except OSError:
            yield at.netloc


def watch_health(
    engine: Engine,
    heartbeat_timeout: float,
    lost: Callable[[Engine, str, bool], None],
    back: Callable[[Engine], None],
    closed: threading.Event,
) -> None:
    """Watch one engine until `closed`, in threads.

    Args:
        lost: called with the engine, the fault, and whether its requests may never be answered.
        back: called when the engine reports that it is well.
    """
    patience = engine.kind.core_patience(heartbeat_timeout)
    hangs = threading.Event()

    def look() -> None:
        failures = 0
        while not closed.wait(LOOK_SECONDS):
            health = engine.health(ANSWER_SECONDS)
            late = engine.process is not None and health == "silent"  # the server is busy; its process is watched
            failures = 0 if health == "well" or late else failures + 1
            if failures >= FAILURES:
                what = f"has not answered /health with 200, {FAILURES} times in a row"
                if health != "silent" and patience is not None:  # its server lives a little longer than its core
                    how = "answers /health with an error" if health == "unwell" else "takes no connection any more"
                    what = f"died: its server {how}"
                lost(engine, what, health == "silent")
            elif health == "well" and not hangs.is_set():
                back(engine)

    def ask_core(patience: float) -> None:
        while not closed.wait(LOOK_SECONDS):
            began = time.monotonic()
            if engine.computes(patience):
                hangs.clear()
            else:
                hangs.set()
                lost(engine, f"hangs: it has computed nothing for {time.monotonic() - began:.0f} s", True)

    watches: list[Callable[[], None]] = [look]
    if patience is not None:
        watches.append(partial(ask_core, patience))
    for work in watches:
        threading.Thread(target=carried(work), name=f"health of {engine.name}", daemon=True).start()
