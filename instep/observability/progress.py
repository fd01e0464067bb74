"""The progress of a run for people: a live panel on a terminal, plain lines anywhere else (CI, a log file)."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

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


def duration(seconds: float | None) -> str:
    """Format seconds as `h:mm:ss` or `mm:ss`; "-" for None."""
    if seconds is None:
        return "-"
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes:02d}:{secs:02d}"


def number(value: float | None, digits: int = 3) -> str:
    """Format a number for people: 1,234 or 0.412 or 1.2e-06; "-" for None, "n/a" for NaN."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "n/a" if math.isnan(value) else str(value)
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.{digits}f}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.1e}"


@dataclass(eq=False)
class Phase:
    """A part of a run that is going on, or has ended; `rollout_id` is the round that it belongs to, if any."""

    name: str
    rollout_id: int | None
    began: float  # by `time.monotonic()`, as `ended` is
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """The duration of the phase, or its time so far."""
        return (time.monotonic() if self.ended is None else self.ended) - self.began

    def __str__(self) -> str:
        return f"{self.name}{'' if self.rollout_id is None else f' {self.rollout_id}'}, for {self.seconds:.1f} s"


class Progress:
    """Shows phases, step, reward, response length, tokens/s, elapsed and remaining time.

    Everything printed or logged by this process while the panel is up appears above it, whole. `stop` restores the
    terminal and may be called twice. The remaining time is the mean of the last 20 steps times the steps that remain.
    """

    def __init__(self, title: str, num_steps: int | None, *, steps_done: int = 0, console: Console | None = None):
        self.title, self.num_steps, self.steps_done = title, num_steps, steps_done
        self.console = console or Console()
        self.status = ""
        self.rewards: list[float] = []
        self.last: dict[str, float] = {}
        self._seen: set[int] = set()
        self._announced: set[str] = set()
        self._start = self._last_line = now = time.monotonic()
        self.phases = [Phase("starting", None, now, now)]  # going on; between two phases the one that ended last
        self._step_end: float | None = None
        self._step_seconds: list[float] = []
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._lock = threading.Lock()
        self.ascii_only = not (self.console.encoding or "").lower().startswith("utf")
        self._blocks = ASCII_BLOCKS if self.ascii_only else BLOCKS
        self._spinner = Spinner("line" if self.ascii_only else "dots")
        self._live: Live | None = None

    def start(self) -> None:
        """Put the panel up, if this is a terminal."""
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

    def line(self, text: str) -> None:
        """Print a plain line, above the panel if there is one."""
        self._last_line = time.monotonic()
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        if not self.live:
            self.console.file.flush()

    def begin_phase(self, name: str, rollout_id: int | None = None) -> Phase:
        """Begin a phase and show it. Phases may overlap, also from several threads."""
        with self._lock:
            phase = Phase(name, rollout_id, time.monotonic())
            self.phases = [p for p in self.phases if p.ended is None] + [phase]
            if self._step_end is None:
                self._step_end = phase.began  # the first step begins with the first phase
            quiet = phase.began - self._last_line >= 15
            announced = not self.live and (quiet or name not in self._announced)  # each name once is enough
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
        """The names of the phases that are going on."""
        return " + ".join(phase.name for phase in self.phases)

    def set_status(self, text: str) -> None:
        """Show a note; without a panel it is printed only if nothing else was printed for 15 s."""
        self.status = text
        if text and not self.live and time.monotonic() - self._last_line >= 15:
            self.line(f"{duration(self.elapsed)} | {self.phase}: {text}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a row of metrics. Rows with `rollout/` or `train/` metrics count as a step, once for each `step`."""
        with self._lock:
            self.last.update(metrics)
            if any(name.startswith(("rollout/", "train/")) for name in metrics):
                self._finish_step(step, metrics)
        for name, value in metrics.items():
            if name.startswith("eval/") and name.endswith("/reward_mean"):
                dataset = name.removeprefix("eval/").removesuffix("/reward_mean")
                length = metrics.get(f"eval/{dataset}/response_length_mean")
                self.line(
                    f"{duration(self.elapsed)} | eval {dataset}: reward {number(value)}, length {number(length, 1)}, "
                    f"after {self.steps_done} steps"
                )

    def _finish_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step not in self._seen:
            now = time.monotonic()
            self._seen.add(step)
            self.steps_done += 1
            if self._step_end is not None:
                self._step_seconds.append(now - self._step_end)
            self._step_end = now
        if "rollout/reward_mean" in metrics:
            self.rewards.append(metrics["rollout/reward_mean"])
        if not self.live:
            self.line(f"{duration(self.elapsed)} | {self.steps_text()}  {self._figures()}  left {duration(self.left)}")

    def steps_text(self) -> str:
        return f"step {self.steps_done}" + (f"/{self.num_steps}" if self.num_steps else "")

    def _figures(self) -> str:
        shown = (
            ("reward", "rollout/reward_mean", 3),
            ("loss", "train/loss", 4),
            ("length", "rollout/response_length_mean", 1),
            ("rollout tok/s", "perf/rollout_tokens_per_second", 0),
            ("train tok/s", "perf/train_tokens_per_second", 0),
            ("gap", "train/log_prob_gap_max", 3),
        )
        return "  ".join(f"{label} {number(self.last[key], d)}" for label, key, d in shown if key in self.last)

    @property
    def elapsed(self) -> float:
        """Seconds since the start of this session."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float | None:
        """The seconds that remain, if they can be estimated."""
        if not self.num_steps or not self._step_seconds or self._step_end is None:
            return None
        recent = self._step_seconds[-20:]
        if len(recent) == len(self._step_seconds) > 3:
            recent = recent[1:]  # the first step carries the warm-up
        remaining = max(self.num_steps - self.steps_done, 0) * sum(recent) / len(recent)
        return max(remaining - (time.monotonic() - self._step_end), 0.0)

    def render(self) -> RenderableType:
        """Draw the panel as it is now."""
        names = [((f" {p.name}", "bold cyan"), (f" {duration(p.seconds)}", "dim")) for p in self.phases]
        self._spinner.text = Text.assemble(*(part for pair in names for part in pair))
        top = Table.grid(padding=(0, 2), expand=True)
        top.add_column(ratio=1)
        top.add_column(justify="right")
        top.add_row(self._spinner, Text(self.steps_text(), "bold"))
        body = Table.grid(padding=(0, 2), expand=True)
        body.add_column(style="dim", no_wrap=True)
        body.add_column(no_wrap=True, justify="right")
        body.add_column(ratio=1, no_wrap=True)
        room = max(self.console.width - 36, 8)
        reward = self.rewards[-1] if self.rewards else None
        body.add_row("reward", number(reward), Text(sparkline(self.rewards, room, self._blocks), "green"))
        length, gap = self.last.get("rollout/response_length_mean"), self.last.get("train/log_prob_gap_max")
        body.add_row("length", number(length, 1), Text(f"trainer-engine gap {number(gap)}", "dim"))
        rollout, train = (self.last.get(f"perf/{k}_tokens_per_second") for k in ("rollout", "train"))
        body.add_row("tokens/s", number(rollout, 0), Text(f"in rollouts, {number(train, 0)} in training", "dim"))
        body.add_row("elapsed", duration(self.elapsed), Text(f"left {duration(self.left)}"))
        rows: list[RenderableType] = [top]
        if self.num_steps:
            bar = Table.grid(expand=True)  # a bar alone does not end its line
            bar.add_row(ProgressBar(total=self.num_steps, completed=min(self.steps_done, self.num_steps)))
            rows.append(bar)
        rows.append(body)
        if self.status:
            rows.append(Text(self.status, "dim", overflow="ellipsis", no_wrap=True))
        return Panel(Group(*rows), title=Text(self.title, "bold"), border_style="blue", padding=(0, 1))

    def stop(self, *, keep_panel: bool = True) -> None:
        """Take the panel down, or leave its last state on the screen, and restore the terminal."""
        live, self._live = self._live, None
        if live is None:
            return
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers = []
        live.transient = not keep_panel
        live.stop()
