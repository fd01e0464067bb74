"""The lease of an external engine, held by the controller; `lease.py` is the engine's side."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from instep.errors import EngineError
from instep.system.run_context import cached_per_run, carried
from instep_engine.lease import EXPIRED, HELD, UNKNOWN

LEASE_SECONDS, RENEW_SECONDS = 10.0, 1.0
_REMEDIES = {
    HELD: "end that run, or give this one another engine",
    EXPIRED: f"this run stood still for {LEASE_SECONDS:.0f} s: resume it from its last checkpoint",
    UNKNOWN: "another process resumed or restarted the engine: resume the run from its last checkpoint",
}
_OTHER = "restart the engine with the plugin of this instep and a vLLM that it supports (docs/engines.md), or remove "
_OTHER += "--rollout-external-engine-addrs: an engine that the run starts ends with it"


@cached_per_run
def _owner(process: int) -> str:
    """Name this run in a process, unlike any other on any host; a fork has another name."""
    return f"process {process} on {socket.gethostname()} ({secrets.token_hex(4)})"


class HeldLease:
    """A run's lease of an engine. A thread renews it from `take` to `end`.

    Args:
        ask: sends a request of `lease.py` to the engine. It gets a bound in seconds, and whether the request goes
            beside control calls. It returns whether this engine has leases. Engines of this run have none.
    """

    def __init__(self, name: str, ask: Callable[[dict[str, Any], float, bool], bool]):
        self._name, self._send = name, ask
        self._begun, self._renewed = False, 0.0  # when the last renewing request was made
        self._ended: threading.Event | None = None  # ends the renewing thread

    def take(self, timeout: float, in_place: bool = False) -> None:
        """Begin the lease, or renew it if this process holds it.

        Args:
            timeout: in seconds. Another run that holds the lease may have died, so this waits for it.
            in_place: the trainer writes into the engine's memory from now on.

        Raises:
            EngineError: it has expired, another run holds and renews it, or the engine does not answer.
        """
        deadline = time.monotonic() + min(timeout, 2 * LEASE_SECONDS)
        while True:
            try:
                if not self._ask(not self._begun, in_place, timeout):
                    return
                break
            except EngineError as error:
                if self._begun or HELD not in error.what or time.monotonic() > deadline:
                    known = next((remedy for words, remedy in _REMEDIES.items() if words in error.what), error.remedy)
                    raise EngineError(error.what, where=error.where, remedy=known or _OTHER) from error
                time.sleep(RENEW_SECONDS)
        self._begun = True
        if self._ended is None:
            self._ended = threading.Event()
            name = f"lease of {self._name}"
            threading.Thread(target=carried(self._renew), args=(self._ended,), name=name, daemon=True).start()

    def check(self, timeout: float) -> None:
        """Raise EngineError if this process has lost its lease, for example because it stood still for long."""
        if self._begun and time.monotonic() - self._renewed > LEASE_SECONDS / 2:
            self.take(timeout)

    def begin_anew(self) -> None:
        """Note that the engine may have restarted, and then has no lease."""
        self._begun = False

    def end(self) -> None:
        """Stop renewing it: the engine has resumed, or should continue by itself."""
        self._begun = False
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def _ask(self, begin: bool, in_place: bool, timeout: float, aside: bool = False) -> bool:
        asked = time.monotonic()
        about = {"owner": _owner(os.getpid()), "seconds": LEASE_SECONDS, "begin": begin, "in_place": in_place}
        has_leases = self._send(about, timeout, aside)
        self._renewed = asked
        return has_leases

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(RENEW_SECONDS):
            with contextlib.suppress(EngineError):  # control calls report a fault
                self._ask(False, False, LEASE_SECONDS / 4, aside=True)
