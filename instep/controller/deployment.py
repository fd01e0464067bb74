"""The processes of a run, its workers, engines and routers: started, made ready, synced, watched and ended together."""

from __future__ import annotations

import math
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from instep.arguments.args import Runtime
from instep.arguments.rollout import context_of_model
from instep.cluster.launch import Cluster, make_cluster
from instep.cluster.local import WorkerGroup
from instep.controller.fleet import Fleet
from instep.controller.run_state import Beginning
from instep.controller.sync.session import EngineGone
from instep.controller.sync.weight_sync import SyncResult, WeightSync
from instep.controller.trainer import Trainer
from instep.engines.engine import Engine
from instep.errors import EngineError, SyncError
from instep.observability.run_logger import RunLogger
from instep.processes import Process
from instep.rollout import admission
from instep.rollout.client import get_model_url
from instep.rollout.scorer import served_reference
from instep.rollout.teacher import served_teacher
from instep.rollout.tokens import tokenizer_of
from instep.scratch import Scratch, memory_root, places, sweep
from instep.weights.place import SYNC
from instep.weights.way import AUTO, auto_way

if TYPE_CHECKING:
    from instep.arguments.args import Args
    from instep.arguments.settings import HookSettings


class Deployment:
    """The processes of one run. `start` makes them ready; `close` ends them, also after a `start` that has failed.

    Args:
        hook_args: the view of `args` that hooks get; `runtime` is its part that is known only when engines run.
        hf_config: config.json of `--hf-checkpoint`.
        beginning: the checkpoint that the weights come from, and the state of the run that goes on.

    Attributes:
        engines: of all models; none before `start`.
        trainer: the workers with their models loaded; None with `--debug-rollout-only`.
    """

    def __init__(
        self,
        args: Args,
        hook_args: HookSettings,
        runtime: Runtime,
        hf_config: dict[str, Any],
        beginning: Beginning,
        log: RunLogger,
        *,
        num_rollout: int,
        with_engines: bool,
    ):
        self._args, self._hook_args, self._runtime, self._hf_config = args, hook_args, runtime, hf_config
        self._beginning, self._log = beginning, log
        self._num_rollout, self._with_engines = num_rollout, with_engines
        self.engines: list[Engine] = []
        self.trainer: Trainer | None = None
        self._cluster: Cluster | None = None
        self._fleet: Fleet | None = None
        self._sync: WeightSync | None = None
        for root, pattern in places(log.run_dir, args.save_hf):
            sweep(root, pattern)
        self._scratch = Scratch("instep-run-")
        self._memory = Scratch(f"{SYNC}{os.getpid()}-", memory_root())

    # ---- start and end -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all processes, load the models, and let the engines serve the weights of `--hf-checkpoint`."""
        args, logs, line = self._args, self._log.run_dir / "logs", self._log.progress.line
        if (teacher := served_teacher(args)) is not None and not args.debug_rollout_only:
            self._bound_context(teacher.check(tokenizer_of(args)))
        status, with_engines = self._log.status, self._with_engines
        self._cluster = make_cluster(
            args,
            log_dir=logs,
            scratch=self._scratch.path,
            memory=self._memory.path,
            with_engines=with_engines,
            status=status,
        )
        self._cluster.start()
        self.engines = self._cluster.engines
        for group in self.worker_groups:
            group.watch = self.check
        for engine in self.engines:
            engine.watch = partial(self._check_call, engine)
        restart = self._cluster.restart_engine
        self._fleet = fleet = Fleet(args, self.engines, restart=restart, log_dir=logs, status=line)
        if self._cluster.workers.num_ranks:
            self.trainer = Trainer(
                args,
                self._cluster,
                self._beginning,
                num_rollout=self._num_rollout,
                scratch=self._scratch.path,
                tell=line,
            )
            if (checkpoint := self._beginning.checkpoint) is not None:
                status(f"continuing from {checkpoint} at rollout {self._beginning.rollout_id}")
        if args.rollout_top_p < 1 or args.rollout_top_k > 0:
            status(
                "top-p/top-k: the engine's log-probs are of the truncated distribution, the gap shows the difference"
            )
        fleet.wait_ready(args.engine_start_timeout)
        self._runtime.update(fleet.hook_attributes())
        self._runtime["num_rollout"] = self._num_rollout
        admission.guard(get_model_url(self._hook_args, endpoint="/"))
        if self.engines and self.trainer is not None:
            vocab_size, max_len = int(self._hf_config["vocab_size"]), self._model_len(128)
            way, actor = self._chosen_way(), self.trainer.actor
            self._sync = WeightSync(args, actor, way, self._memory.path, vocab_size=vocab_size, max_len=max_len)
            self._sync.version = int((self._beginning.state or {}).get("version", 0))  # versions go on, never back
        fleet.admit(self.engines)  # with --hf-checkpoint's weights: a trial keeps nothing of what they make
        if (name := args.ref_served_model) and (reference := served_reference(args, self._hook_args)) is not None:
            self._bound_context(reference.check(tokenizer_of(args), fleet.of_model(name)[0].url))

    def _chosen_way(self) -> str:
        """The way of the weight syncs; says what `auto` means here."""
        assert self._cluster is not None
        way: str = self._args.weight_sync
        if way != AUTO:
            return way
        way, why = auto_way(self._cluster.one_host)
        self._log.progress.line(f"weights travel by {way} (--weight-sync auto: {why})")
        return way

    def close(self) -> None:
        """End all processes and remove their files that nobody needs any more."""
        for part in (self._fleet, self._cluster, self._sync):
            if part is not None:
                part.close()
        self._scratch.remove()
        self._memory.remove()

    def _model_len(self, default: int) -> int:
        """The most tokens of a sequence that the policy takes."""
        return context_of_model(self._args) or default

    def _bound_context(self, most: int) -> None:
        """Let responses end where the served model that scores them takes no more tokens."""
        if (self._hook_args.rollout_max_context_len or self._model_len(most)) > most:
            self._runtime["rollout_max_context_len"] = most
            self._log.progress.line(
                f"prompt and response end at {most} tokens: the model that scores them takes no more"
            )

    # ---- at work -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the policy; 0 where nothing is synced."""
        return self._sync.version if self._sync is not None else 0

    @property
    def worker_groups(self) -> list[WorkerGroup]:
        """The workers of the actor and of the critic."""
        return [self._cluster.workers, self._cluster.critic] if self._cluster is not None else []

    @property
    def processes(self) -> list[Process]:
        """All processes of the run that its controller supervises."""
        engines = self._fleet.processes if self._fleet is not None else []
        return [*engines, *(p for group in self.worker_groups for p in group.processes)]

    def sync_weights(self) -> SyncResult | None:
        """Bring a new version from the workers to every engine, proven; None where one of the two is missing."""
        if self._sync is None:
            return None
        fleet = self._require_fleet()
        with self._log.phase("sync"):
            began = fleet.available()
            try:
                result = self._sync.run(began)
            except EngineGone as error:
                raise EngineError(error.what, where=error.where, remedy=error.remedy) from error
            fleet.synced(began, result.engines)
        if result.first_diff > result.tolerance and self._args.precision == "fp32":
            how = f"differed by {result.first_diff:.3g} at first, and agreed when they were asked again"
            self._log.progress.line(f"sync {result.version}: trainer's and engine's scores of the probe {how}")
        return result

    def hold_engines(self) -> None:
        """Pause the engines while the trainer writes into the memory that they compute with (single-copy)."""
        if self._sync is not None and self._sync.writes_in_place:
            with self._log.phase("sync"):
                self._sync.hold(self._require_fleet().available())

    @property
    def gap_limit(self) -> float:
        """The largest mean log-prob gap of tokens that the engines have made with the version of the last sync."""
        return self._sync.gap_limit if self._sync is not None else math.inf

    def accused(self, error: SyncError, rollout_id: int) -> SyncError:
        """The error of a gap that is too large, with the engines that do not hold the trainer's weights."""
        assert self._sync is not None, "without a sync no token is of a version"
        return self._sync.accuse(self._require_fleet().available(), error, f"rollout {rollout_id}")

    def check(self) -> None:
        """Raise if a worker, the router or the last engine has died, or has been stopped."""
        self._require_fleet().check()
        for group in self.worker_groups:
            group.check_alive()

    def _check_call(self, engine: Engine) -> None:
        """Check while a control call to `engine` waits, which is over as soon as the engine is known to be lost."""
        fleet = self._require_fleet()
        self.check()
        fleet.check_reachable(engine)

    def check_and_rejoin(self) -> None:
        """Check while the workers have nothing to do: an engine that has been started anew gets its weights."""
        self.check()
        fleet = self._require_fleet()
        for engine in fleet.waiting():
            if self._sync is not None and engine.update_weights:
                try:
                    self._sync.rejoin(engine)
                except EngineGone:
                    continue  # the fleet sees it, too
            fleet.admit([engine])

    def _require_fleet(self) -> Fleet:
        assert self._fleet is not None, "the controller is used as a context manager"
        return self._fleet
