"""The plots of the report, listed in `panels.toml`. Each is an SVG string; pyplot is not used."""

from __future__ import annotations

import io
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from instep.observability.metrics import is_step

INK, GRID, EDGE, REST = "#27303f", "#e6e9ef", "#b8c0cc", "#c9d1dc"
COLORS = ("#2f6fed", "#e4572e", "#17a398", "#b25ad3", "#f2a900", "#6c7a89", "#d64550", "#3d5a80")
OTHER = "other"  # the seconds of a step outside all phases
TREND = 3  # with so many evaluations a line joins them
PHASE_ORDER = ("rollout", "wait", "train", "sync", "eval", "save")
NOT_A_PHASE = ("step", "peak", "early_log_probs", "early_train", "reward", "log_probs")  # the last 4 are parts of one
Curve = tuple[str, list[int], list[float]]  # label, x, y
Styled = tuple[str, list[int], list[float], dict[str, Any]]
Columns = dict[str, list[float]]  # by name: a value for each row of `History.steps`
PANELS = tomllib.loads(Path(__file__).with_name("panels.toml").read_text(encoding="utf-8"))


@dataclass
class History:
    """The rows of metrics.jsonl as columns. x is the number of the rollout, from 0.

    Attributes:
        steps: `[(x, row)]` of the rows with `rollout/` or `train/` metrics; rows of one rollout are merged.
        evals: `[(x, row)]` of the rows with `eval/` metrics; each ran before rollout x, with the weights of rollout x.
    """

    steps: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    evals: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Return x and values of a metric, where the value is finite."""
        source = self.evals if name.startswith("eval/") else self.steps
        known = ((x, v) for x, row in source if isinstance(v := row.get(name), (int, float)))
        points = [(x, float(v)) for x, v in known if math.isfinite(v)]
        return [x for x, _ in points], [y for _, y in points]

    def names(self, prefix: str, suffix: str = "") -> list[str]:
        """Return the names of metrics with this prefix and suffix, in order of appearance."""
        rows = self.evals if prefix == "eval/" else self.steps
        found = dict.fromkeys(name for _, row in rows for name in row)
        return [name for name in found if name.startswith(prefix) and name.endswith(suffix)]


def read_history(rows: Iterable[dict[str, Any]]) -> History:
    """Return a history with the rows of each rollout merged, in the order of the file."""
    history = History()
    by_step: dict[int, dict[str, Any]] = {}
    for row in rows:
        step = int(row["step"])
        if is_step(row):
            if step not in by_step:
                by_step[step] = {}
                history.steps.append((step, by_step[step]))
            by_step[step].update(row)
        elif step in by_step:  # e.g. perf/ figures from another row
            by_step[step].update({k: v for k, v in row.items() if not k.startswith("eval/")})
        if any(name.startswith("eval/") for name in row):
            history.evals.append((step, row))
    return history


@dataclass(frozen=True)
class Content:
    """What a panel shows of a run: an optional stack, curves on the two axes, and the reward of each evaluation set."""

    columns: Columns
    left: list[Curve]
    right: list[Curve]
    evaluations: list[Curve]


def content_of(panel: Mapping[str, Any], history: History) -> Content | None:
    """Return what a panel shows; None if the run has no such metrics."""
    columns = STACKS[panel["stack"]](history) if "stack" in panel else {}
    left, right = (_curves(panel, side, history) for side in ("left", "right"))
    evaluations = _evaluations(history) if panel.get("evaluations") else []
    there = columns if "stack" in panel else left or right or evaluations
    if not there or history.column(panel.get("unless", ""))[0]:
        return None
    return Content(columns, left, right, evaluations)


def plot(panel: Mapping[str, Any], history: History) -> str | None:
    """Return the plot of a panel; None if the run has no such metrics."""
    content = content_of(panel, history)
    if content is None:
        return None
    columns, right = content.columns, content.right
    left: list[Styled] = [(*curve, {}) for curve in content.left]
    left += _points(content.evaluations)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    sizes = {"font.size": 9.5, "axes.titlesize": 11, "axes.titleweight": "bold"}
    with rc_context({**sizes, **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK)}):
        figure = Figure(figsize=(6.2, 3.1), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(panel["title"], loc="left", pad=10)
        axes.set_xlabel("rollout")
        axes.set_ylabel(panel["left_label"])
        axes.grid(axis="y", color=GRID, linewidth=0.9)
        axes.set_axisbelow(True)
        sides: list[tuple[Any, tuple[str, ...]]] = [(axes, ("left", "bottom"))]
        colors = iter(_colors(len(columns) + len(left) + len(right)))
        _stack(axes, [x for x, _ in history.steps], columns, colors)
        _draw(axes, left, colors)
        axes.set_yscale(panel.get("scale", "linear"))
        if left or columns:
            axes.set_ylim(*panel.get("left_range", ()))
        if right:
            second = axes.twinx()
            second.set_ylabel(panel["right_label"])
            dashed = {"linestyle": "--", **({"color": INK} if columns else {})}
            _draw(second, [(f"{label} (right axis)", x, y, dashed) for label, x, y in right], colors)
            second.set_ylim(*panel.get("right_range", ()))
            sides.append((second, ("right",)))
        return _svg(figure, sides)


def _draw(axes: Any, curves: Sequence[Styled], colors: Iterator[str]) -> None:
    for label, x, y, style in curves:
        usual = {"color": next(colors), "marker": "o" if len(x) <= 30 else None, "markersize": 3, "linewidth": 1.6}
        axes.plot(x, y, label=label, **usual | style)


def _stack(axes: Any, x: list[int], columns: Columns, colors: Iterator[str]) -> None:
    """Draw the columns on top of each other, with their names in the legend."""
    bottom = [0.0] * len(x)
    for label, heights in columns.items():
        style = {"color": REST if label.startswith(OTHER) else next(colors), "label": label, "linewidth": 0}
        top = [b + h for b, h in zip(bottom, heights, strict=True)]
        if len(x) <= 120:
            axes.bar(x, heights, bottom=bottom, width=0.85, **style)
        else:
            axes.fill_between(x, bottom, top, step="mid", **style)
        bottom = top


def _svg(figure: Any, sides: Sequence[tuple[Any, tuple[str, ...]]]) -> str:
    """Return the figure as text; `sides` are its axes, each with the visible sides of its frame."""
    from matplotlib.ticker import MaxNLocator

    handles, labels = list[Any](), list[str]()
    for axes, drawn in sides:
        for side, spine in axes.spines.items():
            spine.set(visible=side in drawn, color=EDGE)
        axes.tick_params(length=3, color=EDGE, labelcolor=INK)
        found = axes.get_legend_handles_labels()
        handles, labels = handles + found[0], labels + found[1]
    first = sides[0][0]
    low, high = first.get_xlim()
    if high - low < 1:  # a single step: leave one tick on each side
        first.set_xlim(round((low + high) / 2) - 1, round((low + high) / 2) + 1)
    first.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if len(labels) > 1:
        place = {"loc": "outside lower center", "ncols": min(len(labels), 4)}
        figure.legend(handles, labels, **place, frameon=False, fontsize=8.5)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _colors(number: int) -> Sequence[str]:
    """Return `number` different colors."""
    if number <= len(COLORS):
        return COLORS
    from matplotlib.colors import hsv_to_rgb, to_hex

    return [to_hex(hsv_to_rgb((i / number, 0.75, (0.85, 0.6)[i % 2]))) for i in range(number)]


def _curves(panel: Mapping[str, Any], side: str, history: History) -> list[Curve]:
    curves = list[Curve]()
    for label, name in panel.get(side, {}).items():
        x, y = history.column(name)
        if any(abs(v) > panel.get("noise", -1) for v in y):
            y = [v / 1e9 for v in y] if name.endswith("_bytes") else y
            y = [max(abs(v), 1e-10) for v in y] if panel.get("scale") == "log" else y
            curves.append((label, x, y))
    return curves


def _evaluations(history: History) -> list[Curve]:
    """Return the mean reward of each evaluation set."""
    names = history.names("eval/", "/reward_mean")
    return [(f"eval {n.removeprefix('eval/').removesuffix('/reward_mean')}", *history.column(n)) for n in names]


def _points(evaluations: Sequence[Curve]) -> list[Styled]:
    """Return evaluations as points. A name with letters missing in the plot font becomes a number."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans")).get_charmap()
    colors, curves = _colors(1 + len(evaluations)), list[Styled]()  # the first color is for the training rollouts
    for i, (label, x, y) in enumerate(evaluations, 1):
        label = label if all(ord(letter) in known for letter in label) else f"eval set {i}"
        style = {"marker": "D", "markersize": 5, "linewidth": 1.2, "linestyle": "--" if len(x) >= TREND else "none"}
        curves.append((label, x, y, {**style, "color": colors[i]}))
    return curves


