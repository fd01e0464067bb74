"""What the page shows of each run, read from the files in its folder."""

from __future__ import annotations

import math
import os
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from instep.errors import ConfigError
from instep.observability.alarms import ALARMS, Limits, advice
from instep.observability.metrics import is_step
from instep.observability.plots import PANELS, content_of, read_history
from instep.observability.report import headline
from instep.observability.run_folder import config_of, state_of
from instep.observability.sinks import read_json
from instep.observability.view.samples import Samples
from instep.observability.view.tail import DAMAGE, Row, Tail
from instep.observability.view.timeline import Timeline, averaged, thinned

MOST_POINTS, MOST_BARS = 1200, 120  # of a curve, and of a stack
READ_SECONDS = 2.0  # of all runs in one request
# Whose means over the steps the timeline has.
MEANS = (
    *("perf/engine_idle_ratio", "perf/trainer_idle_ratio", "perf/wait_seconds", "perf/reward_seconds"),
    *("async/staleness_mean", "async/queue_length"),
)
HOLDS = (
    "config.json (arguments, versions, process), metrics.jsonl, samples.jsonl, timeline.jsonl and logs/; summary.json "
    "and report.html at its end"
)
_OF_THE_PLACE = {"run_dir", "notes"}  # arguments that differ between any two runs


class Numbers(NamedTuple):
    """The numbers of a row of metrics.jsonl in little memory: 8 bytes for one, and names once; NaN is its null."""

    step: int
    names: tuple[str, ...]
    values: array[float]

    def row(self) -> Row:
        """Return the row as it was."""
        values = (None if math.isnan(value) else value for value in self.values)
        return {"step": self.step, **dict(zip(self.names, values, strict=True))}


