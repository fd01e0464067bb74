"""Weight syncs bring versions of the policy to the engines.

A sync is a session (`session.py`) in which a way (`weights/way.py`) carries the weights, and then the proof
(`proof.py`) that each engine holds them:

    close admission -> session -> proof -> open admission

One deadline covers all of it. The fleet decides which engines take part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from instep.controller.role import RoleTrainer
from instep.controller.sync.proof import Proof
from instep.controller.sync.session import Session
from instep.engines.engine import Engine
from instep.errors import InstepError, SyncError
from instep.rollout import admission
from instep.weights.way import SINGLE_COPY

if TYPE_CHECKING:
    from instep.arguments.settings import Settings


@dataclass
class SyncResult:
    """The outcome of a sync.

    Attributes:
        engines: the engines that provably hold the version.
        probe_max_abs_diff: the largest |trainer - engine| log-prob difference of the probe.
        first_diff: the one of the first scoring, which differs from the other where the probe was scored again.
        tolerance: the difference that is allowed.
    """

    version: int
    engines: list[Engine]
    seconds: float
    num_bytes: int
    num_tensors: int
    probe_max_abs_diff: float
    first_diff: float
    tolerance: float

    def metrics(self) -> dict[str, float]:
        """Return `sync/*`, which the round logs that the sync ends."""
        return {
            "sync/version": self.version,
            "sync/probe_max_abs_diff": self.probe_max_abs_diff,
            "sync/probe_tolerance": self.tolerance,
            "sync/bytes": self.num_bytes,
        }


class WeightSync:
    """Owns the versions of the policy and the sessions that carry them to the engines.

    Args:
        args: `pause_mode`, `sync_timeout`, `sync_tolerance`, `precision`.
        way: the way of the run.
        folder: of the run, in the shared memory of this host.
        vocab_size: the probe's tokens are drawn below it.
        max_len: the most tokens of a sequence that trainer and engines take.
    """

    def __init__(self, args: Settings, actor: RoleTrainer, way: str, folder: Path, *, vocab_size: int, max_len: int):
        self._args, self._actor, self._way = args, actor, way
        self.version = 0
        self.proof = Proof(args, vocab_size=vocab_size, max_len=max_len)
        self._folder, self._held = folder, False

    def close(self) -> None:
        admission.reset()

    @property
    def writes_in_place(self) -> bool:
        """Whether the trainer's steps write into the memory that the engine computes with."""
        return self._way == SINGLE_COPY

    def hold(self, engines: Sequence[Engine]) -> None:
        """Let `engines` answer nothing until the next `run`: `--pause-mode` says what becomes of their requests.

        Raises:
            EngineGone: no engine is left.
        """
        admission.close()
        session = self._session(engines)
        session.drain()
        session.pause()
        self._held = True

    def _session(self, engines: Sequence[Engine], version: int | None = None) -> Session:
        return Session(self._args, self._actor, engines, version or self.version, self._folder)

    def run(self, engines: Sequence[Engine], way: str | None = None) -> SyncResult:
        """Bring a new version to `engines`, by `way` (default: that of the run).

        Raises:
            SyncError: the weights did not arrive, or the proof failed; the error names engine and tensor.
            EngineGone: no engine is left.
        """
        for engine in engines:
            engine.capabilities.check_pause(self._args.pause_mode)
        session = self._session(engines, self.version + 1)
        self.version += 1
        admission.close()
        session.drain()
        result = self._carry(session, way)
        self._held = False
        spans = all(engine.capabilities.version_spans for engine in result.engines)
        admission.open_again(None if spans else str(self.version))
        return result

    def rejoin(self, engine: Engine) -> SyncResult:
        """Bring the current version to one engine that has been started anew, while the others serve.

        Raises:
            EngineGone: the engine has died again.
        """
        return self._carry(self._session([engine]), None)

    @property
    def gap_limit(self) -> float:
        """See `Proof.gap_limit`."""
        return self.proof.gap_limit

    def accuse(self, engines: Sequence[Engine], error: SyncError, where: str) -> SyncError:
        """Find the engines behind a gap that is too large (`error`): the probe is scored again, nothing is sent."""
        try:
            session = self._session(engines)
            if self._held:  # no step has changed a weight yet
                session.each(lambda e: e.resume(timeout=session.seconds_left()))
            wrong = self.proof.differing(session)
        except InstepError as failure:
            what = f"{error.what}; the engines could not be asked again: {failure.what}"
            return SyncError(what, where=where, remedy="resume from the last checkpoint")
        off = "its scores of the probe are off by"
        names = [f"{e.name} at {e.url} ({off} {wrong[e.url]:.3g})" for e in engines if e.url in wrong]
        if names:
            found = f"version {self.version} is not what these engines hold any more: {', '.join(names)}"
            remedy = "something else loaded weights into them: their logs show what calls their control routes"
        else:
            urls = ", ".join(f"{e.name} at {e.url}" for e in engines)
            found = f"version {self.version} is what each engine holds now ({urls})"
            remedy = (
                "look at `instep samples RUN_DIR --worst gap --tokens`: does a generate function record other tokens, "
                "log-probs or sampling parameters than the engine's, or were other weights loaded for a while? If the "
                "arithmetic differs by so much, raise --sync-tolerance (its tenfold is allowed) or use --on-gap warn"
            )
        return SyncError(f"{error.what}; {found}", where=where, remedy=f"{remedy}; resume from the last checkpoint")

    def _carry(self, session: Session, way: str | None) -> SyncResult:
        way = way or self._way
        sent = session.transfer(way)
        proven = self.proof.prove(session, way, sent)
        return SyncResult(
            version=int(session.version),
            engines=session.engines,
            seconds=time.monotonic() - session.started,
            num_bytes=sum(t.nbytes for t in sent.tensors),
            num_tensors=len(sent.tensors),
            probe_max_abs_diff=proven.last,
            first_diff=proven.first,
            tolerance=proven.tolerance,
        )
