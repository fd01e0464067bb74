"""The profile of whole steps (--profile): a timeline of all processes, and a table of the time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from instep.arguments.args import Args
from instep.arguments.model import known_config
from instep.cluster.engine_plan import plan_engines
from instep.controller.deployment import Deployment
from instep.controller.round import Rollout
from instep.controller.sync.weight_sync import SyncResult
from instep.engines.engine import Engine
from instep.engines.kind import profile_folder
from instep.errors import EngineError, writing
from instep.observability import floors
from instep.observability.run_logger import RunLogger
from instep.observability.step_table import StepTable, step_table
from instep.observability.trace import write_trace
from instep.system import spans
from instep.system.spans import Span

MOST_SPANS = 400_000  # in a file: about 50 MB of JSON, 5 MB compressed
STOP_TIMEOUT = 300.0  # seconds for an engine to write its recording; a run can do without it
WARM_STEPS = 2  # of `instep profile`, before the recorded step
CLOCK = (
    "nanoseconds of the wall clock, minus otherData.began_ns; processes of a host agree within microseconds, "
    "events of torch's profiler within a tenth of a millisecond, hosts as well as NTP allows"
)


def of_profile(args: Args) -> Args:
    """Return the arguments of `instep profile`: a run of three steps that keeps nothing and touches no other run."""
    return args.replace(
        profile=True,
        profile_step_start=WARM_STEPS,
        profile_step_end=WARM_STEPS + 1,
        num_rollout=WARM_STEPS + 1,
        num_epoch=None,
        start_rollout_id=None,
        finetune=args.load is not None,  # use its weights, from the first rollout on
        lr_decay_style="constant",  # a schedule may be longer than this run
        num_critic_only_steps=0,
        run_dir=f"{args.run_dir.rstrip('/')}-profile",
        save=None,
        save_hf=None,
        critic_save=None,
        eval_interval=None,
        use_wandb=False,
        use_trackio=False,
    )


class StepProfile:
    """Record the rollouts from `--profile-step-start` to before `--profile-step-end`; nothing without `--profile`."""

    def __init__(self, args: Args, deployment: Deployment, log: RunLogger):
        self._args, self._deployment, self._log = args, deployment, log
        self._steps = range(args.profile_step_start, args.profile_step_end) if args.profile else range(0)
        self._folder = Path(log.run_dir) / "profile"
        self._rollout: Rollout | None = None
        self._sync: SyncResult | None = None

    def note(self, rollout: Rollout, sync: SyncResult | None) -> None:
        """Remember the rollout and the sync of the step."""
        self._rollout, self._sync = rollout, sync

    @contextmanager
    def step(self, rollout_id: int) -> Iterator[None]:
        """Record the block if its step is to be recorded, and write the trace file and the table."""
        if rollout_id not in self._steps:
            yield
            return
        with self._log.phase("start of the profile", rollout_id):
            machine, engines = self._start()
        spans.start("controller")
        begin = spans.now() or 0
        try:
            yield
            end = spans.now() or 0
        finally:
            found = spans.stop()
        with self._log.phase("end of the profile", rollout_id):
            found += self._stop(engines, begin, end)
            table = step_table(found, begin, end, self._floors(machine, found))
            self._write(rollout_id, sorted(found, key=_order), begin, table)

    def _start(self) -> tuple[dict[str, Any], list[Engine]]:
        """Start recording in all processes; return one rank's facts about its machine, and the engines that record."""
        machines: list[dict[str, Any]] = []
        for group in self._deployment.worker_groups:
            machines += group.call("start_profile", self._args.profile_ranks, timeout=self._args.train_timeout)
        engines = []
        for engine in self._deployment.engines:
            try:
                engine.kind.start_profile(engine, timeout=self._args.train_timeout)
                engines.append(engine)
            except EngineError as error:  # an engine of the user may have no profiler
                self._log.progress.line(f"{engine.name} is not in the profile: {error.what}")
        return next(iter(machines), {}), engines

    def _stop(self, engines: Sequence[Engine], begin: int, end: int) -> list[Span]:
        groups = self._deployment.worker_groups
        most = MOST_SPANS // (len(engines) + sum(group.num_ranks for group in groups) + 1)
        found, timeout = list[Span](), self._args.train_timeout
        for group in groups:
            answers = group.call("stop_profile", begin, end, most, timeout=timeout)
            found += [Span(*s) for answer in answers for s in answer]
        timeout = min(STOP_TIMEOUT, timeout)
        for engine in engines:
            try:
                folder = self._folder / profile_folder(engine.name)
                of_engine = engine.kind.stop_profile(engine, folder, timeout=timeout)
            except (EngineError, OSError, ValueError) as error:  # also for a trace file that a full disk cut
                what = error.what if isinstance(error, EngineError) else error
                self._log.progress.line(f"{engine.name} is not in the profile: {what}")
                continue
            found += spans.within(of_engine, begin, end, most)
        return found

    def _floors(self, machine: dict[str, Any], found: Sequence[Span]) -> dict[str, float | None]:
        args = self._args
        model = floors.Model.of(known_config(args), 4 if args.precision == "fp32" else 2)
        peak = floors.peak_of(machine) if machine else None
        if model is None or peak is None or self._rollout is None:
            return {}
        trained = [s for group in self._rollout.groups for s in group]
        samples = [(len(s.tokens) - s.response_length, s.response_length) for s in trained]
        lora, gpus = bool(args.lora_rank), args.world_size
        early = self._rollout.early.metrics() if self._rollout.early is not None else {}
        out: dict[str, float | None] = {"optimizer": None if lora else floors.optimizer(model, peak, gpus)}
        if not early.get("perf/early_train_seconds"):  # else the phase is only a part of the training
            out["forward and backward"] = floors.training(model, samples, peak, gpus, lora=lora)
        if not early.get("perf/early_log_probs_seconds"):
            out["log-probs"] = num_scored(found) * floors.scoring(model, samples, peak, gpus)
        turns = [(s.facts["prompt_tokens"], s.facts.get("tokens", 0)) for s in found if s.name == "turn"]
        if turns and (engines := [e for e in plan_engines(args) if e.update_weights]):
            out["generate"] = floors.decoding(model, turns, peak, len(engines), engines[0].parallel.tensor)
        if self._sync is not None:
            out["transfer"] = floors.transfer(self._sync.way, self._sync.num_bytes, peak)
        return out

    def _write(self, rollout_id: int, found: Sequence[Span], begin: int, table: StepTable) -> None:
        path, line = self._folder / f"step-{rollout_id}.trace.json.gz", self._log.progress.line
        rows = [{"phase": r.phase, "part": r.part, "seconds": r.seconds, "floor": r.floor} for r in table.rows]
        about = {"rollout_id": rollout_id, "seconds": table.seconds, "began_ns": begin, "clock": CLOCK, "table": rows}
        title = f"where rollout {rollout_id} went ({path}, {len(found)} spans; open it with ui.perfetto.dev)"
        with writing(self._log.run_dir, "--run-dir"):
            self._folder.mkdir(exist_ok=True)
            write_trace(path, found, begin, about)
            (self._folder / f"step-{rollout_id}.txt").write_text(f"{title}\n{table.text()}\n")
        line(title)
        line(table.text())


def num_scored(found: Sequence[Span]) -> int:
    """Return how many models scored the rollout: the old policy, the reference, the teacher."""
    calls = [s for s in found if s.name == "log_probs" and s.track == "actor rank 0"]
    passes = [s for s in found if s.name == "forward_only" and _inside(s, calls)]
    return sum(not _inside(s, [p for p in passes if p is not s]) for s in passes)  # a LoRA reference calls the policy


def _inside(s: Span, others: Sequence[Span]) -> bool:
    return any(s.track == other.track and other.begin <= s.begin <= s.end <= other.end for other in others)


def _order(s: Span) -> tuple[bool, bool, str, int]:
    """Return the sort key: the controller first, then samples, then the other processes; within each by time."""
    return s.track != "controller", s.track != spans.ROLLOUT, s.track, s.begin
