"""Bring weight versions of another project's trainer to all engines, and check what can be checked.

It uses a session (`controller/sync/session.py`), with the staged weights in the place of a run's workers. Without the
trainer's own log-probs it proves three things: engines hold the received bytes, they compute numbers with them, and
their scores of a probe have changed if a byte has.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from instep.arguments.args import Args
from instep.arguments.rollout import context_of_model
from instep.controller.fleet import Fleet
from instep.controller.role import RoleTrainer
from instep.controller.sync.proof import Proof, scores_alike
from instep.controller.sync.session import EngineGone, Session
from instep.engines.engine import Engine
from instep.errors import InstepError, SyncError
from instep.rollout.request_gate import gate
from instep_neighbours.trl.staging import Incoming, Layout, Slot

WAY = "staged"


@dataclass
class _Unproven:
    """The open checks of a version that came while a client kept the engines paused.

    Attributes:
        moved: whether their scores of the probe must differ from those with the weights before.
        before: the weights to return to; None: there were no others, or their slot has been overwritten.
    """

    session: Session
    moved: bool
    before: Incoming | None


class Delivery:
    """The weight versions of the engines. Its methods belong to the one thread that changes weights.

    Args:
        args: of `instep serve`, with `sync_timeout`.
        folder: in shared memory, for staged weights.

    Attributes:
        version: that of the engines; 0: the weights that they loaded at their start.
        brought_at: when they got it, in seconds since the epoch; 0.0 with version 0.
        broken: why generation is blocked; "" otherwise.
        paused: whether a client keeps the engines paused.
    """

    def __init__(self, args: Args, fleet: Fleet, layout: Layout, folder: Path):
        self._args, self._fleet, self._folder = args, fleet, folder
        self._slots = [Slot(layout, folder, name) for name in ("a", "b")]
        self._current: Incoming | None = None
        self._proof = Proof(args, vocab_size=layout.vocab_size, max_len=context_of_model(args) or 64)
        self._scores: dict[str, list[float]] = {}  # engine url -> of the probe, under the current weights
        self._unproven: _Unproven | None = None
        self.version, self.brought_at, self.broken, self.paused = 0, 0.0, "", False

    def free_slot(self) -> Slot:
        """Return the slot without the current version, with its memory. Raises SyncError without enough memory."""
        used = None if self._current is None else self._current.slot
        slot = next(slot for slot in self._slots if slot is not used)
        if self._unproven is not None:
            self._unproven.before = None
        slot.allocate()
        return slot

    def forget_tied(self, incoming: Incoming) -> None:
        """Drop a tied weight that came after its update, as the last one of a state dict."""
        if not incoming.begun and self._current is not None:
            incoming.forget_tied(self._current.records)

    def bring(self, incoming: Incoming) -> str:
        """Bring a whole version to all engines, and check it; return the message for the user.

        New requests wait meanwhile, and running ones end first. If a client has paused the engines, they stay paused,
        and their scores are checked at `resume`.

        Raises:
            SyncError: the engines have the version before, if they could return to it (`broken`).
        """
        incoming.check_tied()
        began, before = time.monotonic(), self._current.records if self._current is not None else {}
        moved = sum(before[n].digest != r.digest for n, r in incoming.records.items()) if before else None
        gate().close()
        try:
            engines = self._fleet.available()
            session = self._session(engines, self.version + 1, incoming, "keep" if self.paused else "wait")
            session.drain()
            if not self._scores and not self.paused:
                self._scores = self._probe(session)
            scores: dict[str, list[float]] = {}
            try:
                session.transfer(WAY)
                self._compare(session, incoming)
                if not self.paused:
                    scores = self._prove(session, bool(moved))
            except SyncError:
                self._go_back(engines, self._current)
                raise
            self._fleet.synced(engines, session.engines)
        except EngineGone as error:
            raise SyncError(error.what, where=error.where, remedy=error.remedy) from error
        finally:
            gate().open()
        if self.paused:
            moved_once = bool(moved) and self._unproven is None
            self._unproven = _Unproven(session, moved_once, self._current)
        else:
            self._scores = scores
        self._current, self.broken = incoming, ""
        self.version, self.brought_at = self.version + 1, time.time()
        size = sum(r.nbytes for r in incoming.records.values()) / 1e9
        note = "" if moved != 0 else "; WARNING: not one byte differs from the version before (a learning rate of 0?)"
        return (
            f"version {self.version}: {len(incoming.records)} tensors, {size:.2f} GB, at {len(session.engines)} "
            f"engine{'s' if len(session.engines) > 1 else ''} in {time.monotonic() - began:.1f} s{note}"
        )

    def resume(self) -> None:
        """End a client's pause, and check the version that came meanwhile.

        Raises:
            EngineError: the engines are still paused.
            SyncError: they continue with the version before, if they could return to it (`broken`).
        """
        left = self._unproven
        if left is not None:
            left.session.renew()
            with contextlib.suppress(EngineGone):  # some engines have died; others got it when they came back
                left.session.resume()
        self.each(lambda e: e.resume(timeout=self._args.sync_timeout))
        self.paused, self._unproven = False, None
        if left is None or not left.session.engines:
            return
        try:
            self._scores = self._prove(left.session, left.moved)
        except SyncError:
            self.version, self._current = self.version + 1, left.before
            self._go_back(left.session.engines, left.before)
            raise

    def rejoin(self, engine: Engine) -> None:
        """Bring the current version to a restarted engine, which has the weights that it loaded at its start."""
        try:
            if self._current is not None:
                session = self._session([engine], self.version, self._current, "keep")
                session.stays_paused = False  # it has no requests of a client, and is checked at once
                session.transfer(WAY)
                self._compare(session, self._current)
                self._prove(session, False)
            if self.paused:
                engine.pause("keep", timeout=self._args.sync_timeout)
        except EngineGone:
            return  # the fleet sees it, too
        self._fleet.admit([engine])

    def each(self, call: Callable[[Engine], object]) -> None:
        for engine in self._fleet.available():
            call(engine)

    def _session(self, engines: Sequence[Engine], version: int, weights: Incoming, mode: str) -> Session:
        args = self._args.replace(pause_mode=mode)
        session = Session(args, cast(RoleTrainer, weights), engines, version, self._folder)  # it only publishes
        session.stays_paused = self.paused
        return session

    def _probe(self, session: Session) -> dict[str, list[float]]:
        return session.each(lambda engine: self._proof.engine_scores(engine, session))

    def _compare(self, session: Session, weights: Incoming) -> None:
        """Raise SyncError if an engine that can report digests holds other bytes than were received."""
        for engine in session.engines:
            if engine.capabilities.digests:
                held = engine.weight_digests(timeout=session.seconds_left())
                wrong = [n for n, r in weights.records.items() if held.get(n) != r.digest]
                if wrong:
                    raise _unproven(engine, f"holds other bytes of {', '.join(wrong[:3])} than were received")

    def _prove(self, session: Session, moved: bool) -> dict[str, list[float]]:
        """Check that engines compute with their weights; return their scores of the probe.

        Raises:
            SyncError: an engine computes NaN, or scores as with the weights before although they have `moved`.
        """
        scores = self._probe(session)
        for engine in session.engines:
            own = scores[engine.url]
            if not all(map(math.isfinite, own)):
                raise _unproven(engine, "computes NaN with these weights")
            before = self._scores.get(engine.url, [])
            if moved and scores_alike(self._proof.probe.by_text(own), self._proof.probe.by_text(before)):
                raise _unproven(engine, "still scores as with the weights before, which differ")
        return scores

    def _go_back(self, engines: Sequence[Engine], weights: Incoming | None) -> None:
        """Bring the engines the version before again, after an update that failed in the middle."""
        self.broken = "the last weight update failed in the engines: generation is blocked until an update succeeds"
        if weights is not None:
            with contextlib.suppress(InstepError):
                self._session(engines, self.version, weights, "keep").transfer(WAY)
                self.broken = ""


def _unproven(engine: Engine, how: str) -> SyncError:
    return SyncError(f"{engine.name} {how}", where=engine.url, remedy="see its log; start the server again")
