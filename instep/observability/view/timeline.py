"""What a run has noted in timeline.jsonl: phases, requests under way, and the memory and tokens of its processes.

A row is a phase (`phase`, `began`, `rollout_id` if it belongs to one, and `ended` in a second row at its end), the
course of `requests` (`[[time, number], ...]`), or the `processes` at the end of a step (`rollout_id`, `time`). Times
are Unix seconds. A phase without an end goes on, or failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from instep.observability.view.tail import Row, Tail

MOST_POINTS = 120  # of a process's course


class Timeline:
    """The timeline of one run. Courses and processes stay in the file, and are read where they are shown."""

    def __init__(self, folder: Path):
        self.tail = Tail(folder / "timeline.jsonl", _noted)
        self._phases: dict[tuple[str, float], Row] = {}
        self._courses: list[tuple[float, int]] = []  # time of the first point, offset
        self._steps: list[tuple[int, float, int]] = []  # rollout, end, offset
        self._latest = 0.0  # time of all that is noted

    def read_on(self, seconds: float = math.inf) -> None:
        """Read what is new, for about so many seconds."""
        replaced, rows = self.tail.read(seconds)
        if replaced:
            for known in (self._phases, self._courses, self._steps):
                known.clear()
        for row in rows:
            if "phase" in row:
                if row["phase"] == "start" and "ended" not in row:  # of another session: the one before has ended
                    for broken in self.under_way():
                        broken["ended"] = self._latest
                self._phases[row["phase"], row["began"]] = row
                self._latest = max(self._latest, row["began"], row.get("ended", 0.0))
            elif "first" in row:
                self._courses.append((row["first"], row["offset"]))
            elif "time" in row:
                while self._steps and self._steps[-1][0] >= row["rollout_id"]:  # a resume does them again
                    self._steps.pop()
                self._latest = max(self._latest, row["time"])
                self._steps.append((row["rollout_id"], row["time"], row["offset"]))

    def under_way(self) -> list[Row]:
        """Return the phases that have no end."""
        return [row for row in self._phases.values() if "ended" not in row]

    def window(self, num_steps: int, last: int | None, now: float | None) -> dict[str, Any]:
        """Return the last steps up to rollout `last` (None: to the newest), as times within `began` and `ended`.

        Args:
            now: the time, if the run goes on.
        """
        ends = [(rollout, at) for rollout, at, _ in self._steps]
        at_end = last is None or not ends or last >= ends[-1][0]
        chosen = ends if last is None else [e for e in ends if e[0] <= last] or ends[:1]
        after = chosen[-num_steps - 1 :] if len(chosen) > num_steps else []
        phases = sorted(self._phases.values(), key=lambda row: row["began"])
        began: float = after[0][1] if after else phases[0]["began"] if phases else 0.0
        ended: float = (now or self._latest) if at_end else chosen[-1][1]
        shown = [
            {**row, "ended": row.get("ended", ended), "goes_on": "ended" not in row}
            for row in phases
            if row["began"] <= ended and row.get("ended", ended) > began
        ]
        marks = [(rollout, at) for rollout, at in ends if began <= at <= ended]
        return {
            "began": began,
            "ended": ended,
            "phases": shown,
            "requests": self._requests(began, ended),
            "steps": marks,
            "first": ends[0][0] if ends else None,
            "last": chosen[-1][0] if chosen else None,
            "newest": ends[-1][0] if ends else None,
        }

    def _requests(self, began: float, ended: float) -> list[Any]:
        firsts = [at for at, _ in self._courses]
        inside = [i for i, at in enumerate(firsts) if at <= ended and (i + 1 == len(firsts) or firsts[i + 1] >= began)]
        points = [point for i in inside for point in self.tail.at(self._courses[i][1])["requests"]]
        before = [number for at, number in points if at < began]
        start = [[began, before[-1]]] if before else []
        return start + [[at, number] for at, number in points if began <= at <= ended]

    def processes(self) -> list[dict[str, Any]]:
        """Return name, rollouts and gauges of each process; `tokens_per_second` of an engine between two rollouts."""
        every = max(1, -(-len(self._steps) // MOST_POINTS))
        chosen = [step for i, step in enumerate(self._steps) if (len(self._steps) - 1 - i) % every == 0]
        out: dict[str, dict[str, Any]] = {}
        before: dict[str, tuple[float, float]] = {}  # time and tokens
        for rollout, at, offset in chosen:
            for row in self.tail.at(offset)["processes"]:
                course = out.setdefault(row["name"], {"name": row["name"], "rollouts": [], "gauges": {}})
                course["rollouts"].append(rollout)
                values = {name: value for name, value in row.items() if name not in ("name", "num_generated")}
                if (tokens := row.get("num_generated")) is not None:
                    then, num = before.get(row["name"], (at, tokens))
                    if tokens >= num and at > then:  # an engine that was started again counts from 0
                        values["tokens_per_second"] = (tokens - num) / (at - then)
                    before[row["name"]] = at, tokens
                for name, value in values.items():
                    column = course["gauges"].setdefault(name, [])
                    column += [None] * (len(course["rollouts"]) - 1 - len(column)) + [value]
        return sorted(out.values(), key=lambda course: _rank(course["name"]))


def _noted(offset: int, row: Row) -> Row:
    """Return of a row what stays in memory; {} for one of another kind."""
    if "phase" in row:
        times = {name: float(value) for name, value in row.items() if name in ("began", "ended")}
        rollout = {"rollout_id": int(row["rollout_id"])} if "rollout_id" in row else {}
        return {"phase": str(row["phase"]), "began": times["began"], **times, **rollout}
    if row.get("requests"):
        points = [(float(at), int(number)) for at, number in row["requests"]]
        return {"first": points[0][0], "offset": offset}
    if "processes" in row:
        for process in row["processes"]:
            _ = str(process["name"]), float(process.get("num_generated") or 0), process.items()
        return {"rollout_id": int(row["rollout_id"]), "time": float(row["time"]), "offset": offset}
    return {}


def _rank(name: str) -> tuple[int, Sequence[Any]]:
    kinds = ("controller", "actor", "critic", "engine", "router", "gate")
    kind = next((i for i, k in enumerate(kinds) if name.startswith(k)), len(kinds))
    return kind, [int(word) if word.isdigit() else 0 for word in name.split()]


def averaged(x: Sequence[float], y: Sequence[float], most: int) -> tuple[list[float], list[float]]:
    """Return the means of at most `most` equal parts of a curve; the curve itself if it has no more points."""
    width = -(-len(x) // most) or 1
    parts = [slice(i, i + width) for i in range(0, len(x), width)]
    return [fmean(x[part]) for part in parts], [fmean(y[part]) for part in parts]


def thinned(x: Sequence[Any], y: Sequence[float], most: int) -> tuple[list[Any], list[float]]:
    """Return a curve of at most about `most` points: of each part the smallest and the largest value."""
    if len(x) <= most:
        return list(x), list(y)
    width = -(-2 * len(x) // most)
    keep: Iterable[int] = sorted(
        {
            pick(range(i, min(i + width, len(x))), key=lambda j: y[j])
            for i in range(0, len(x), width)
            for pick in (min, max)
        }
        | {0, len(x) - 1}
    )
    return [x[i] for i in keep], [y[i] for i in keep]
