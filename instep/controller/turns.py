"""The turns on the GPUs of a colocated run: the engines while they generate, the trainer while it computes.

    rollout       engines awake                        trainer parked
    training      engines asleep                       trainer there
    sync          engines' weights awake, no KV cache  trainer's weights there; the rest is on its way to the host
    the probe     scored by the trainer, which then parks; the KV cache wakes, and the engines score it

`--offload-rollout` lets engines sleep, `--offload-train` parks the trainer; with only one of them the other side stays.
Engines wake in two stages, so that weights and KV cache are never beside the whole trainer. One side leaves before the
other takes its memory, never at the same time: vLLM measures what it frees. An engine that restarts takes memory, too:
it starts in the engines' turn (`Fleet.start_dead`), and the trainer's next turn waits for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

from instep.arguments.settings import Settings
from instep.controller.role import RoleTrainer
from instep.engines.engine import KV_CACHE, WEIGHTS, Engine
from instep.system.run_context import RunThreads
from instep.system.spans import span
from instep.weights.way import OF_ADAPTERS

KEEP, DROP = 1, 2  # levels of sleep: what happens to the weights
Part = Literal["nothing", "weights", "all"]


class Session(Protocol):
    """The engines of a turn; see `sync/session.py`."""

    def each(self, call: Callable[[Engine], Any]) -> Any: ...
    def seconds_left(self) -> float: ...
    def resume(self) -> None: ...


class Turns:
    """The turns of one run. Without `--offload-train` and `--offload-rollout` neither side moves.

    Attributes:
        roles: actor and critic; empty until they are loaded.
        seconds: the time of the moves since `take_seconds`, by name.
    """

    def __init__(self, args: Settings):
        self._args = args
        self._level = KEEP if args.weight_sync in OF_ADAPTERS else DROP  # else a sync brings every weight
        self.roles: Sequence[RoleTrainer] = ()
        self.seconds: dict[str, float] = {}
        self._has: Part = "all"  # the part of the trainer's memory on the GPUs

    @property
    def are_taken(self) -> bool:
        """Whether a side moves."""
        return self._args.offload_train or self._args.offload_rollout

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of the moves since the last call, as metrics."""
        seconds, self.seconds = self.seconds, {}
        return {f"turns/{name}_seconds": value for name, value in seconds.items()}

    # ---- the turns ---------------------------------------------------------------------------------------------------

    def to_trainer(self, session: Session) -> None:
        """Let the engines sleep, without their weights if a sync brings them, and give all memory to the trainer."""
        self._sleep(session, self._level)
        self._onload(optimizer=True)

    def to_sync(self, session: Session) -> None:
        """Give engines and trainer memory for their weights, and for nothing else."""
        if self._has == "nothing":
            self._sleep(session, self._level)
        elif self._has == "all":
            self._offload(weights=False)
        self._onload(optimizer=False)
        self._wake(session, WEIGHTS)

    def to_engines(self, session: Session) -> None:
        """Park the trainer and wake the engines; they do not generate until the caller resumes them."""
        self._offload(weights=True)
        self._wake(session, WEIGHTS)
        self._wake(session, KV_CACHE)

    @contextlib.contextmanager
    def borrowed(self, session: Session, *, optimizer: bool) -> Iterator[None]:
        """Let a parked trainer compute within the engines' turn; the engines keep their weights meanwhile.

        Args:
            optimizer: whether masters and moments are needed, too.
        """
        if self._has != "nothing":
            yield
            return
        self._sleep(session, KEEP)
        self._onload(optimizer=optimizer)
        yield
        self.to_engines(session)
        session.resume()

    def begin(self, engines: Sequence[Engine]) -> None:
        """Let ready engines sleep with their loaded weights, before the trainer is loaded."""
        with self._timed("sleep"), RunThreads(len(engines)) as pool:
            list(pool.map(lambda e: e.sleep(KEEP, timeout=self._args.sync_timeout), engines))

    def leave(self) -> None:
        """Park the trainer, or free the memory of its passes if it stays, before engines use the GPUs."""
        if self.are_taken:
            self._offload(weights=True)
        else:
            for finish in [role.offload(weights=True) for role in self.roles]:
                finish()

    # ---- moves -------------------------------------------------------------------------------------------------------

    def _sleep(self, session: Session, level: int) -> None:
        if self._args.offload_rollout:
            with self._timed("sleep"):
                session.each(lambda e: e.sleep(level, timeout=session.seconds_left()))

    def _wake(self, session: Session, tag: str) -> None:
        if self._args.offload_rollout:
            with self._timed("wake"):
                session.each(lambda e: e.wake(tag, timeout=session.seconds_left()))

    def _offload(self, *, weights: bool) -> None:
        """Let the trainer leave. If it does not park, it frees the memory of its last passes, before engines wake."""
        if self._has == "nothing" or (self._has == "weights" and not weights) or not self.are_taken:
            return
        with self._timed("offload"):
            for finish in [role.offload(weights=weights) for role in self.roles]:
                finish()
        if self._args.offload_train:
            self._has = "nothing" if weights else "weights"

    def _onload(self, *, optimizer: bool) -> None:
        if not self._args.offload_train or self._has == "all" or (self._has == "weights" and not optimizer):
            return
        self._has = "all" if optimizer else "weights"
        with self._timed("onload"):
            for finish in [role.onload(optimizer=optimizer) for role in self.roles]:
                finish()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        with span(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
