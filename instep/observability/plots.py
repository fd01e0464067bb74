"""The plots of the report. Each is an SVG string, or None if the run has no such metrics; pyplot is not used.

`panels.toml` lists them.
"""

from __future__ import annotations

import io
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from instep.observability.metrics import is_step

INK, GRID, EDGE = "#27303f", "#e6e9ef", "#b8c0cc"
COLORS = ("#2f6fed", "#e4572e", "#17a398", "#b25ad3", "#f2a900", "#6c7a89", "#d64550", "#3d5a80")
TREND = 3  # evaluations from which on a line joins them
PHASE_ORDER = ("rollout", "wait", "train", "sync", "eval", "save")
NOT_A_PHASE = ("step", "peak", "early_log_probs", "early_train", "reward", "log_probs")  # the latter are parts of one
Curve = tuple[str, list[int], list[float]]  # label, x, y
PANELS = tomllib.loads(Path(__file__).with_name("panels.toml").read_text(encoding="utf-8"))


@dataclass
class History:
    """The rows of metrics.jsonl as columns. x is the number of the rollout, from 0.

    Attributes:
        steps: `[(x, row)]` of the rows with `rollout/` or `train/` metrics; rows of one rollout are merged.
        evals: `[(x, row)]` of the rows with `eval/` metrics; each was before rollout x, with the weights of rollout x.
    """

    steps: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    evals: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Return x and values of a metric, where it is known and finite."""
        source = self.evals if name.startswith("eval/") else self.steps
        points = [(x, float(row[name])) for x, row in source if _finite(row.get(name))]
        return [x for x, _ in points], [y for _, y in points]

    def names(self, prefix: str, suffix: str = "") -> list[str]:
        """Return the names of metrics with this prefix and suffix, in order of appearance."""
        rows = self.evals if prefix == "eval/" else self.steps
        found = dict.fromkeys(name for _, row in rows for name in row)
        return [name for name in found if name.startswith(prefix) and name.endswith(suffix)]


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def read_history(rows: Sequence[dict[str, Any]]) -> History:
    """Merge the rows of each rollout, in the order of the file."""
    history = History()
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        step = int(row["step"])
        if is_step(row):
            if step not in by_step:
                by_step[step] = {}
                history.steps.append((step, by_step[step]))
            by_step[step].update(row)
        elif step in by_step:  # e.g. perf/ figures logged apart
            by_step[step].update({k: v for k, v in row.items() if not k.startswith("eval/")})
        if any(name.startswith("eval/") for name in row):
            history.evals.append((step, row))
    return history


def _axes(title: str, ylabel: str) -> tuple[Any, Any]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style = {
        "font.size": 9.5,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "text.color": INK,
        "svg.fonttype": "path",
    }
    with rc_context({**style, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}):
        figure = Figure(figsize=(6.2, 3.1), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title, loc="left", pad=10)
        axes.set_xlabel("rollout")
        axes.set_ylabel(ylabel)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    _frame(axes, "left", "bottom")
    return figure, axes


def _right_axes(axes: Any, ylabel: str) -> Any:
    right = axes.twinx()
    right.set_ylabel(ylabel, color=INK)
    _frame(axes, "left", "bottom")  # twinx draws all of them anew
    _frame(right, "right")
    return right


def _frame(axes: Any, *sides: str) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side in sides)
        spine.set_color(EDGE)
    axes.tick_params(length=3, color=EDGE, labelcolor=INK)


def _svg(figure: Any, *axes: Any) -> str:
    from matplotlib.ticker import MaxNLocator

    handles: list[Any] = []
    labels: list[str] = []
    for ax in axes:
        found = ax.get_legend_handles_labels()
        handles, labels = handles + found[0], labels + found[1]
    low, high = axes[0].get_xlim()
    if high - low < 1:  # a single step: a whole tick on each side
        axes[0].set_xlim(round((low + high) / 2) - 1, round((low + high) / 2) + 1)
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if len(labels) > 1:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False, fontsize=8.5
        )
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _line(axes: Any, x: list[int], y: list[float], label: str, color: str, **kwargs: Any) -> None:
    marker = "o" if len(x) <= 30 else None
    axes.plot(x, y, label=label, color=color, marker=marker, markersize=3, linewidth=1.6, **kwargs)


def _colors(number: int) -> Sequence[str]:
    """As many colors, none twice."""
    if number <= len(COLORS):
        return COLORS
    from matplotlib.colors import hsv_to_rgb, to_hex

    return [to_hex(hsv_to_rgb((i / number, 0.75, (0.85, 0.6)[i % 2]))) for i in range(number)]


def _drawn(name: str, number: int) -> str:
    """A name that plots can show: their font lacks Chinese, Japanese and Korean letters, for example."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans")).get_charmap()
    return name if all(ord(letter) in known for letter in name) else f"set {number}"


def plot_reward(history: History) -> str | None:
    """Plot the mean reward of the training rollouts and of the evaluations."""
    x, mean = history.column("rollout/reward_mean")
    evals = history.names("eval/", "/reward_mean")
    if not x and not evals:
        return None
    figure, axes = _axes("Reward", "mean reward")
    if x:
        _line(axes, x, mean, "training rollouts", COLORS[0])
    for i, name in enumerate(evals):
        ex, ey = history.column(name)
        label = "eval " + _drawn(name.removeprefix("eval/").removesuffix("/reward_mean"), i + 1)
        style = {"marker": "D", "markersize": 5, "linewidth": 1.2, "linestyle": "--" if len(ex) >= TREND else "none"}
        axes.plot(ex, ey, label=label, color=_colors(1 + len(evals))[1 + i], **style)
    return _svg(figure, axes)