def phase_seconds(history: History) -> Columns:
    """Return the seconds of each rollout by phase, known ones first; 0 if one did not run, "other" for the rest."""
    names = [n.removeprefix("perf/").removesuffix("_seconds") for n in history.names("perf/", "_seconds")]
    names = [n for n in names if n not in NOT_A_PHASE]
    names.sort(key=lambda n: PHASE_ORDER.index(n) if n in PHASE_ORDER else len(PHASE_ORDER))
    rows = [row for _, row in history.steps]
    out = {n: [float(row.get(f"perf/{n}_seconds") or 0.0) for row in rows] for n in names}
    known = [sum(column[i] for column in out.values()) for i in range(len(rows))]
    rest = [max(float(row.get("perf/step_seconds") or 0.0) - k, 0.0) for row, k in zip(rows, known, strict=True)]
    if sum(rest) > 0.01 * (sum(known) + sum(rest)):
        out[OTHER] = rest
    return {n: column for n, column in out.items() if any(column)}


def _phases(history: History) -> Columns:
    phases = phase_seconds(history)
    total = sum(map(sum, phases.values()))
    return {f"{name} ({sum(seconds) / total:.0%})": seconds for name, seconds in phases.items()}


def _ages(history: History) -> Columns:
    """Return the share of trained tokens by age, in an asynchronous run."""
    prefix = "async/staleness_ratio/"
    ages = sorted(int(name.removeprefix(prefix)) for name in history.names(prefix))
    rows = [row for _, row in history.steps]
    shares = {age: [float(row.get(f"{prefix}{age}") or 0) for row in rows] for age in ages}
    return {f"{age} version{'' if age == 1 else 's'}": column for age, column in shares.items()}


STACKS: dict[str, Callable[[History], Columns]] = {"phases": _phases, "ages": _ages}
PLOTS: dict[str, Callable[[History], str | None]] = {name: partial(plot, panel) for name, panel in PANELS.items()}
