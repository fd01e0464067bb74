"""Weight syncs bring versions of the policy to the engines.

In a sync, a session (`session.py`) transfers the weights by a way (`weights/way.py`). Then the proof (`proof.py`)
shows that each engine has them:

    close the gate -> session -> proof -> open the gate

With `--pause-mode keep` the gate opens before the proof: the engines continue frozen requests and take new ones.
Their output is not used before the end of the proof: the thread that would train on it or write it waits here. A failed
proof ends the run. In other modes the engines are quiet in the proof, and its scores depend on the probe alone.
With `--offload-train` the gate always waits for the proof, and the engines wait until the trainer has left the GPU.

One deadline covers all of this. The fleet decides which engines take part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from instep.arguments.settings import Settings
from instep.controller.role import RoleTrainer
from instep.controller.sync.proof import Proof, Proven
from instep.controller.sync.session import Session
from instep.controller.turns import Turns
from instep.engines.backend_choice import answers_in_arrays
from instep.engines.engine import Engine
from instep.errors import EngineError, InstepError, SyncError
from instep.rollout.request_gate import gate


@dataclass
class SyncResult:
    """The outcome of a sync.

    Attributes:
        engines: the engines that are proven to have the version.
        proven: the measurements of the proof.
        parts: the seconds of the parts of the way, by name.
        seconds_of: the seconds of the session by step (`Session.seconds`), and of the `proof`.
    """

    version: int
    way: str
    engines: list[Engine]
    seconds: float
    num_bytes: int
    num_tensors: int
    proven: Proven
    parts: Mapping[str, float]
    seconds_of: dict[str, float]

    def gap(self) -> dict[str, float]:
        """Return the gap of the probe's responses, for a step on older tokens only, which has no gap of its own."""
        found = self.proven.last
        return {"train/log_prob_gap_mean": found.mean, "train/log_prob_gap_max": found.largest}

    def metrics(self) -> dict[str, float]:
        """Return `sync/*`; the round that ends with the sync logs them."""
        return {
            "sync/version": self.version,
            "sync/probe_rms_diff": self.proven.last.rms,
            "sync/probe_tolerance": self.proven.tolerance,
            "sync/probe_rounding": self.proven.rounding.rms,
            "sync/probe_mean_abs_diff": self.proven.last.mean,
            "sync/probe_max_abs_diff": self.proven.last.largest,
            "sync/bytes": self.num_bytes,
            **{f"sync/{name}_seconds": seconds for name, seconds in self.parts.items()},
            "sync/pause_seconds": self.seconds_of.get("paused", 0.0),
            "sync/transfer_seconds": self.seconds_of["transfer"],
            "sync/proof_seconds": self.seconds_of["proof"],
            "sync/session_seconds": self.seconds - self.seconds_of["proof"],
        }


