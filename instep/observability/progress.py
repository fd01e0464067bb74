"""The progress of a run for people: a live panel on a terminal, plain lines anywhere else (CI, a log file)."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from instep.observability.figures import Figure, duration, figures_of, number
from instep.observability.metrics import is_step

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII_BLOCKS = "_.-=+*%#"


def sparkline(values: list[float], width: int = 40, blocks: str = BLOCKS) -> str:
    """Draw the last `width` finite values as bars between minimum and maximum; equal values have half the height."""
    values = [v for v in values if math.isfinite(v)][-width:]
    if not values:
        return ""
    low, high = min(values), max(values)
    if high <= low:
        return blocks[len(blocks) // 2 - 1] * len(values)
    return "".join(blocks[round((v - low) / (high - low) * (len(blocks) - 1))] for v in values)


@dataclass(eq=False)
class Phase:
    """A part of a run, in progress or ended; `rollout_id` is its round, if it belongs to one."""

    name: str
    rollout_id: int | None
    began: float  # by `time.monotonic()`, like `ended`
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """The duration of the phase, or its time so far."""
        return (time.monotonic() if self.ended is None else self.ended) - self.began

    def __str__(self) -> str:
        return self.name if self.rollout_id is None else f"{self.name} {self.rollout_id}"


class Progress:
    """Show phases, the figures of each step, elapsed and remaining time. A step is a rollout and the training on it.

    Each step prints a line, above the panel if there is one, like everything that this process prints or logs.
    `stop` restores the terminal and may be called twice. The remaining time is the mean of the last 20 steps times the
    number of remaining steps.
    """

    def __init__(
        self,
        title: str,
        num_steps: int | None,
        *,
        steps_done: int = 0,
        figures: Sequence[Figure] | None = None,
        console: Console | None = None,
    ):
        self.title, self.num_steps, self.steps_done = title, num_steps, steps_done
        self.figures = tuple(figures or figures_of({}))
        self.console = console or Console()
        self.status = ""
        self.course: list[float] = []  # of the first figure
        self.last: dict[str, float] = {}  # metrics of the last step
        self._last_step: int | None = None
        self._seen: set[int] = set()
        self._announced: set[str] = set()
        self._start = self._last_line = now = time.monotonic()
        self.phases = [Phase("starting", None, now, now)]  # in progress; between two phases the last ended one
        self._step_end: float | None = None
        self._step_seconds: list[float] = []
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._lock = threading.Lock()
        ascii_only = self.console.options.ascii_only
        self._blocks = ASCII_BLOCKS if ascii_only else BLOCKS
        self._spinner = Spinner("line" if ascii_only else "dots")
        self._live: Live | None = None

    def start(self) -> None:
        """Show the panel, if this is a terminal."""
        if self.live or not self.console.is_terminal or self.console.is_dumb_terminal:
            return
        stdout, stderr = sys.stdout, sys.stderr
        self._live = Live(console=self.console, get_renderable=self.render, refresh_per_second=4)
        self._live.start()
        # Live replaces sys.stdout and sys.stderr, but log handlers keep the old ones and would write into the panel.
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (stdout, stderr):
                new = sys.stdout if handler.stream is stdout else sys.stderr
                self._handlers.append((handler, handler.setStream(new)))

    @property
    def live(self) -> bool:
        return self._live is not None

    def line(self, text: str, style: str = "") -> None:
        """Print a plain line, above the panel if there is one; on a terminal in this style."""
        self._last_line = time.monotonic()
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        if not self.live:
            self.console.file.flush()

    def begin_phase(self, name: str, rollout_id: int | None = None) -> Phase:
        """Begin a phase and show it. Phases may overlap, also across threads."""
        with self._lock:
            phase = Phase(name, rollout_id, time.monotonic())
            self.phases = [p for p in self.phases if p.ended is None] + [phase]
            if self._step_end is None:
                self._step_end = phase.began  # the first step begins with the first phase
            quiet = phase.began - self._last_line >= 15
            announced = not self.live and (quiet or name not in self._announced)  # once for each name
            self._announced.add(name)
        if announced:
            self.line(f"{duration(self.elapsed)} | {name}")
        return phase

    def end_phase(self, phase: Phase) -> None:
        with self._lock:
            phase.ended = time.monotonic()
            self.phases = [p for p in self.phases if p.ended is None] or [phase]

    @property
    def phase(self) -> str:
        """The names of the phases in progress, with their rounds."""
        return " + ".join(map(str, self.phases))

    def set_status(self, text: str) -> None:
        """Show a note; without a panel print it only if nothing was printed for 15 s."""
        self.status = text
        if text and not self.live and time.monotonic() - self._last_line >= 15:
            self.line(f"{duration(self.elapsed)} | {self.phase}: {text}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a row of metrics. Rows with `rollout/` or `train/` metrics count as one step per `step`."""
        with self._lock:
            if is_step(metrics):
                self.last = {**(self.last if step == self._last_step else {}), **metrics}
                self._last_step = step
                self._finish_step(step, metrics)
        for name, value in metrics.items():
            if name.startswith("eval/") and name.endswith("/reward_mean"):
                dataset = name.removeprefix("eval/").removesuffix("/reward_mean")
                length = metrics.get(f"eval/{dataset}/response_length_mean")
                self.line(
                    f"{duration(self.elapsed)} | eval {dataset}: reward {number(value)}, length {number(length, 1)}, "
                    f"after {step} rollouts"
                )

    def _finish_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step not in self._seen:
            now = time.monotonic()
            self._seen.add(step)
            self.steps_done += 1
            if self._step_end is not None:
                self._step_seconds.append(now - self._step_end)
            self._step_end = now
        if self.figures[0].metric in metrics:
            self.course.append(metrics[self.figures[0].metric])
        done = f"{self.steps_done}/{self.num_steps}" if self.num_steps else f"{self.steps_done} done"
        line = f"{duration(self.elapsed)} | rollout {step} ({done})"
        known = [f"  {f.label} {f.text(self.last[f.metric])}" for f in self.figures if f.metric in self.last]
        for figure in [*known, f"  left {duration(self.left)}"]:
            if self.live and len(line + figure) > self.console.width:  # the panel shows the rest
                break
            line += figure
        self.line(line)

    def steps_text(self) -> str:
        """Return how many rollouts are done, as text; rollout numbers start at 0."""
        return f"{self.steps_done}{f' of {self.num_steps}' if self.num_steps else ''} rollouts done"

    def results(self) -> dict[str, float]:
        """Return for the summary the first and last value of the first figure, and the last value of some others."""
        key, course = self.figures[0].key, [v for v in self.course if math.isfinite(v)]
        out = {f"{key}_first": course[0], f"{key}_last": course[-1]} if course else {}
        return out | {
            f"{f.key}_last": self.last[f.metric] for f in self.figures if f.in_table and f.metric in self.last
        }

    @property
    def elapsed(self) -> float:
        """The seconds since the start of this session."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float | None:
        """The remaining seconds, if they can be estimated."""
        if not self.num_steps or not self._step_seconds or self._step_end is None:
            return None
        recent = self._step_seconds[-20:]
        if len(recent) == len(self._step_seconds) > 3:
            recent = recent[1:]  # the first step includes the warm-up
        remaining = max(self.num_steps - self.steps_done, 0) * sum(recent) / len(recent)
        return max(remaining - (time.monotonic() - self._step_end), 0.0)

    def render(self) -> RenderableType:
        """Draw the current panel."""
        names = [((f" {p}", "bold cyan"), (f" {duration(p.seconds)}", "dim")) for p in self.phases]
        self._spinner.text = Text.assemble(*(part for pair in names for part in pair))
        top = Table.grid(padding=(0, 2), expand=True)
        top.add_column(ratio=1)
        top.add_column(justify="right")
        top.add_row(self._spinner, Text(self.steps_text(), "bold"))
        rows: list[RenderableType] = [top]
        if self.num_steps:
            bar = Table.grid(expand=True)  # a bar alone does not end its line
            bar.add_row(ProgressBar(total=self.num_steps, completed=min(self.steps_done, self.num_steps)))
            rows.append(bar)
        first, *others = self.figures
        course = Text(sparkline(self.course, max(self.console.width - 28, 8), self._blocks), "green")
        shown = [(f.label, f.text(self.last.get(f.metric))) for f in others]
        shown += [("elapsed", duration(self.elapsed)), ("left", duration(self.left))]
        rows.append(_grid([(first.label, first.text(self.course[-1] if self.course else None), course)]))
        rows.append(_grid([sum(shown[i : i + 3], ()) for i in range(0, len(shown), 3)]))
        if self.status:
            rows.append(Text(self.status, "dim", overflow="ellipsis", no_wrap=True))
        return Panel(Group(*rows), title=Text(self.title, "bold"), border_style="blue", padding=(0, 1))

    def stop(self, *, keep_panel: bool = True) -> None:
        """Remove the panel, or leave its last state on the screen, and restore the terminal."""
        live, self._live = self._live, None
        if live is None:
            return
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers = []
        live.transient = not keep_panel
        live.stop()


def _grid(rows: Sequence[tuple[RenderableType, ...]]) -> Table:
    """Return rows of labels, each followed by its value."""
    table = Table.grid(padding=(0, 2))
    for i in range(max(map(len, rows))):
        table.add_column(style="" if i % 2 else "dim", no_wrap=True, justify="right" if i % 2 else "left", min_width=8)
    for row in rows:
        table.add_row(*row)
    return table
