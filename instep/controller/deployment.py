"""The processes of a run: workers, engines and routers. They are started, synced, watched and ended together."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from instep.arguments.all_flags import own_hooks
from instep.arguments.args import Args, Runtime
from instep.arguments.rollout import context_of_model
from instep.arguments.settings import HookSettings
from instep.cluster.base import Cluster
from instep.cluster.engine_plan import gpu_sharing
from instep.cluster.launch import make_cluster
from instep.cluster.local import WorkerGroup
from instep.controller.drafts import AcceptedDrafts
from instep.controller.fleet import Fleet
from instep.controller.run_state import Beginning
from instep.controller.sync.probe import start_token
from instep.controller.sync.proof import Proof
from instep.controller.sync.session import EngineGone
from instep.controller.sync.weight_sync import SyncResult, WeightSync
from instep.controller.trainer import Trainer
from instep.controller.turns import Turns
from instep.engines.engine import Engine
from instep.engines.flags import passed_on
from instep.errors import EngineError, SyncError
from instep.observability.run_logger import RunLogger
from instep.rollout.client import get_model_url
from instep.rollout.request_gate import gate
from instep.rollout.scorer import served_reference
from instep.rollout.teacher import served_teacher
from instep.rollout.tokens import tokenizer_of
from instep.system.ports import check_loopback
from instep.system.processes import LOOK_SECONDS, Process
from instep.system.scratch import Scratch, memory_scratch, sweep
from instep.types import Group
from instep.weights.bridge import shared_folder
from instep.weights.way import LORA, SINGLE_COPY, way_meant
from instep_engine.place import SYNC


class Deployment:
    """The processes of one run. `start` makes them ready; `close` ends them, also after a failed `start`.

    Args:
        hook_args: the view of `args` that hooks get; `runtime` is its part that is known only once engines run.
        hf_config: config.json of `--hf-checkpoint`.
        beginning: the checkpoint of the weights, and the state of a resumed run.

    Attributes:
        engines: of all models; empty before `start`.
        worker_groups: the workers of the actor and of the critic, if there are any; empty before `start`.
        trainer: the workers with loaded models; None with `--debug-rollout-only`.
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
        self.worker_groups: list[WorkerGroup] = []
        self._cluster: Cluster | None = None
        self._fleet = Fleet(args, [], restart=None, log_dir=log.run_dir / "logs", status=log.progress.line)
        self._sync: WeightSync | None = None
        self._thread = threading.current_thread()  # which drives the workers
        self._has_stepped = False
        self.turns, self._drafts = Turns(args), AcceptedDrafts()
        sweep(log.run_dir)
        self._scratch = Scratch("instep-run-")
        self._memory = memory_scratch(f"{SYNC}{os.getpid()}-")

    # ---- start and end -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all processes, load the models, and let the engines serve the weights of `--hf-checkpoint`."""
        self._check_servers()
        cluster = self._start_processes()
        self._serve(cluster, self._load_models(cluster))

    def _check_servers(self) -> None:
        """Report servers that do not work or do not fit, before anything starts."""
        check_loopback()
        self._shared()
        if (teacher := served_teacher(self._args)) is not None and not self._args.debug_rollout_only:
            self._bound_context(teacher.check(tokenizer_of(self._args)))

    def _start_processes(self) -> Cluster:
        """Start workers, engines and routers; none of them has a model yet."""
        self._cluster = cluster = make_cluster(
            self._args,
            log_dir=self._log.run_dir / "logs",
            scratch=self._scratch.path,
            memory=self._memory.path,
            with_engines=self._with_engines,
            status=self._log.status,
        )
        cluster.start()
        self.engines = cluster.engines
        self.worker_groups = [group for group in (cluster.workers, cluster.critic) if group.num_ranks]
        for group in self.worker_groups:
            group.watch, group.hooks = self.check, own_hooks(self._args)
        for engine in self.engines:
            engine.watch = partial(self._check_call, engine)
        self._fleet = Fleet(
            self._args,
            self.engines,
            restart=cluster.restart_engine,
            log_dir=self._log.run_dir / "logs",
            status=self._log.progress.line,
            takes_turns=self.turns.are_taken,
        )
        return cluster

    def _load_models(self, cluster: Cluster) -> Proof | None:
        """Load the trainer, and wait for the engines. Where both are on the same GPUs, one goes before the other.

        Engines measure the free memory, which must not change meanwhile.
        """
        args, turns = self._args, self.turns
        if cluster.room is not None:  # engines only import until the trainer has left the GPUs, or has its memory there
            self._load_trainer(cluster)
            if self.trainer is not None:  # compile its layers while the engines start
                self.trainer.actor.probe_log_probs(self._proof(128).probe.batch(), args.sync_timeout)
            turns.leave()
            cluster.room.touch()
            return self._wait_ready()
        if args.offload_rollout:
            timeout = args.worker_start_timeout + args.engine_start_timeout
            setup = cluster.setup_requests
            imports = [g.start("prepare", setup[g.role][0][0], timeout=timeout) for g in self.worker_groups]
            proof = self._wait_ready()
            turns.begin(self.engines)
            for finish in imports:
                finish()
            self._load_trainer(cluster)
            return proof
        self._load_trainer(cluster)
        return self._wait_ready()

    def _serve(self, cluster: Cluster, proof: Proof | None) -> None:
        """Admit requests to the engines. They have the weights of --hf-checkpoint: a trial keeps no samples."""
        args, fleet, turns = self._args, self._fleet, self.turns
        if args.rollout_top_p < 1 or args.rollout_top_k > 0:
            self._log.status(
                "top-p/top-k: the engine's log-probs are of the truncated distribution, the gap shows the difference"
            )
        self._runtime.update(fleet.hook_attributes())
        self._runtime["num_rollout"] = self._num_rollout
        gate().guarded = get_model_url(self._hook_args, endpoint="/")
        gate().num_cached_tokens = fleet.num_cached_tokens()
        if (router := fleet.policy_router) is not None:
            gate().packed = router.packed
        if self.engines and self.trainer is not None:
            way, actor = self._chosen_way(cluster), self.trainer.actor
            self._sync = WeightSync(args, actor, way, self._shared(), proof=proof, start_on=fleet.start_on, turns=turns)
            if turns.are_taken:
                self._sync.begin([engine for engine in self.engines if engine.update_weights])
            # The first sync of a resume brings the weights of the checkpoint, which already have this version.
            self._sync.version = max(0, int((self._beginning.state or {}).get("version", 0)) - 1)
        fleet.admit(self.engines)
        if (name := args.ref_served_model) and (reference := served_reference(args, self._hook_args)) is not None:
            self._bound_context(reference.check(tokenizer_of(args), fleet.of_model(name)[0].url))

    def _load_trainer(self, cluster: Cluster) -> None:
        if not cluster.workers.num_ranks:
            return
        self.trainer = Trainer(
            self._args,
            cluster,
            self._beginning,
            num_rollout=self._num_rollout,
            scratch=self._scratch.path,
            tell=self._log.progress.line,
        )
        self.turns.roles = self.trainer.roles
        if (checkpoint := self._beginning.checkpoint) is not None:
            self._log.status(f"continuing from {checkpoint} at rollout {self._beginning.rollout_id}")

    def _proof(self, max_len: int) -> Proof:
        config = self._hf_config
        return Proof(self._args, vocab_size=int(config["vocab_size"]), max_len=max_len, start=start_token(config))

    def _wait_ready(self) -> Proof | None:
        """Wait for the engines; one of them writes the first texts of the probe."""
        self._fleet.wait_ready(self._args.engine_start_timeout)
        if not self.engines or self._args.debug_rollout_only:
            return None
        proof = self._proof(context_of_model(self._args) or 128)
        proof.begin([engine for engine in self.engines if engine.update_weights])
        return proof

    def _shared(self) -> Path:
        """Return the shared-memory folder for weights; with an external server, the folder that it shares."""
        args = self._args
        external = args.weight_sync == SINGLE_COPY and args.rollout_external_engine_addrs
        return shared_folder(args.vllm_config_path) if external else self._memory.path

    def _chosen_way(self, cluster: Cluster) -> str:
        """Return the way of the weight syncs, and report what `auto` or `lora` mean here."""
        named = self._args.weight_sync
        way, why = way_meant(named, cluster.one_host, gpu_sharing(self._args))
        if why:
            what = "adapters" if named == LORA else "weights"
            self._log.progress.line(f"{what} travel by {way} (--weight-sync {named}: {why})")
        return way

    def close(self) -> None:
        """End all processes and remove the files that no one needs any more."""
        self._fleet.close()
        if self._cluster is not None:
            self._cluster.close()
        gate().reset()
        self._scratch.remove()
        self._memory.remove()

    def _bound_context(self, most: int) -> None:
        """End responses at the limit of the served model that scores them."""
        if (self._hook_args.rollout_max_context_len or context_of_model(self._args) or most) > most:
            self._runtime["rollout_max_context_len"] = most
            ends = f"prompt and response end at {most} tokens"
            self._log.progress.line(f"{ends}: the model that scores them takes no more")

    # ---- at work -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the policy; 0 where nothing is synced."""
        return self._sync.version if self._sync is not None else 0

    @property
    def trained_version(self) -> int:
        """The version of the weights in the workers: after a step, the version of the next sync; 0: no version."""
        return self.version + bool(self.version and self._has_stepped)

    def stepped(self) -> None:
        """Record that the workers took optimizer steps: no engine has their weights before the next sync."""
        self._has_stepped = True

    @property
    def processes(self) -> list[Process]:
        """All processes of the run that its controller supervises."""
        return [*self._fleet.processes, *(p for group in self.worker_groups for p in group.processes)]

    def offer(self, groups: list[Group]) -> None:
        """Let the proof of the next sync also score a text of these groups."""
        if self._sync is not None:
            self._sync.proof.probe.offer(groups)

    def sync_weights(self) -> SyncResult | None:
        """Bring a new, proven version from the workers to every engine; return None without workers or engines."""
        if self._sync is None:
            return None
        fleet = self._fleet
        with self._log.phase("sync"):
            self._wait_for_starts()
            began = fleet.available()
            try:
                result = self._sync.run(began)
            except EngineGone as error:
                raise EngineError(error.what, where=error.where, remedy=error.remedy) from error
            fleet.synced(began, result.engines)
        self._has_stepped = False
        if result.proven.first.rms > result.proven.tolerance:
            how = f"differed by {result.proven.first.rms:.3g} at first, and agreed in a second comparison"
            self._log.progress.line(f"sync {result.version}: trainer's and engine's scores of the probe {how}")
        return result

    def hold_engines(self) -> None:
        """Pause the engines while the trainer writes into their memory (single-copy), or give their GPUs to it."""
        if self._sync is not None and (self._sync.way == SINGLE_COPY or self.turns.are_taken):
            with self._log.phase("sync"):
                self._wait_for_starts()
                self._sync.hold(self._fleet.available())

    @contextmanager
    def trainer_at_work(self) -> Iterator[None]:
        """Give the trainer its memory after a sync, when it has left the GPUs to the engines."""
        if self._sync is None or not self._args.offload_train:
            yield
            return
        self._wait_for_starts()
        with self._sync.trainer_at_work(self._fleet.available()):
            yield

    def _wait_for_starts(self) -> None:
        """Wait until no engine is starting whose memory the trainer gets next; only `check_and_rejoin` starts one.

        Raises:
            EngineError: an engine did not become ready within --engine-start-timeout.
        """
        deadline = time.monotonic() + 1.1 * self._args.engine_start_timeout  # a late engine is ended first
        while self.turns.are_taken and self._fleet.is_starting:
            self.check()
            if time.monotonic() > deadline:
                what = "a restarted engine is not ready, and the trainer waits for its GPU"
                raise EngineError(what, where="--engine-start-timeout", remedy="see the engine's log")
            time.sleep(LOOK_SECONDS)

    def memory(self, phase: str) -> dict[str, float]:
        """Return the memory of the trainer and of its GPUs at the end of a phase, as metrics."""
        if self.trainer is None:
            return {}
        return {f"memory/{phase}/{name}": value for name, value in self.trainer.actor.memory().items()}

    def accepted_drafts(self) -> dict[str, float]:
        """See `AcceptedDrafts.take`; nothing where no flag asks for speculative decoding."""
        speculates = {"speculative_config", "speculative_algorithm"} & passed_on(self._args).keys()
        return self._drafts.take(self._fleet.available()) if speculates else {}

    @property
    def gap_limit(self) -> float:
        """The largest mean log-prob gap that is allowed for tokens of the last synced version."""
        return self._sync.proof.gap_limit if self._sync is not None else math.inf

    def accused(self, error: SyncError, rollout_id: int) -> SyncError:
        """Return the error of a too large gap, with the engines that do not have the trainer's weights."""
        assert self._sync is not None, "without a sync no token is of a version"
        return self._sync.accuse(self._fleet.available(), error, f"rollout {rollout_id}")

    def check(self) -> None:
        """Raise if a worker, the router or the last engine died or was stopped."""
        self._fleet.check()
        for group in self.worker_groups:
            group.check_alive()

    def _check_call(self, engine: Engine) -> None:
        """Check while a control call to `engine` waits; the call ends as soon as the engine is known to be lost."""
        self.check()
        self._fleet.check_reachable(engine)

    def check_and_rejoin(self) -> None:
        """Check while engines generate, and restart those that died.

        A ready engine gets its weights if the workers are at rest and have that version.
        """
        self.check()
        self._fleet.start_dead()
        if threading.current_thread() is not self._thread or self._has_stepped:
            return
        fleet = self._fleet
        for engine in fleet.waiting():
            if self._args.offload_train and engine.update_weights:
                continue  # the trainer's weights are offloaded: the next sync brings them
            held = [engine]
            if self._sync is not None and engine.update_weights:
                try:
                    self._sync.rejoin(engine)
                except EngineGone:
                    held = []  # the fleet notices it, too
            fleet.synced([engine], held)
