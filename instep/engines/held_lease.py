"""The lease of an engine that somebody else runs, as the controller holds it; `lease.py` is the engine's side."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from instep.errors import EngineError
from instep_engine.lease import EXPIRED, HELD, NONE, UNKNOWN

LEASE_SECONDS, RENEW_SECONDS = 10.0, 1.0


_owner: str


def _name_owner() -> None:
    """Name this process; its forks have other names."""
    global _owner
    _owner = f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})"


_name_owner()
os.register_at_fork(after_in_child=_name_owner)


class Leased(Protocol):
    """The engine, as far as its lease needs it (`Engine`)."""

    name: str
    process: Any

    @property
    def kind(self) -> Any: ...
    @property
    def post(self) -> Callable[..., Any]: ...
    @property
    def post_aside(self) -> Callable[..., Any]: ...


class HeldLease:
    """This process' lease of `engine`, which a thread renews from `take` to `end`. Engines of this run have none."""

    def __init__(self, engine: Leased):
        self._engine = engine
        self._begun, self._renewed = False, 0.0  # when the last request was made that renewed it
        self._ended: threading.Event | None = None  # ends the thread that renews it

    def take(self, timeout: float, in_place: bool = False) -> None:
        """Begin the lease, or renew it if this process holds it.

        Args:
            timeout: seconds; another run that holds the lease may have died, and is waited for.
            in_place: the trainer writes into the engine's memory from now on.

        Raises:
            EngineError: it has expired, another run holds it and renews it, or the engine does not answer.
        """
        if self._engine.process is not None:
            return
        deadline = time.monotonic() + min(timeout, 2 * LEASE_SECONDS)
        while True:
            try:
                if not self._ask(not self._begun, in_place, timeout, self._engine.post):
                    return
                break
            except EngineError as error:
                if self._begun or HELD not in error.what or time.monotonic() > deadline:
                    raise self._explained(error) from error
                time.sleep(RENEW_SECONDS)
        self._begun = True
        if self._ended is None:
            self._ended = ended = threading.Event()
            name = f"lease of {self._engine.name}"
            threading.Thread(target=self._renew, args=(ended,), name=name, daemon=True).start()

    def check(self, timeout: float) -> None:
        """Raise EngineError if this process had the lease and has lost it, as one that stood still for long."""
        if self._begun and time.monotonic() - self._renewed > LEASE_SECONDS / 2:
            self.take(timeout)

    def begin_anew(self) -> None:
        """Take note that the engine may have been started anew, and knows nothing of the lease."""
        self._begun = False

    def end(self) -> None:
        """Renew it no more: the engine has resumed, or is to go on by itself."""
        self._begun = False
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def _ask(self, begin: bool, in_place: bool, timeout: float, post: Callable[..., object]) -> bool:
        """Whether the engine's kind has a lease, for which it was asked then."""
        asked = time.monotonic()
        about = {"owner": _owner, "seconds": LEASE_SECONDS, "begin": begin, "in_place": in_place}
        if (call := self._engine.kind.lease(about)) is None:
            return False
        post(*call, timeout=timeout)
        self._renewed = asked
        return True

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(RENEW_SECONDS):
            with contextlib.suppress(EngineError):  # control calls tell of a fault
                self._ask(False, False, LEASE_SECONDS / 4, self._engine.post_aside)

    def _explained(self, error: EngineError) -> EngineError:
        remedies = {
            HELD: "end that run, or give this one an engine of its own",
            EXPIRED: f"this run stood still for {LEASE_SECONDS:.0f} s: resume it from its last checkpoint",
            NONE: "use a vLLM version that the plugin supports (docs/engines.md), or leave "
            "--rollout-external-engine-addrs out: an engine that the run starts ends with it",
            UNKNOWN: "somebody else resumed the engine or started it anew: resume the run from its last checkpoint",
        }
        known = next((remedy for words, remedy in remedies.items() if words in error.what), error.remedy)
        other = "restart the engine with the plugin of this instep: an older plugin may not support this lease"
        return EngineError(error.what, where=error.where, remedy=known or other)
