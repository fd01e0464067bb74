"""The logger of a run: files, TensorBoard, W&B, Trackio, the progress display and the report."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from instep.errors import writing
from instep.observability.alarms import AlarmWatch, Limits, describe
from instep.observability.figures import SUMMARY, duration, figures_of, legend_of, number
from instep.observability.metrics import is_step
from instep.observability.output import lost_output
from instep.observability.progress import Phase, Progress
from instep.observability.report import make_report
from instep.observability.run_folder import move_run_aside
from instep.observability.samples import sample_row, to_log
from instep.observability.sinks import JsonLines, TensorBoard, WandB, jsonable, read_json_lines, write_json
from instep.observability.step_table import PHASE
from instep.observability.trackio import Trackio
from instep.observability.versions import versions
from instep.system.private import without_credentials, without_secrets
from instep.system.spans import span
from instep.types import Group, as_number

ALARM, NOTE = "bold red", "yellow"
NUM_NOTES = 3


class RunLogger:
    """A context manager around a whole run, which writes into `run_dir`:

    `config.json` (arguments without secrets, versions, process), `metrics.jsonl` (one row per call of `log`),
    `samples.jsonl`, `timeline.jsonl` (phases, requests and processes: `timeline.py`), `tensorboard/` and `wandb/` if
    asked for. `finish` writes `summary.json` and `report.html`, also for an interrupted run. An error writes
    `logs/error.txt` with message and traceback.

    The exit always stops the display, restores the terminal and closes the files, also on an exception or
    Ctrl-C. `phase` and `status` may be called from any thread.

    Args:
        args_dict: the resolved arguments, for `config.json` and W&B.
        num_steps: the number of steps of the whole run, if known.
        wandb: None, or `project`, `group`, `mode`, `team`, `run_id`, `dir`; never a key.
        trackio: None, or `project`, `run_name`, `server_url`.
        resume_from_step: None: a new run (files of an earlier run move to `run_dir`/old-<n>). A number: continue the
            files of an earlier session, without their rows of that `step` (samples: `rollout_id`) and later. The
            timeline keeps all its rows.
        run_id: the identity of the run, for config.json; None for a run of an earlier instep.
    """

    def __init__(
        self,
        run_dir: Path,
        args_dict: Mapping[str, Any],
        *,
        title: str,
        num_steps: int | None,
        use_tensorboard: bool = True,
        wandb: Mapping[str, Any] | None = None,
        trackio: Mapping[str, str | None] | None = None,
        resume_from_step: int | None = None,
        run_id: str | None = None,
        console: Console | None = None,
    ):
        self.run_dir = Path(run_dir)
        with writing(self.run_dir, "--run-dir"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self.moved = move_run_aside(self.run_dir) if resume_from_step is None else None
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}  # of ended phases, by name
        self._failures: list[tuple[BaseException, str]] = []  # each error with the phase that it ended
        self._failed = False
        self._num_notes = 0
        self._close = ExitStack()
        with ExitStack() as stack:  # closes what is already open if a later step fails
            config = {"title": title, "run_id": run_id, "args": without_secrets(args_dict), "versions": versions()}
            process = {"pid": os.getpid(), "host": socket.gethostname(), "started": psutil.Process().create_time()}
            write_json(self.run_dir / "config.json", {**config, "process": process})  # the doctor checks if it lives
            for old in ("summary.json", "logs/error.txt"):  # of an earlier session
                (self.run_dir / old).unlink(missing_ok=True)
            done = resume_from_step or 0
            paths = [self.run_dir / name for name in ("metrics.jsonl", "samples.jsonl")]
            self._metrics = JsonLines(paths[0], lambda row: (as_number(row.get("step")) or 0) < done)
            stack.callback(self._metrics.close)
            self._samples = JsonLines(paths[1], lambda row: (as_number(row.get("rollout_id")) or 0) < done)
            stack.callback(self._samples.close)
            self._timeline = JsonLines(self.run_dir / "timeline.jsonl", None)
            stack.callback(self._timeline.close)
            steps = [row for row in read_json_lines(paths[0]) if is_step(row)]  # of earlier sessions
            self._sinks: list[TensorBoard | WandB | Trackio] = []
            if use_tensorboard:
                self._sinks.append(TensorBoard(self.run_dir / "tensorboard", resume_from_step))
            if wandb is not None:
                self._sinks.append(WandB(self.run_dir, wandb, args_dict, title))
            stack.callback(self._close_sinks)
            self._alarms = AlarmWatch(Limits.from_args(args_dict), steps)
            figures, self._legend = figures_of(args_dict), legend_of(args_dict)
            self.progress = Progress(title, num_steps, steps_done=done, figures=figures, console=console)
            self.progress.course += [v for row in steps if (v := row.get(figures[0].metric)) is not None]
            if trackio is not None:
                offsets = {path.stem: path.stat().st_size for path in paths}
                self._sinks.append(Trackio(self.run_dir, trackio, offsets, self.progress.line))
            stack.callback(self.progress.stop)  # called first, so that errors show on a normal terminal
            self._close = stack.pop_all()

    @property
    def wandb_run_id(self) -> str | None:
        """The id of the W&B run; a checkpoint stores it, so that a resume continues the same W&B run."""
        return next((sink.run_id for sink in self._sinks if isinstance(sink, WandB)), None)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log one row of metrics of `step`. NaN and infinities become null in metrics.jsonl.

        The row of a whole step gets its `alarm/*`; a line explains an alarm when it is first raised.
        """
        row = {name: float(value) for name, value in metrics.items()}
        if is_step(row):
            raised, texts = self._alarms.check(step, row)
            row |= raised
            for text in texts:
                self.progress.line(text, ALARM)
        self._metrics.write({"step": step, "time": time.time(), **row})
        for sink in self._sinks:
            sink.log(step, row)
        self.progress.log(step, row)

    def samples(
        self,
        rollout_id: int,
        groups: Sequence[Group],
        split: str,
        limit: int,
        *,
        reward_key: str | None = None,
        rewarded: bool = True,
        texts: Callable[[list[int]], list[str]] | None = None,
        log_probs: Mapping[int, Sequence[float]] | None = None,
        entropies: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        """Write up to `limit` samples and the extreme ones to samples.jsonl; `to_log` picks them.

        Args:
            rewarded: False for samples of the data, see `sample_row`.
            texts: token ids -> the text of each.
            log_probs, entropies: the trainer's, of the response tokens by `id(sample)`, if known.
        """
        head = {"rollout_id": rollout_id, "split": split, "num_samples": sum(map(len, groups))}
        for sample in to_log(groups, limit, reward_key):
            known = ((column or {}).get(id(sample)) for column in (log_probs, entropies))
            self._samples.write({**head, **sample_row(sample, texts, *known, rewarded=rewarded)})

    def note(self, row: Mapping[str, Any]) -> None:
        """Write a row to timeline.jsonl, from any thread. Its times are Unix seconds."""
        with self._lock:
            self._timeline.write(row)

    def check(self) -> None:
        """Raise OutputError if the run's folder was moved or removed."""
        self._metrics.check()

    def sync(self) -> None:
        """Write all rows so far to the disk."""
        self._metrics.sync()
        self._samples.sync()

    @contextmanager
    def phase(self, name: str, rollout_id: int | None = None) -> Iterator[Phase]:
        """Show the phase `name` (of a round) while the block runs, and measure its seconds. Phases may overlap.

        The timeline has a row of its begin, and one of its end unless it fails.
        """
        phase, began = self.progress.begin_phase(name, rollout_id), time.time()
        row = {"phase": name, "began": began} | ({} if rollout_id is None else {"rollout_id": rollout_id})
        try:
            self.note(row)
            with span(name, facts=lambda: {PHASE: str(phase)}):
                yield phase
            self.note({**row, "ended": began + phase.seconds})
        except BaseException as error:  # also Ctrl-C: the run then reports its phase
            self._failures.append((error, str(phase)))
            raise
        finally:
            self.progress.end_phase(phase)
            with self._lock:
                self._seconds[name] = self._seconds.get(name, 0.0) + phase.seconds

    def take_seconds(self, *names: str) -> dict[str, float]:
        """Return by name the seconds of the given phases that ended since the last call."""
        with self._lock:
            return {name: self._seconds.pop(name) for name in names if name in self._seconds}

    def where(self) -> str:
        """Describe the phases in progress, with round and duration; between two phases describe the last one."""
        return "; ".join(f"{phase}, for {phase.seconds:.1f} s" for phase in self.progress.phases)

    def status(self, text: str) -> None:
        """Show a short note beside the phase, such as `groups 12/32`; an empty text removes it."""
        self.progress.set_status(text)

    def notes(self, texts: Sequence[str]) -> None:
        """Write notes to logs/notes.txt, and show the first three of the run."""
        if not texts:
            return
        path, shown = self.run_dir / "logs" / "notes.txt", max(NUM_NOTES - self._num_notes, 0)
        self._num_notes += len(texts)
        for text in texts[:shown]:
            self.progress.line(f"note: {text}", NOTE)
        if len(texts) > shown:
            self.progress.line(f"{len(texts) - shown} more notes: {path}", NOTE)
        with writing(self.run_dir):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.writelines(f"{text}\n" for text in texts)

    def ended_early(self, status: str, to_go_on: str) -> None:
        """Print how an unfinished run can continue. This comes first, because a second Ctrl-C may end the rest."""
        self.progress.stop()
        how = "the loop was left" if status == "left" else status
        print(f"{how}, {self.progress.steps_text()}; {to_go_on}", file=sys.stderr, flush=True)

    def finish(self, summary: Mapping[str, Any], status: str = "finished", to_go_on: str = "") -> dict[str, Any]:
        """Write summary.json (with the first step of each alarm) and report.html, and print the final table.

        Args:
            status: finished, interrupted, or left (by a loop of the user).
            to_go_on: how an unfinished run can continue; it gets no table.

        Returns:
            The content of summary.json.
        """
        for text in self._alarms.at_end():
            self.progress.line(text, ALARM)
        summary = {"status": status, **self.progress.results(), **summary, "alarms": self._alarms.first}
        if to_go_on:
            summary["to_go_on"] = to_go_on
        if lost_output:
            summary["lost_output"] = "; ".join(lost_output)
        write_json(self.run_dir / "summary.json", summary)
        with self.phase("report"), writing(self.run_dir):
            report = make_report(self.run_dir)
        if not to_go_on:
            self.progress.stop(keep_panel=False)
            self.progress.console.print(summary_table(self.progress.title, summary))
        self.progress.line(f"report: {report}")
        if not to_go_on:
            self.progress.line(_next(self.run_dir, summary.get("model")), "bold")
        return summary

    def _close_sinks(self) -> None:
        with ExitStack() as stack:  # one that fails keeps none of the others open
            for sink in self._sinks:
                stack.callback(sink.close, self._failed)

    def __enter__(self) -> RunLogger:
        self.progress.start()
        self.progress.line(self._legend, "dim")
        if self.moved is not None:
            self.progress.line(f"an earlier run was in {self.run_dir}: its files are in {self.moved} now")
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        self._failed = exc is not None
        if exc is not None:  # first: a tracker may take its time to close
            _write_error(self.run_dir / "logs" / "error.txt", exc)
        self._close.close()
        if exc is not None:
            phase = next((phase for error, phase in self._failures if error is exc), self.progress.phase)
            print(f"stopped in phase {phase}, {self.progress.steps_text()}: {type(exc).__name__}", file=sys.stderr)


def _write_error(path: Path, error: BaseException) -> None:
    text = without_credentials("".join(traceback.format_exception(error)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{str(error) or type(error).__name__}\n\n{text}")
    except OSError as failed:  # for example a full disk; the error itself must stay visible
        print(f"{path} could not be written: {failed}", file=sys.stderr)


def summary_table(title: str, summary: Mapping[str, Any]) -> Table:
    """Return a table of a summary's scalars in readable units, without nested values such as `versions`."""
    table = Table(title=title, box=box.ROUNDED, show_header=False, title_style="bold")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", style="bold", overflow="fold")
    table.add_column(style="dim")
    for name, value in summary.items():
        if name == "alarms":
            table.add_row(name, describe(value).replace(", ", "\n"), SUMMARY[name])
        elif not isinstance(value, (Mapping, list, tuple)):
            table.add_row(name, readable(name, value), SUMMARY.get(name, ""))
    return table


def _next(run_dir: Path, model: str | None) -> str:
    """Return what to do after a run."""
    use = f", instep serve --hf-checkpoint {model} (the model)" if model else ""
    return f"next: instep view {run_dir} (curves), instep samples {run_dir} (texts){use}"


def readable(name: str, value: Any) -> str:
    """Format a value of a summary for people, in the unit of its name."""
    value = jsonable(value)
    if value is None:
        return "n/a"
    if isinstance(value, (bool, str)):
        return str(value)
    if name.endswith("_bytes"):
        return f"{value / 1e9:.2f} GB"
    if name.endswith("seconds"):
        return f"{duration(value)} ({value:.1f} s)"
    return f"{value:,}" if isinstance(value, int) else number(value, 4)
