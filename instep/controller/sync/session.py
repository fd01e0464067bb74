"""A session of a sync: which engines take part, one deadline, and the steps around what a way carries.

    drain -> pause -> workers publish while engines load -> finish (version) -> reset caches -> resume

No request to the policy is sent before the proof that follows (`proof.py`, `rollout/admission.py`). `--pause-mode` says
what becomes of requests that are under way:

- abort: they end with the tokens they have; the rollout continues them under the new weights.
- wait: the session begins when they have ended.
- keep: the engine freezes them, and continues them with a cache that it computes anew. Their next tokens are made
  before the proof; if the proof fails the run ends, so that none of these tokens is trained on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from instep.controller.role import RoleTrainer
from instep.engines.engine import Engine, EngineRefusal
from instep.errors import EngineError, InstepError, SyncError
from instep.rollout import admission
from instep.weights.way import GOLDEN, Order, Sent, way_named

if TYPE_CHECKING:
    from instep.arguments.settings import Settings

T = TypeVar("T")


class EngineGone(EngineError):
    """The last engine of a session has died."""


class Session:
    """One session, which brings `version` to `engines`.

    Args:
        args: `pause_mode`, `sync_timeout`, `update_weight_buffer_size`, `hf_checkpoint`, and where engines may run.
        engines: the engines that the session begins with; one that dies meanwhile is taken out.
        memory_folder: a folder in the shared memory of this host.

    Raises:
        EngineGone: no engine takes part.
    """

    def __init__(
        self, args: Settings, actor: RoleTrainer, engines: Sequence[Engine], version: int, memory_folder: Path
    ):
        if not engines:
            raise EngineGone("no engine is left that could take weights", remedy="see the messages before this one")
        self.args, self.actor, self.version = args, actor, str(version)
        self.engines = list(engines)
        self._began = {engine.url: engine.process for engine in engines}
        self._memory_folder = memory_folder
        self.started = time.monotonic()
        self._deadline = self.started + args.sync_timeout

    def seconds_left(self) -> float:
        """Seconds until the deadline.

        Raises:
            SyncError: the deadline has passed.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise SyncError(
                "the weight sync did not end within its time",
                where="--sync-timeout",
                remedy="see the engines' logs for what they wait for; raise the bound if the model is large",
            )
        return left

    def drain(self) -> None:
        """Wait until no request of this run is under way; with `keep` they stay, and the engines report versions."""
        while self.args.pause_mode != "keep" and admission.num_under_way():
            if self.args.pause_mode == "abort":  # again and again: one may have been on its way to an engine
                self.each(lambda e: e.abort_requests(timeout=self.seconds_left()))
            time.sleep(admission.LOOK_SECONDS)
            self.actor.watch()
            self.seconds_left()

    def pause(self) -> None:
        self.each(lambda e: e.pause(self.args.pause_mode, timeout=self.seconds_left()))

    def transfer(self, way: str) -> Sent:
        """Bring the weights to all engines by `way`; they serve the new version when this returns, unproven.

        The death of one engine may break what others receive: they receive once more.

        Raises:
            SyncError: an engine refused something; the message names the tensor.
        """
        while True:
            try:
                return self._transfer(way)
            except (SyncError, EngineError) as error:
                named = isinstance(error.__cause__, EngineRefusal) and error.__cause__.tensor  # it is no death's fault
                if isinstance(error, EngineGone) or named or not self._leave_dead(error):
                    raise

    def _leave_dead(self, error: InstepError) -> bool:
        """Whether engines have died, which leave the session."""
        with ThreadPoolExecutor(len(self.engines)) as pool:
            gone = list(pool.map(lambda e: self._gone(e, max(1.0, e.kind.dying_seconds)), self.engines))
        dead = [engine for engine, is_gone in zip(self.engines, gone, strict=True) if is_gone]
        for engine in dead:
            self._leave(engine, error)
        return bool(dead)

    def _transfer(self, way: str) -> Sent:
        carriage = _Carriage(self, way, secrets.token_hex(8))
        try:
            self.pause()
            self.each(lambda e: e.start_update(self.version, carriage.nonce, timeout=self.seconds_left()))
            sent = way_named(way).drive(carriage)
            names = [t.name for t in sent.tensors]
            self.each(lambda e: e.finish_update(self.version, names, timeout=self.seconds_left()))
            self.each(lambda e: e.reset_cache(timeout=self.seconds_left()))
            self.each(lambda e: e.resume(timeout=self.seconds_left()))
        except EngineRefusal as refusal:
            tensor = f" (tensor {refusal.tensor})" if refusal.tensor else ""
            raise SyncError(
                f"version {self.version} did not arrive: {refusal.what}{tensor}",
                where=refusal.where,
                remedy="the run stops before a token is made with wrong weights; resume from the last checkpoint, "
                f"and try --weight-sync {GOLDEN} if it happens again",
            ) from refusal
        return sent

    def each(self, call: Callable[[Engine], T]) -> dict[str, T]:
        """Call all engines at once; returns the answers by URL. An engine that has died leaves the session."""
        for engine in [e for e in self.engines if self._gone(e, 0.0)]:
            self._leave(engine, None)
        targets = list(self.engines)
        with ThreadPoolExecutor(len(targets)) as pool:
            calls = {engine.url: pool.submit(call, engine) for engine in targets}
        answers: dict[str, T] = {}
        for engine in targets:
            try:
                answers[engine.url] = calls[engine.url].result()
            except EngineError as error:
                refused = isinstance(error, EngineRefusal) and (error.code < 500 or error.tensor is not None)
                dying = max(1.0, engine.kind.dying_seconds)
                if not self._gone(engine, 0.0 if refused else dying):
                    raise
                self._leave(engine, error)
        return answers

    def _gone(self, engine: Engine, seconds: float) -> bool:
        """Whether the process that the session began with has ended, or ends within `seconds`.

        A new process at the same address counts as another engine. An engine that somebody else runs has no process
        here: with `seconds` its health decides.
        """
        process = self._began[engine.url]
        if process is None:
            return seconds > 0 and not (engine.healthy(seconds) and engine.answers(seconds))
        return engine.process is not process or process.died_within(seconds)

    def _leave(self, engine: Engine, error: InstepError | None) -> None:
        self.engines.remove(engine)
        if not self.engines:
            what = error.what if error is not None else f"{engine.name} died"
            where = engine.process.describe() if engine.process is not None else engine.url
            remedy = engine.process.remedy() if engine.process is not None else "see its log"
            raise EngineGone(f"{what}; no engine is left in this sync", where=where, remedy=remedy) from error