class Packer:
    """Make `Numbers` of the rows of one file. Rows with the same names share them; other values are left out."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}

    def __call__(self, offset: int, row: Row) -> Numbers:
        step = int(row.pop("step"))
        row = {
            name: math.nan if v is None else v for name, v in row.items() if v is None or isinstance(v, (int, float))
        }
        names = tuple(row)
        return Numbers(step, self._names.setdefault(names, names), array("d", row.values()))


class RunFiles:
    """The files of one run. Calls from several threads wait for each other."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._metrics, self._rows = Tail(folder / "metrics.jsonl", Packer()), list[Numbers]()
        self._timeline, self.samples = Timeline(folder), Samples(folder)
        self._lock = threading.Lock()
        self._made: dict[str, tuple[Any, dict[str, Any]]] = {}

    def about(self, seconds: float = math.inf) -> dict[str, Any]:
        """Return title, state, headline figures and alarms. Read metrics and timeline for about so many seconds each.

        `reading` says that there is more to read.
        """
        config, summary = self._config(), self._summary()
        args = config.get("args") or {}
        state = state_of(self.folder, config, summary or None)
        with self._lock:
            self._metrics.read_into(self._rows, seconds)
            self._timeline.read_on(seconds)
            rows, under_way, now = list(self._rows), self._timeline.under_way(), (self._metrics.place, len(summary))
        alive = state.name in ("running", "elsewhere")
        last = max((row["began"] for row in under_way), default=0.0)
        return {
            "title": config.get("title"),
            "folder": str(self.folder),
            "state": state.name,
            "state_text": state.text,
            "remedy": state.remedy,
            "num_rollout": args.get("num_rollout"),
            "phases": [_phase(row) for row in under_way if alive or row["began"] == last],
            "reading": self._metrics.offset < self._metrics.size,
            "num_damaged": sum(tail.num_damaged for tail in (self._metrics, self._timeline.tail, self.samples.tail)),
            **self._remembered("figures", now, lambda: _figures(rows, summary, args)),
        }

    def curves(self) -> dict[str, Any]:
        """Return the content of each panel (`plots.py`) by its name, and the steps at which each alarm was raised."""
        with self._lock:
            self._metrics.read_into(self._rows)
            rows, now = list(self._rows), self._metrics.place
        return self._remembered("curves", now, lambda: _curves(rows))

    def _remembered(self, name: str, now: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return `make()`, again only where `now`, the files' state, has changed: the page asks every few seconds."""
        if name not in self._made or self._made[name][0] != now:
            self._made[name] = now, make()
        return self._made[name][1]

    def timeline(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the last `steps` steps up to rollout `last` (see `Timeline.window`), and the shares of idle time."""
        alive = state_of(self.folder, self._config(), self._summary() or None).name == "running"
        last = query.get("last")
        with self._lock:
            self._metrics.read_into(self._rows)
            self._timeline.read_on()
            now = time.time() if alive else None
            window = self._timeline.window(int(query.get("steps") or 4), int(last) if last else None, now)
            shown = {rollout for rollout, at in window["steps"] if at > window["began"]}
            steps = [row.row() for row in self._rows if row.step in shown and is_step(row.names)]
        means = {name: [row[name] for row in steps if row.get(name) is not None] for name in MEANS}
        return {**window, "means": {name: sum(v) / len(v) for name, v in means.items() if v}}

    def processes(self) -> list[dict[str, Any]]:
        """Return the courses of each process (`Timeline.processes`)."""
        with self._lock:
            self._timeline.read_on()
            return self._timeline.processes()

    def args(self) -> dict[str, Any]:
        """Return the arguments of the run, and its versions."""
        config = self._config()
        return {"args": config.get("args") or {}, "versions": config.get("versions") or {}}

    def _config(self) -> dict[str, Any]:
        return config_of(self.folder) or {}

    def _summary(self) -> dict[str, Any]:
        try:
            summary = read_json(self.folder / "summary.json")
        except ValueError as error:
            raise ValueError(f"summary.json is damaged: {error}") from error
        if not isinstance(summary, dict):
            raise ValueError("summary.json is damaged: it is not a JSON object")
        return summary


def _figures(rows: Sequence[Numbers], summary: dict[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    history = read_history(row.row() for row in rows)
    alarms = advice([row for _, row in history.steps], Limits.from_args(args))
    return {
        "num_steps": len(history.steps),
        "figures": headline(history, summary),
        "alarms": [{"step": step, "name": name, "text": text} for step, name, text in alarms],
    }


def _curves(rows: Sequence[Numbers]) -> dict[str, Any]:
    history, panels = read_history(row.row() for row in rows), dict[str, dict[str, Any]]()
    x = [step for step, _ in history.steps]
    for name, panel in PANELS.items():
        if (content := content_of(panel, history)) is not None:
            sides = {side: getattr(content, side) for side in ("left", "right", "evaluations")}
            stack = [(label, *averaged(x, y, MOST_BARS)) for label, y in content.columns.items()]
            panels[name] = {side: [_curve(*curve) for curve in found] for side, found in sides.items()}
            panels[name]["stack"] = stack
    raised = {name: [step for step, row in history.steps if row.get(f"alarm/{name}") == 1] for name in ALARMS}
    return {"panels": panels, "raised": {name: steps for name, steps in raised.items() if steps}}


def _curve(label: str, x: list[int], y: list[float]) -> list[Any]:
    """Return label, x and y; of a long curve its extremes, and x and y of its means."""
    means = averaged(x, y, MOST_BARS) if len(x) > 3 * MOST_BARS else ([], [])
    return [label, *thinned(x, y, MOST_POINTS), *means]


def _phase(row: Row) -> dict[str, Any]:
    return {"name": row["phase"], "rollout_id": row.get("rollout_id"), "seconds": time.time() - row["began"]}


def _about(run: RunFiles, seconds: float) -> dict[str, Any]:
    """Return `RunFiles.about`; of a run whose files are damaged, or may not be read, that it is unreadable."""
    try:
        return run.about(seconds)
    except (OSError, *DAMAGE) as error:
        return {
            "title": None,
            "folder": str(run.folder),
            "state": "unreadable",
            "state_text": f"unreadable: {str(error) or type(error).__name__}",
            "remedy": "",
            "num_rollout": None,
            "num_steps": 0,
            "reading": False,
            "num_damaged": 0,
            **{name: [] for name in ("phases", "figures", "alarms")},
        }


class Runs:
    """The runs of a page, in a fixed order; new ones are added at the end.

    Args:
        find: returns the folders that there are now.
    """

    def __init__(self, find: Callable[[], Sequence[Path]]):
        self._find, self._runs, self._lock = find, dict[Path, RunFiles](), threading.Lock()

    def all(self) -> list[RunFiles]:
        with self._lock:
            for folder in self._find():
                if folder not in self._runs:
                    self._runs[folder] = RunFiles(folder)
            return list(self._runs.values())

    def about(self) -> list[dict[str, Any]]:
        """Return `RunFiles.about` of each run, with a short name. Of many runs the next calls read on."""
        runs, end = self.all(), time.monotonic() + READ_SECONDS
        found = [_about(run, end - time.monotonic()) for run in reversed(runs)]  # the page shows the newest first
        folders = [run.folder.resolve() for run in runs]
        common = os.path.commonpath([folder.parent for folder in folders]) if runs else ""
        names = [os.path.relpath(folder, common) for folder in folders]
        return [{**about, "name": name} for about, name in zip(reversed(found), names, strict=True)]


def compare(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each argument: `name` (its flag, if it has one), `help`, `values` of the runs, whether they
    `differ`, and whether one is `changed` from the flag's default.

    Args:
        runs: `args` and `versions` of each run, as in its config.json. A value that a run does not have is null.
    """
    from instep.arguments.all_flags import own_flags

    flags = {flag.attribute: flag for flag in own_flags().values()}
    rows = []
    for part in ("args", "versions"):
        known = [run[part] for run in runs]
        for name in sorted({name for values in known for name in values} - _OF_THE_PLACE):
            values = [of_run.get(name) for of_run in known]
            flag = flags.get(name) if part == "args" else None
            rows.append(
                {
                    "name": flag.name if flag else name,
                    "part": part,
                    "help": flag.help if flag else "",
                    "values": values,
                    "differ": any(value != values[0] for value in values),
                    "changed": flag is not None and any(value != flag.default for value in values),
                }
            )
    return rows


def check_runs(folders: Sequence[Path]) -> None:
    """Raise ConfigError if one is not the folder of a run."""
    for folder in folders:
        if config_of(folder) is None:
            what = f"{folder} is not the folder of a run" if folder.exists() else f"there is no folder {folder}"
            inside = sorted(str(path.parent) for path in folder.glob("*/config.json") if config_of(path.parent))
            near = f"; below it there are {', '.join(inside[:5])}" if inside else ""
            remedy = f"give the --run-dir of a run, which holds {HOLDS}{near}"
            raise ConfigError(what, where="instep view", remedy=remedy)


def runs_below(root: Path) -> list[Path]:
    """Return the folders of runs in `root` and in its folders, the oldest first."""
    found = [path.parent for pattern in ("*", "*/*") for path in root.glob(f"{pattern}/config.json")]
    found = [folder for folder in found if not folder.name.startswith("old-") and config_of(folder) is not None]
    return sorted(found, key=lambda folder: (folder / "config.json").stat().st_mtime)