def plot_panel(panel: Mapping[str, Any], history: History) -> str | None:
    """Plot the curves of a panel of `panels.toml`, those of `right` on an axis of their own."""
    left, right = (_curves(panel, side, history) for side in ("left", "right"))
    if not left and not right or history.column(panel.get("unless", ""))[0]:
        return None
    figure, axes = _axes(panel["title"], panel["left_label"])
    colors = _colors(len(left) + len(right))
    for color, (label, x, y) in zip(colors, left, strict=False):
        _line(axes, x, y, label, color)
    axes.set_yscale(panel.get("scale", "linear"))
    if left:
        axes.set_ylim(*panel.get("left_range", ()))
    if not right:
        return _svg(figure, axes)
    second = _right_axes(axes, panel["right_label"])
    for color, (label, x, y) in zip(colors[len(left) :], right, strict=False):
        _line(second, x, y, f"{label} (right axis)", color, linestyle="--")
    second.set_ylim(*panel.get("right_range", ()))
    return _svg(figure, axes, second)


def _curves(panel: Mapping[str, Any], side: str, history: History) -> list[Curve]:
    curves = list[Curve]()
    for label, name in panel.get(side, {}).items():
        x, y = history.column(name)
        if any(abs(v) > panel.get("noise", -1) for v in y):
            y = [v / 1e9 for v in y] if name.endswith("_bytes") else y
            y = [max(abs(v), 1e-10) for v in y] if panel.get("scale") == "log" else y
            curves.append((label, x, y))
    return curves


def phase_seconds(history: History) -> dict[str, list[float]]:
    """Return the seconds of each rollout by phase, known ones first; 0 where one did not run, "other" for the rest."""
    names = [n.removeprefix("perf/").removesuffix("_seconds") for n in history.names("perf/", "_seconds")]
    names = [n for n in names if n not in NOT_A_PHASE]
    names.sort(key=lambda n: PHASE_ORDER.index(n) if n in PHASE_ORDER else len(PHASE_ORDER))
    rows = [row for _, row in history.steps]
    out = {n: [float(row.get(f"perf/{n}_seconds") or 0.0) for row in rows] for n in names}
    known = [sum(column[i] for column in out.values()) for i in range(len(rows))]
    rest = [max(float(row.get("perf/step_seconds") or 0.0) - k, 0.0) for row, k in zip(rows, known, strict=True)]
    if sum(rest) > 0.01 * (sum(known) + sum(rest)):
        out["other"] = rest
    return {n: column for n, column in out.items() if any(column)}


def plot_phases(history: History) -> str | None:
    """Plot the seconds of each rollout, stacked by phase."""
    phases = phase_seconds(history)
    if not phases:
        return None
    figure, axes = _axes("Time by phase", "seconds per rollout")
    total = sum(map(sum, phases.values()))
    named = {f"{name} ({sum(seconds) / total:.0%})": seconds for name, seconds in phases.items()}
    colors = ["#c9d1dc" if name == "other" else _colors(len(phases))[i] for i, name in enumerate(phases)]
    _stack(axes, [x for x, _ in history.steps], named, colors)
    return _svg(figure, axes)


def _stack(axes: Any, x: list[int], columns: Mapping[str, list[float]], colors: Sequence[str]) -> None:
    """Draw the columns on each other, with their names in the legend."""
    bottom = [0.0] * len(x)
    for (label, heights), color in zip(columns.items(), colors, strict=True):
        top = [b + h for b, h in zip(bottom, heights, strict=True)]
        if len(x) <= 120:
            axes.bar(x, heights, bottom=bottom, width=0.85, color=color, label=label, linewidth=0)
        else:
            axes.fill_between(x, bottom, top, color=color, label=label, linewidth=0, step="mid")
        bottom = top


def plot_staleness(history: History) -> str | None:
    """Plot how old the trained tokens of an asynchronous run are, and the groups that wait on the right axis."""
    prefix = "async/staleness_ratio/"
    ages = sorted(int(name.removeprefix(prefix)) for name in history.names(prefix))
    if not ages:
        return None
    rows = [(x, row) for x, row in history.steps if any(f"{prefix}{age}" in row for age in ages)]
    figure, axes = _axes("Staleness", "share of trained tokens")
    columns = {
        f"{age} versions" if age != 1 else "1 version": [float(row.get(f"{prefix}{age}") or 0) for _, row in rows]
        for age in ages
    }
    _stack(axes, [x for x, _ in rows], columns, _colors(len(ages))[: len(ages)])
    axes.set_ylim(0, 1.02)
    x, waiting = history.column("async/queue_length")
    if not x:
        return _svg(figure, axes)
    second = _right_axes(axes, "groups")
    _line(second, x, waiting, "groups that wait (right axis)", INK, linestyle="--")
    second.set_ylim(0, max(1.0, *waiting) * 1.25)
    return _svg(figure, axes, second)


_OWN = {"reward": plot_reward, "phases": plot_phases, "staleness": plot_staleness}
PLOTS: dict[str, Callable[[History], str | None]] = {
    name: _OWN.get(name) or partial(plot_panel, panel) for name, panel in PANELS.items()
}