class _Carriage:
    """One transfer of a session, as the way's driver sees it (`Carriage`)."""

    def __init__(self, session: Session, way: str, nonce: str):
        self._session, self._way, self.nonce = session, way, nonce
        args = session.args
        self.memory_folder = session._memory_folder
        elsewhere = args.cluster == "ray" or args.rollout_external_engine_addrs
        self.disk_folder = Path(args.run_dir) if elsewhere else None  # the run's folder is seen by all hosts

    def receivers(self) -> tuple[str, int]:
        engines = self._session.engines
        audience = ",".join(f"{e.url}#{e.process.pid if e.process is not None else ''}" for e in engines)
        return audience, sum(self._session.each(lambda e: e.num_workers(self.seconds_left())).values())

    def publish(
        self, folder: Path, on_event: Callable[[Any], None], audience: str = "", num_receivers: int = 0
    ) -> None:
        args, left = self._session.args, self.seconds_left()
        size, model = int(args.update_weight_buffer_size), Path(args.hf_checkpoint)
        order = Order(self._session.version, self.nonce, folder, size, model, left, audience, num_receivers)
        self._session.actor.publish(self._way, order, timeout=left, on_event=on_event)

    def deliver(self, info: dict[str, Any], failed: Callable[[], None] | None = None) -> None:
        def load(engine: Engine) -> None:
            try:
                engine.update(info, timeout=self.seconds_left())
            except InstepError:
                if failed is not None:
                    failed()
                raise

        self._session.each(load)

    def seconds_left(self) -> float:
        return self._session.seconds_left()
