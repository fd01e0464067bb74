"""A session of a sync: its engines, one deadline, and the steps around the transfer by a way.

    drain -> start -> workers publish -> pause when the first part is ready -> engines load -> finish (version)
    -> reset caches -> resume

An adapter is not in use before `finish`: the engines receive it while they generate, and pause when it is complete.

The proof (`proof.py`) follows when the engines serve again. `--pause-mode` decides what happens to open requests. No
new request is admitted before the end of the session, nor before the proof, except with `keep`:

- abort: they end with the tokens they have; the rollout continues them with the new weights.
- wait: the session begins when they have ended.
- keep: the engine freezes them, and continues them with a recomputed cache. Tokens are generated before the
  proof; if it fails, the run ends and none of them is trained.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from instep.arguments.settings import Settings
from instep.controller.role import RoleTrainer
from instep.controller.turns import Turns
from instep.engines.engine import Engine, EngineRefusal
from instep.errors import EngineError, InstepError, SyncError
from instep.rollout.request_gate import LOOK_SECONDS, gate
from instep.system.run_context import RunThreads
from instep.system.spans import span
from instep.weights.way import GOLDEN, OF_ADAPTERS, Order, Sent, way_named
from instep_engine import BROKEN
from instep_engine.stream import StreamBroken

T = TypeVar("T")


class EngineGone(EngineError):
    """The last engine of a session died."""


class Session:
    """One session, which brings `version` to `engines`; the driver of a way uses it as its `Carriage`.

    Args:
        args: `pause_mode`, `sync_timeout`, `update_weight_buffer_size`, `hf_checkpoint`, and where engines may run.
        engines: the engines at the beginning of the session; one that dies leaves it.
        memory_folder: a folder in the shared memory of this host.
        start_on: ends engines of this run and starts them on a checkpoint (`Fleet.start_on`).
        turns: which side has the GPUs; None: each side has its own.

    Raises:
        EngineGone: no engine takes part.
    """

    def __init__(
        self,
        args: Settings,
        actor: RoleTrainer,
        engines: Sequence[Engine],
        version: int,
        memory_folder: Path,
        start_on: Callable[[Sequence[Engine], Path], None] | None = None,
        turns: Turns | None = None,
    ):
        if not engines:
            raise EngineGone("no engine is left to take the weights", remedy="see the messages before this one")
        self.args, self.actor, self.version = args, actor, str(version)
        self.turns = turns or Turns(args)
        self.engines = list(engines)
        self._began = {engine.url: engine.process for engine in engines}
        self.memory_folder, self._start_on = memory_folder, start_on
        self.disk_folder: Path | None = None
        self._way, self._nonce = "", ""  # of the transfer
        self._receiving = 0  # engines of a stream; it ends with any of them
        self.started = time.monotonic()
        # By step. `paused`: how long the engines generated nothing, also while they read an adapter.
        self.seconds: dict[str, float] = {}
        self._paused: float | None = None  # since when
        self._on_leave: Callable[[], None] = lambda: None  # called when an engine leaves
        self.stays_paused = False  # after a transfer: a client paused the engines, and will call `resume`
        self.renew()

    def renew(self) -> None:
        """Restart the clock of the session."""
        self._deadline = time.monotonic() + self.args.sync_timeout

    def seconds_left(self) -> float:
        """Return the seconds until the deadline.

        Raises:
            SyncError: the deadline has passed.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise SyncError(
                "the weight sync did not end within its time",
                where="--sync-timeout",
                remedy="see the engines' logs for what they wait for; raise the limit if the model is large",
            )
        return left

    def drain(self) -> None:
        """Wait for the open requests of this run; with `keep` they stay, and the engines report versions."""
        while self.args.pause_mode != "keep" and gate().num_under_way:
            if self.args.pause_mode == "abort":  # repeatedly: a request may have been on its way to an engine
                self.each(lambda e: e.abort_requests(timeout=self.seconds_left()))
            time.sleep(LOOK_SECONDS)
            self.actor.workers.watch()
            self.seconds_left()

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Add the seconds of the block to `step`."""
        began = time.monotonic()
        try:
            with span(step):
                yield
        finally:
            self._count(step, began)

    def _count(self, step: str, began: float) -> None:
        self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - began

    def pause(self) -> None:
        """Stop the engines' generation; do nothing if they are paused already."""
        if self._paused is None:
            began = time.monotonic()
            with self.timed("pause"):
                self.each(lambda e: e.pause(self.args.pause_mode, timeout=self.seconds_left()))
            self._paused = began

    def resume(self) -> None:
        """Let the engines generate again, without keys and values of earlier weights."""
        with self.timed("reset"):
            self.each(lambda e: e.reset_cache(timeout=self.seconds_left()))
        with self.timed("resume"):
            self.each(lambda e: e.resume(timeout=self.seconds_left()))
        if self._paused is not None:
            self._count("paused", self._paused)
            self._paused = None

    def hand_over(self) -> None:
        """Give the GPUs to the engines and let them generate; without turns they already do."""
        if self.turns.are_taken:
            self.turns.to_engines(self)
            self.resume()

    def transfer(self, way: str) -> Sent:
        """Bring the weights to all engines by `way`; they serve the new version, unproven, after `hand_over`.

        The death of one engine may break what others receive: they receive again. The same happens, once, if the
        stream of an earlier session broke: an external engine may have been restarted at its address.

        Raises:
            SyncError: an engine refused something; the message names the tensor.
        """
        may_be_stale = True
        while True:
            num_began = len(self.engines)
            try:
                return self._transfer(way)
            except (SyncError, EngineError) as error:
                refusal = error.__cause__ if isinstance(error.__cause__, EngineRefusal) else None
                broke = isinstance(error.__cause__, StreamBroken) or (refusal is not None and BROKEN in refusal.what)
                died = isinstance(error, EngineError) or (refusal is not None and not refusal.is_deliberate)
                if isinstance(error, EngineGone) or not (broke or died):
                    raise
                if len(self.engines) < num_began:
                    continue
                if broke and may_be_stale:
                    may_be_stale = False
                elif not self._leave_dead(error):
                    raise

    def _leave_dead(self, error: InstepError) -> bool:
        """Remove engines that died or die now from the session; return whether there are any."""
        engines = list(self.engines)
        with RunThreads(len(engines)) as pool:
            gone = pool.map(lambda e: self._gone(e, max(1.0, e.kind.dying_seconds)), engines)
        dead = [engine for engine, is_gone in zip(engines, gone, strict=True) if is_gone]
        for engine in dead:
            self._leave(engine, error)
        return bool(dead)

    def _transfer(self, way: str) -> Sent:
        self._way, self._nonce, self._receiving = way, secrets.token_hex(8), 0
        if self.args.cluster == "ray" or self.args.rollout_external_engine_addrs:
            self.disk_folder = Path(self.args.run_dir)  # all hosts see it
        try:
            if self.turns.are_taken:
                self.pause()
                self.turns.to_sync(self)
            with self.timed("start"):
                self.each(lambda e: e.start_update(self.version, self._nonce, timeout=self.seconds_left()))
            with self.timed("transfer"):
                sent = way_named(way).drive(self)
            names = [t.name for t in sent.tensors]
            self.pause()
            with self.timed("finish"):
                self.each(lambda e: e.finish_update(self.version, names, timeout=self.seconds_left()))
            for engine in self.engines:
                engine.has_weights = True
            # With turns the trainer first scores the probe, and leaves.
            if not (self.turns.are_taken or self.stays_paused):
                self.resume()
        except EngineRefusal as refusal:
            tensor = f" (tensor {refusal.tensor})" if refusal.tensor else ""
            raise SyncError(
                f"version {self.version} did not arrive: {refusal.what}{tensor}",
                where=refusal.where,
                remedy="the run stops before a token is generated with wrong weights; resume from the last checkpoint, "
                f"and try --weight-sync {GOLDEN} if it happens again",
            ) from refusal
        return sent

    # ---- what a way asks for, see `Carriage` -----------------------------------------------------------------------

    def audience(self) -> str:
        return ",".join(f"{e.url}#{e.process.pid if e.process is not None else ''}" for e in self.engines)

    def receivers(self) -> tuple[str, int]:
        counts = self.each(lambda e: e.kind.num_workers(e, self.seconds_left()))
        self._receiving = len(self.engines)
        return self.audience(), sum(counts.values())

    def publish(
        self, folder: Path, on_event: Callable[[Any], None], audience: str = "", num_receivers: int = 0
    ) -> None:
        args, left = self.args, self.seconds_left()
        size, model = int(args.update_weight_buffer_size), Path(args.hf_checkpoint)
        order = Order(self.version, self._nonce, folder, size, model, left, audience, num_receivers)
        self.actor.publish(self._way, order, timeout=left, on_event=on_event)

    def show(self, info: dict[str, Any]) -> None:
        self.each(lambda e: e.update(info, timeout=self.seconds_left()))

    def deliver(self, info: dict[str, Any], failed: Callable[[], None] | None = None) -> None:
        began, tell = time.monotonic(), failed or (lambda: None)

        def load(engine: Engine) -> None:
            try:
                engine.update(info, timeout=self.seconds_left())
            except InstepError:
                tell()
                raise

        self._on_leave = tell
        try:
            if self._way not in OF_ADAPTERS:
                self.pause()
            if len(self.engines) < self._receiving:
                tell()  # others would wait for the engine that left
            with self.timed("load"):
                self.each(load)
            if self._paused is None:  # an engine makes no step while its workers read
                self._count("paused", began)
        finally:
            self._on_leave = lambda: None

    def start_anew(self, checkpoint: Path) -> list[str]:
        """Restart the engines of the session on `checkpoint`. This thread starts their processes: the kernel ends
        them together with it (`follow_parent`)."""
        if self._start_on is None or any(engine.process is None for engine in self.engines):
            what = f"{self.engines[0].name} was not started by this run, so the run cannot restart it"
            raise SyncError(what, where=self.engines[0].url, remedy=f"use --weight-sync {GOLDEN}")
        self._start_on(self.engines, checkpoint)
        self._began |= {engine.url: engine.process for engine in self.engines}
        bound = min(self.args.engine_start_timeout, self.seconds_left())
        self.each(lambda e: e.wait_ready(bound))
        since, self._paused = self._paused, None  # the new processes are not paused
        self.pause()
        self._paused = since or self._paused
        self.each(lambda e: e.start_update(self.version, self._nonce, timeout=self.seconds_left()))
        return [engine.url for engine in self.engines]

    # ---- engines that die --------------------------------------------------------------------------------------------

    def each(self, call: Callable[[Engine], T]) -> dict[str, T]:
        """Call all engines at once; return the answers by URL. A dead engine leaves the session."""
        for engine in [e for e in self.engines if self._gone(e, 0.0)]:
            self._leave(engine, None)
        targets = list(self.engines)
        with RunThreads(len(targets)) as pool:
            calls = {engine.url: pool.submit(call, engine) for engine in targets}
        answers: dict[str, T] = {}
        for engine in targets:
            try:
                answers[engine.url] = calls[engine.url].result()
            except EngineError as error:
                refused = isinstance(error, EngineRefusal) and error.is_deliberate
                dying = max(1.0, engine.kind.dying_seconds)
                if not self._gone(engine, 0.0 if refused else dying):
                    raise
                self._leave(engine, error)
        return answers

    def _gone(self, engine: Engine, seconds: float) -> bool:
        """Return whether the engine's first process of this session has ended, or ends within `seconds`.

        A new process at the same address counts as another engine. An external engine has no process
        here: if `seconds` is not 0, its health decides.
        """
        process = self._began[engine.url]
        if process is None:
            return seconds > 0 and not (engine.healthy(seconds) and engine.answers(seconds))
        return engine.process is not process or process.died_within(seconds)

    def _leave(self, engine: Engine, error: InstepError | None) -> None:
        self.engines.remove(engine)
        self._on_leave()
        if not self.engines:
            what = error.what if error is not None else f"{engine.name} died"
            where = engine.process.describe() if engine.process is not None else engine.url
            remedy = engine.process.remedy() if engine.process is not None else "see its log"
            raise EngineGone(f"{what}; no engine is left in this sync", where=where, remedy=remedy) from error
