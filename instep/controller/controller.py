"""The controller: the one process that decides the order of a run.

It has the data source, the ledger and the run's state, and writes the records. The weights are in the workers and
engines of its deployment. The schedule of a run is in `instep/train_sync.py`, which passes each round from call to call
as a value. The controller keeps only what belongs to the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from instep.arguments.all_flags import own_hooks
from instep.arguments.args import Args, Runtime
from instep.checkpoints.folders import checkpoints_read, finish_renames
from instep.checkpoints.hf_export import check_hf_checkpoint
from instep.checkpoints.integrity import check_whole
from instep.controller import dumps
from instep.controller.debug_dump import dump_on_signal, write_dump
from instep.controller.deployment import Deployment
from instep.controller.device import resolve_on_machine
from instep.controller.gauges import gauges
from instep.controller.profile import StepProfile
from instep.controller.records import Records
from instep.controller.round import Rollout, TrainedBatch, TrainedRollout, TrainingRound
from instep.controller.round_metrics import (
    IdleClock,
    evaluation_metrics,
    logs_evaluation,
    metrics_of_rollout,
    speed_metrics,
    staleness_metrics,
    trackio_settings,
    training_metrics,
    wandb_settings,
)
from instep.controller.run_state import beginning, check_savable, data_state, how_to_go_on, restore_data
from instep.controller.saves import Saves
from instep.controller.space import check_space, num_saves
from instep.controller.totals import Totals
from instep.controller.trainer import Trainer
from instep.controller.trial import HookTrial
from instep.controller.watch import Watch, collect_seldom, compute_in_one_thread
from instep.data.ledger import Ledger, LedgeredDataSource
from instep.data.messages import clock
from instep.data.source import load_source, num_rollouts
from instep.engines.kind import kind_of
from instep.errors import CheckpointError, SyncError
from instep.observability.memory import PssSampler
from instep.observability.run_logger import RunLogger
from instep.rollout import runtime
from instep.rollout.eval import read_sets
from instep.rollout.outputs import as_eval_output, as_train_output
from instep.rollout.request_gate import gate
from instep.system.endings import raise_for_exit
from instep.system.hooks import Hook
from instep.system.processes import lock_folders
from instep.types import RolloutFnTrainOutput


class Controller:
    """A run, as a context manager: its exit ends every process that the run started.

    Args:
        title: of the run, for people.
        with_engines: whether any engine generates.
    """

    def __init__(self, args: Args, *, title: str, with_engines: bool = True):
        self.run_dir, self.totals = Path(args.run_dir), Totals()
        folders = {"--run-dir": args.run_dir, "--save": args.save, "--critic-save": args.critic_save}
        with ExitStack() as undo:
            for lock in lock_folders(folders):  # in a notebook the traceback of an error would keep the locks
                undo.callback(lock.release)
            undo.callback(runtime.shutdown)
            if own_hooks(args):
                undo.callback(raise_for_exit())
            self._prepare(args, title, with_engines)
            self._undo = undo.pop_all()

    def _prepare(self, args: Args, title: str, with_engines: bool) -> None:
        """Read and check all that a run needs before a process starts."""
        self.args = args = resolve_on_machine(args, with_engines=with_engines)
        hf_config = check_hf_checkpoint(Path(args.hf_checkpoint))
        runtime_attributes: Runtime = {}
        self.hook_args = args.view(runtime_attributes)  # for hooks: read-only, no secrets
        self.ledger = Ledger()
        for root in filter(None, (args.save, args.critic_save)):
            finish_renames(Path(root))
        self._beginning = beginning(args)  # raises before the log of the earlier session changes
        resumed, self.start_rollout_id = self._beginning.state, self._beginning.rollout_id
        clock().started = (resumed or {}).get("started") or time.strftime("%Y-%m-%dT%H:%M:%S")
        source = load_source(args, self.hook_args, hf_config["vocab_size"])
        under_way = bool(args.save) and args.command == "train-async"
        self.data_source = LedgeredDataSource(source, self.ledger, under_way=under_way)
        if with_engines and args.eval_interval is not None:
            read_sets(self.hook_args)
        self.num_rollout = num_rollouts(args, source)
        self._rollout_hook = Hook("--rollout-function-path", args.rollout_function_path)
        self._rollout_function = dumps.replay(args) if args.load_debug_rollout_data else self._rollout_hook.call
        self._eval_hook = Hook("--eval-function-path", args.eval_function_path)
        self._memory = PssSampler()
        if self._has_work:
            check_whole(*checkpoints_read(args), tell=partial(print, flush=True))
        self._space = check_space(args, num_saves(args, self.num_rollout - self.start_rollout_id))
        self._trial = HookTrial(args, self.hook_args, source)
        if self._has_work:
            self._trial.before_start()  # also before the log changes
        self.log = RunLogger(
            self.run_dir,
            args.to_dict(),
            title=title,
            num_steps=self.num_rollout,
            use_tensorboard=args.use_tensorboard,
            trackio=trackio_settings(args),
            wandb=wandb_settings(args, (resumed or {}).get("wandb_run_id")),
            resume_from_step=self.start_rollout_id if resumed else None,
            run_id=self._beginning.run_id,
        )
        self._records = Records(args, self.hook_args, self.log)
        of_run = args, self.hook_args, runtime_attributes, hf_config, self._beginning, self.log
        self.deployment = Deployment(*of_run, num_rollout=self.num_rollout, with_engines=with_engines)
        self._saves = Saves(args, self._beginning, self.deployment, self.log.progress.line)
        self.profile = StepProfile(args, self.deployment, self.log)
        hooks = ", ".join(path for _, path in own_hooks(args))
        dying = kind_of(args.rollout_backend).dying_seconds if with_engines else 0.0
        self._watch = Watch(self.deployment.check_and_rejoin, hooks, args.controller_memory_limit, dying)

    # ---- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Controller:
        self._undo.callback(compute_in_one_thread())
        self._memory.start()
        self._undo.callback(dump_on_signal(self._dump))
        self.log.__enter__()
        with ExitStack() as unless_started:
            unless_started.push(self)
            with self.log.phase("start"):
                self._start()
            self._undo.callback(collect_seldom())
            self._idle = IdleClock()
            unless_started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        left = isinstance(error, GeneratorExit)  # a user's loop ended early: this is not a failure
        with self._undo:  # runs also after a second Ctrl-C
            self._undo.callback(self.log.__exit__, *((None, None, None) if left else (kind, error, traceback)))
            to_go_on, status = "", "left" if left else "interrupted"
            self._saves.last()
            if left or isinstance(error, KeyboardInterrupt):
                to_go_on = how_to_go_on(self.args, self._beginning.run_id)
                self.log.ended_early(status, to_go_on)
            runtime.shutdown()
            self.deployment.close()
            self._saves.close()
            self._memory.stop()
            if to_go_on:
                self.log.finish(self._summary(), status, to_go_on)

    def _start(self) -> None:
        args = self.args
        for line in (*self._beginning.notes, *self._space):
            self.log.progress.line(line)
        if self.start_rollout_id >= self.num_rollout > 0:
            covered = f": {self._beginning.checkpoint} covers all earlier ones" if self._beginning.state else ""
            what = f"the next rollout would be {self.start_rollout_id} of --num-rollout {self.num_rollout}{covered}"
            self.log.progress.line(f"nothing is left to train, {what}")
        if (state := self._beginning.state) is not None and (folder := self._beginning.checkpoint) is not None:
            self.totals.restore(state)
            restore_data(self.data_source, state, int(state["rollout_id"]), folder)
        if args.dump_details:
            dumps.copy_tokenizer(Path(args.hf_checkpoint), Path(args.dump_details) / "tokenizer")
        self.log.notes([*args.notes, *self._trial.notes])
        if not self._has_work:
            return
        self.deployment.start()
        self._memory.sample()  # the processes are there; the next sample may be seconds away
        if (trainer := self.deployment.trainer) is not None:
            self._training = TrainingRound(args, self.hook_args, trainer.actor, trainer.critic)
        if self.deployment.engines:
            self._trial.notes.clear()
            self._trial.with_engine()
            self.log.notes(self._trial.notes)

    @property
    def _has_work(self) -> bool:
        """Whether there is something left to train or to evaluate."""
        return self.start_rollout_id < self.num_rollout or self.args.eval_interval is not None

    # ---- what the loop calls -------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Bring a new version of the policy to every engine; do nothing without workers or without engines."""
        result = self.deployment.sync_weights()
        if result is not None:
            self.totals.add_sync(result)

    def generate(self, rollout_id: int) -> Rollout:
        """Generate the groups of one round, with rewards, and finish them in the ledger."""
        of_rollouts = runtime.state()
        of_rollouts.listener = lambda done, total, extra: self.log.status(f"groups {done}/{total}")
        version, dropped_before = self.deployment.version or None, self.ledger.num_dropped
        data, early = self.data_source.of_round(rollout_id, version), None
        if self.deployment.trainer is not None:
            critic_only, of_trainer = rollout_id < self.args.num_critic_only_steps, self.deployment.trained_version
            early = self._training.early(rollout_id, of_trainer, critic_only=critic_only)
        of_rollouts.kept_listener = early.add if early is not None else None
        more = {"meanwhile": early.work} if early is not None else {}
        idle = gate().idle_seconds()
        with self.log.phase("rollout", rollout_id) as phase:
            call = partial(self._rollout_function, self.hook_args, rollout_id, data, evaluation=False)
            output = as_train_output(self.call(call, f"rollout {rollout_id}", **more), self._rollout_hook)
            self.log.status("")
            idle = gate().idle_seconds() - idle
        self._note_requests()
        data.finish_rollout(output.samples)
        num_dropped = self.ledger.num_dropped - dropped_before
        rollout = self.rollout_of(rollout_id, output, num_dropped, {"rollout": phase.seconds})
        if self.deployment.engines and idle < 0.99 * phase.seconds:  # else the client is not used
            rollout.metrics["perf/reward_seconds"] = idle
        return replace(rollout, early=early)

    def rollout_of(
        self, rollout_id: int, output: RolloutFnTrainOutput, num_dropped: int, seconds: dict[str, float]
    ) -> Rollout:
        """Record and return the rollout of one round, whose groups are finished in the ledger."""
        metrics = metrics_of_rollout(self.hook_args, rollout_id, output, seconds.get("rollout", 0.0))
        metrics["rollout/num_dropped_groups"] = float(num_dropped)
        if rollout_id == self.start_rollout_id:  # an error now is better than one at the first save, hours later
            check_savable(self.args, (sample for group in output.samples for sample in group))
        rollout = Rollout(rollout_id, output.samples, metrics, seconds)
        self._records.generated(rollout, output.metrics)
        return rollout

    def call(self, work: Callable[[], Any], what: str, **more: Any) -> Any:
        """Call a rollout function in a watched thread; see `Watch.run`."""
        return self._watch.run(work, timeout=self.args.rollout_timeout, what=what, **more)

    def train(self, rollout: Rollout) -> TrainedRollout | None:
        """Train on one rollout and consume its groups in the ledger; return None with `--debug-rollout-only`."""
        args, rollout_id, groups = self.args, rollout.rollout_id, rollout.groups
        if args.debug_rollout_only:
            return None
        batch: TrainedBatch | None = None
        memory = self.deployment.memory("rollout")
        self.deployment.offer(groups)
        self.deployment.hold_engines()
        try:
            with self.log.phase("train", rollout_id) as phase:
                batch = self._training.run(
                    groups,
                    self.totals.num_steps,
                    self._records.wanted(groups),
                    num_critic_steps_before=self.totals.num_critic_steps,
                    critic_only=rollout_id < args.num_critic_only_steps,
                    version=(version := self.deployment.trained_version),
                    rollout_id=rollout_id,
                    gap_limit=self.deployment.gap_limit if args.on_gap == "stop" else math.inf,
                    early=rollout.early,
                )
        except SyncError as error:
            raise self.deployment.accused(error, rollout_id) from error
        finally:  # also after a failed training: then users look at the records
            self._records.trained(rollout, batch)
        self.ledger.consume(groups)
        metrics = {**batch.metrics, **training_metrics(batch.steps), **memory, **self.deployment.memory("train")}
        if args.command == "train-async":
            metrics |= staleness_metrics(batch.batch, version)
            of_sync = self.totals.take_gap()
            metrics |= of_sync if metrics.get("train/log_prob_gap_coverage") == 0 else {}
        trained = TrainedRollout(metrics, {"train": phase.seconds}, len(batch.batch.tokens))
        if (gap := metrics.get("train/log_prob_gap_fresh", 0.0)) > (limit := self.deployment.gap_limit):
            self.log.progress.line(f"the log-prob gap of rollout {rollout_id} is {gap:.3g} nats, more than {limit:.3g}")
        self.deployment.stepped()
        self.totals.add_training(batch)
        if self._training.uses_reference and (n := args.ref_update_interval) and (rollout_id + 1) % n == 0:
            self._saves.wait()  # it may still copy the old reference
            self._require_trainer().refresh_reference()
        return trained

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Evaluate the policy on every evaluation data set, and keep the metrics for the summary."""
        if not self.deployment.engines:
            self.log.progress.line("there is no engine: the evaluation is skipped")
            return {}
        with self.log.phase("eval", rollout_id):
            call = partial(self._eval_hook.call, self.hook_args, rollout_id, self.data_source, evaluation=True)
            output = as_eval_output(self.call(call, f"evaluation before rollout {rollout_id}"), self._eval_hook)
            self.log.status("")
        self._note_requests()
        metrics = evaluation_metrics(output, pass_rate=self.args.log_passrate)
        self._records.evaluated(rollout_id, output)
        self.totals.evaluations.append({"rollout_id": float(rollout_id), **metrics})
        if not logs_evaluation(self.hook_args, rollout_id, output):
            self.log.log(rollout_id, metrics)
        return metrics

    def save(self, rollout_id: int) -> None:
        """Write the checkpoints of `--save`, `--critic-save` and `--save-hf`."""
        with self.log.phase("save", rollout_id) as phase:
            self.log.sync()  # the checkpoint covers these rows
            try:
                self._saves.wait()
                with self.deployment.trainer_at_work():
                    self._saves.write(self._require_trainer(), rollout_id, partial(self._state, rollout_id))
            except CheckpointError:
                self.log.check()  # a clearer error, if the run's folder is gone
                raise
        self.log.log(rollout_id, {"perf/save_seconds": phase.seconds, **self._saves.metrics()})

    def _state(self, rollout_id: int) -> dict[str, Any]:
        """Return the state that a resume needs, besides the trainer's files."""
        return {
            "rollout_id": rollout_id,
            **self.totals.state(),
            "version": self.deployment.version,
            **data_state(self.data_source, rollout_id),
            "run_id": self._beginning.run_id,
            "started": clock().started,
            "wandb_run_id": self.log.wandb_run_id,
            "args": self.args.to_dict(),
        }

    def finish_step(self, rollout: Rollout, trained: TrainedRollout | None) -> dict[str, float]:
        """Check the ledger, log the metrics of one round and return them; consume untrained groups here."""
        if trained is None:
            self.ledger.consume(rollout.groups)
            trained = TrainedRollout({}, {}, 0)
        self.ledger.check()
        self._saves.check()
        # Syncs and evaluations belong to no round: count those since the last line.
        seconds = {**rollout.seconds, **trained.seconds, **self.log.take_seconds("sync", "eval", "wait")}
        generated = rollout.num_response_tokens if self.deployment.engines else None
        early = rollout.early.metrics() if rollout.early is not None else {}
        speed = speed_metrics(seconds, generated, trained.num_tokens, early.get("perf/early_train_seconds", 0.0))
        metrics = {**rollout.metrics, **trained.metrics, **early, **speed}
        metrics |= {"perf/pss_bytes": self._memory.current, "perf/peak_pss_bytes": self._memory.peak}
        metrics |= self.deployment.turns.take_seconds() | self._saves.metrics()
        trained_seconds = sum(early.values()) + seconds.get("train", 0.0)
        metrics |= self._idle.take(trained_seconds, engines=bool(self.deployment.engines))
        metrics |= runtime.state().take_array_share() | self.deployment.accepted_drafts()
        if (sync := self.totals.last_sync) is not None:
            metrics |= {**sync.metrics(), **self.deployment.memory("sync")}
        metrics |= self.totals.gpu_peak(metrics)
        self.log.log(rollout.rollout_id, metrics)
        now = gauges(self.deployment, self._memory, one_host=self.args.cluster == "local")
        self.log.note({"rollout_id": rollout.rollout_id, "time": time.time(), "processes": now})
        self._note_requests()
        self.totals.num_rounds += 1
        self.profile.note(rollout, sync)
        return metrics

    def _note_requests(self) -> None:
        if course := gate().take_course():
            self.log.note({"requests": course})

    def finish(self) -> dict[str, Any]:
        """Write summary.json and report.html, and print the final table, after a pending save has ended."""
        self._saves.wait()
        if written := self._saves.metrics():
            self.log.log(self.num_rollout - 1, written)
        return self.log.finish(self._summary())

    def _summary(self) -> dict[str, Any]:
        ends = max(self.num_rollout, self.start_rollout_id)
        return self.totals.summary(self._memory.peak, self.ledger.counts(), ends) | self._saves.exported

    def _dump(self) -> None:
        """Write stacks and queues of all processes into a file, on SIGUSR1."""
        deployment, counts, of_rollouts = self.deployment, self.ledger.counts(), runtime.state()
        calls = [f"{g.role}: {g.waits_for}" for g in deployment.worker_groups if g.waits_for]
        queues = {
            "phase": f"{self.log.where()}; {self.totals.num_steps} optimizer steps done",
            "ledger": counts
            | {"num_buffered": self.ledger.num_buffered, "num_outstanding": self.ledger.num_outstanding},
            "groups, done of total": of_rollouts.last_progress or "no rollout yet",
            "requests in flight": {u: n for u, n in of_rollouts.requests_in_flight.items() if n} or "none",
            "call to the workers": "; ".join(calls) or "none",
        }
        path = write_dump(self.run_dir / "logs", queues, deployment.processes, deployment.engines)
        self.log.progress.line(f"SIGUSR1: stacks and queues of all processes are in {path}")

    def _require_trainer(self) -> Trainer:
        assert self.deployment.trainer is not None, "nothing is trained with --debug-rollout-only"
        return self.deployment.trainer
