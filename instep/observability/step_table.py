"""The table of a profiled step: its seconds by phase and part, and the distance of each part from its floor.

Every instant of the step belongs to one phase or lies between two. Within a phase it belongs to the first of its parts
that was running. The rest of a phase is time in which no worker computed and no engine had work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from instep.system.spans import ON_GPU, ROLLOUT, Span

PHASE = "phase"  # the fact that marks spans of phases
IDLE, BETWEEN = "idle", "between the phases"
# Phase -> part -> names of its spans.
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "rollout": {
        "generate": ("turn",),
        "reward": ("reward",),
        "early log-probs": ("log_probs",),
        "early training": ("begin_step",),
    },
    "train": {
        "log-probs": ("log_probs",),
        "forward and backward": ("forward_backward",),
        "optimizer": ("optimizer_step",),
        "other work of the ranks": ("train", "memory"),
    },
    "sync": {
        name: (name,) for name in "sleep wake offload onload pause start transfer finish reset resume proof".split()
    },
}
MOST_GAPS, LEAST_GAP = 5, 0.005  # how many gaps are listed, and their least share of the step

Intervals = list[tuple[int, int]]


@dataclass(frozen=True)
class Row:
    """A phase, or a part of one.

    Attributes:
        phase: "" for the time between the phases; part: "" for the phase as a whole.
        floor: in seconds; None if unknown.
    """

    phase: str
    part: str
    seconds: float
    floor: float | None = None


@dataclass(frozen=True)
class StepTable:
    """The rows, and lines about gaps and about the GPUs."""

    seconds: float
    rows: list[Row]
    lines: list[str]

    def text(self) -> str:
        """Return the table as plain text."""
        head = f"{'part':<28}{'seconds':>10}{'share':>8}{'floor':>10}{'x floor':>9}"
        shown = [head, *(self._shown(row) for row in self.rows), f"{'the step':<28}{self.seconds:>10.4f}{1:>8.1%}"]
        return "\n".join([*shown, *self.lines])

    def _shown(self, row: Row) -> str:
        name = f"  {row.part}" if row.part else row.phase or BETWEEN
        line = f"{name:<28}{row.seconds:>10.4f}{row.seconds / self.seconds:>8.1%}"
        return line + (f"{row.floor:>10.4f}{row.seconds / row.floor:>9.1f}" if row.floor else "")


def step_table(spans: Sequence[Span], begin: int, end: int, floors: Mapping[str, float | None]) -> StepTable:
    """Return the table of the step from `begin` to `end`, in nanoseconds of the wall clock.

    Args:
        spans: the spans of all processes.
        floors: seconds by the name of a part.
    """
    rows, lines, left = list[Row](), list[str](), [(begin, end)]
    gaps = list[tuple[int, int, str]]()
    phases = [s for s in spans if PHASE in s.facts]
    work = [s for s in spans if PHASE not in s.facts and "kind" not in s.facts]
    for name in dict.fromkeys(s.name for s in sorted(phases, key=lambda s: s.begin)):
        whole = _common(_union((s.begin, s.end) for s in phases if s.name == name), left)
        left, rest = _without(left, whole), whole
        rows.append(Row(name, "", _seconds(whole)))
        for part, names in PARTS.get(name, {}).items():
            busy = _union((s.begin, s.end) for s in work if s.name in names)
            if mine := _common(busy, rest):
                rest = _without(rest, mine)
                rows.append(Row(name, part, _seconds(mine), floors.get(part)))
        if name in PARTS:
            rows.append(Row(name, IDLE, _seconds(rest)))
        gaps += [(*gap, name) for gap in rest]
        lines += _gpus(spans, name, whole)
    rows.append(Row("", "", _seconds(left)))
    gaps += [(*gap, "") for gap in left]
    for a, b, phase in sorted(gaps, key=lambda gap: gap[0] - gap[1])[:MOST_GAPS]:
        if b - a >= LEAST_GAP * (end - begin):
            lines.append(f"{(b - a) / 1e9:.4f} s without work {_where(spans, a, b, phase)}")
    return StepTable((end - begin) / 1e9, rows, lines)


def _where(spans: Iterable[Span], begin: int, end: int, phase: str) -> str:
    """Return what the controller did in a gap, else what ended before it and what began after it."""
    own = [s for s in spans if (PHASE in s.facts) == (not phase) and "kind" not in s.facts]
    place = f"in {phase}" if phase else BETWEEN
    half = (end - begin) / 2
    inside = [s for s in own if s.track != ROLLOUT and min(s.end, end) - max(s.begin, begin) > half]
    if phase and inside:
        return f"{place}, the controller at {min(inside, key=lambda s: s.end - s.begin).name}"
    before = max((s for s in own if s.end <= begin), key=lambda s: s.end, default=None)
    after = min((s for s in own if s.begin >= end), key=lambda s: s.begin, default=None)
    words = [place]
    words += [f"after {before.name} of {before.track}"] if before is not None else []
    words += [f"before {after.name} of {after.track}"] if after is not None else []
    return ", ".join(words)


def _gpus(spans: Iterable[Span], phase: str, whole: Intervals) -> list[str]:
    """Return how long the GPU of each rank computed in a phase."""
    tracks: dict[str, list[tuple[int, int]]] = {}
    for s in spans:
        if s.facts.get("kind") in ON_GPU:
            tracks.setdefault(s.track, []).append((s.begin, s.end))
    busy = {track: _seconds(_common(_union(times), whole)) for track, times in tracks.items()}
    return [f"{phase}: the GPU of {track} is busy for {b:.4f} s" for track, b in busy.items() if b]


# ---- intervals, sorted and disjoint ----------------------------------------------------------------------------------


def _union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    out: Intervals = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        elif end > begin:
            out.append((begin, end))
    return out


def _common(a: Intervals, b: Intervals) -> Intervals:
    out: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            out.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def _without(a: Intervals, b: Intervals) -> Intervals:
    """Return the part of `a` that is not in `b`."""
    return _common(a, list(zip([0, *(end for _, end in b)], [*(begin for begin, _ in b), 2**63], strict=True)))


def _seconds(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals) / 1e9