class WeightSync:
    """The versions of the policy, and the sessions that bring them to the engines.

    Args:
        args: `pause_mode`, `sync_timeout`, `sync_tolerance`, `precision`, and how engines answer and are started.
        way: the way of the run.
        folder: the run's folder in the shared memory of this host.
        vocab_size, max_len: see `Proof`; only for a new proof.
        proof: an existing proof, which may have scored the weights that the engines loaded.
        start_on: see `Session`; without it no engine is restarted.
        turns: which side has the GPUs; None: each side has its own.
    """

    def __init__(
        self,
        args: Settings,
        actor: RoleTrainer,
        way: str,
        folder: Path,
        *,
        vocab_size: int = 0,
        max_len: int = 0,
        proof: Proof | None = None,
        start_on: Callable[[Sequence[Engine], Path], None] | None = None,
        turns: Turns | None = None,
    ):
        self._args, self._actor, self.way, self._start_on = args, actor, way, start_on
        self._turns = turns or Turns(args)
        self.version = 0
        self.proof = proof or Proof(args, vocab_size=vocab_size, max_len=max_len)
        self._folder, self._held = folder, False

    def close(self) -> None:
        gate().reset()

    def hold(self, engines: Sequence[Engine]) -> None:
        """Stop the answers of `engines` until the next `run`; `--pause-mode` decides what happens to their requests.

        Engines that take turns with the trainer sleep, and the trainer gets their memory.

        Raises:
            EngineGone: no engine is left.
        """
        self.proof.begin(engines)
        gate().close()
        session = self._session(engines)
        session.drain()
        session.pause()
        self._turns.to_trainer(session)
        self._held = True

    def begin(self, engines: Sequence[Engine]) -> None:
        """Give the GPUs to `engines` at first, with the weights that they loaded."""
        self._session(engines).hand_over()

    @contextmanager
    def trainer_at_work(self, engines: Sequence[Engine]) -> Iterator[None]:
        """Give a parked trainer all of its memory for a while; requests wait, and `engines` keep their weights."""
        gate().close()
        session = self._session(engines)
        session.drain()
        with self._turns.borrowed(session, optimizer=True):
            yield
            session.renew()
        gate().open(gate().version)

    def _session(self, engines: Sequence[Engine], version: int | None = None) -> Session:
        version = version or self.version
        return Session(self._args, self._actor, engines, version, self._folder, self._start_on, self._turns)

    def run(self, engines: Sequence[Engine], way: str | None = None) -> SyncResult:
        """Bring a new version to `engines`, by `way` (default: the run's way).

        Raises:
            SyncError: the weights did not arrive, or the proof failed; the error names engine and tensor.
            EngineGone: no engine is left.
        """
        for engine in engines:
            engine.capabilities.check_pause(self._args.pause_mode, arrays=answers_in_arrays(self._args))
        self.proof.begin(engines)
        self.proof.probe.turn()
        session = self._session(engines, self.version + 1)
        self.version += 1
        gate().close()
        session.drain()
        result = self._carry(session, way, opens=True)
        self._held = False
        self._open(session)
        return result

    def _open(self, session: Session) -> None:
        """Admit requests again."""
        known = self._args.pause_mode == "keep" or all(e.capabilities.version_spans for e in session.engines)
        gate().open(None if known else str(self.version))

    def rejoin(self, engine: Engine) -> SyncResult:
        """Bring the current version to one restarted engine, while the others serve.

        Raises:
            EngineGone: the engine died again.
        """
        return self._carry(self._session([engine]), None, opens=False)

    def accuse(self, engines: Sequence[Engine], error: SyncError, where: str) -> SyncError:
        """Find the engines behind a too large gap (`error`): score the probe again, send nothing."""
        resume = "resume from the last checkpoint"
        try:
            session = self._session(engines)
            if lost := [e.name for e in engines if not e.has_weights]:
                what = f"{', '.join(lost)} dropped the weights when the trainer's turn began"
                raise EngineError(what, where=where, remedy="run once with --no-offload-rollout")
            if self._held and not self._turns.are_taken:  # no step has changed a weight yet
                session.each(lambda e: e.resume(timeout=session.seconds_left()))
            wrong = self.proof.differing(session)
        except InstepError as failure:
            what = f"{error.what}; the engines could not score the probe again: {failure.what}"
            return SyncError(what, where=where, remedy=f"{failure.remedy}; {resume}")
        if off := [f"{e.name} at {e.url} (by {wrong[e.url].mean:.3g} nats)" for e in engines if e.url in wrong]:
            found = f"version {self.version} is not what these engines hold any more: {', '.join(off)}, by their scores"
            remedy = "another process loaded weights into them: their logs show the calls of their control routes"
            return SyncError(f"{error.what}; {found} of the probe", where=where, remedy=f"{remedy}; {resume}")
        holders = ", ".join(f"{e.name} at {e.url}" for e in engines)
        return SyncError(
            f"{error.what}; version {self.version} is what each engine holds now ({holders})",
            where=where,
            remedy="look at `instep samples RUN_DIR --worst gap --tokens`: does a generate function record other "
            "tokens, log-probs or sampling parameters than the engine's, or did an engine keep cache entries of "
            f"earlier weights? If the arithmetic differs by so much, raise --sync-tolerance or use --on-gap warn; "
            f"{resume}",
        )

    def _carry(self, session: Session, way: str | None, opens: bool) -> SyncResult:
        way = way or self.way
        sent = session.transfer(way)
        if opens and self._args.pause_mode == "keep" and not self._turns.are_taken:
            self._open(session)
        with session.timed("proof"):
            proven = self.proof.prove(session, way, sent)
        return SyncResult(
            version=int(session.version),
            way=way,
            engines=session.engines,
            seconds=time.monotonic() - session.started,
            num_bytes=sum(t.nbytes for t in sent.tensors),
            num_tensors=len(sent.tensors),
            proven=proven,
            parts=sent.seconds,
            seconds_of=session.seconds,
        )
