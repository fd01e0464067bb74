"""The file of a profiled step: trace events in Chrome's JSON format, which ui.perfetto.dev opens.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.system.spans import Lane, Span


def write_trace(path: Path, spans: Sequence[Span], begin: int, about: Mapping[str, Any]) -> None:
    """Write `spans` into the gzipped file `path`, as microseconds since `begin`; each track becomes a process."""
    tracks = {track: number for number, track in enumerate(dict.fromkeys(s.track for s in spans), 1)}
    lanes = _lanes(spans)
    with gzip.open(path, "wt", compresslevel=4) as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(dict(about))},\n"traceEvents": [\n')
        lines = (json.dumps(event) for event in _events(spans, begin, tracks, lanes))
        for i, line in enumerate(lines):
            file.write(f",\n{line}" if i else line)
        file.write("\n]}\n")


def _events(
    spans: Sequence[Span], begin: int, tracks: Mapping[str, int], lanes: Mapping[tuple[str, Lane], tuple[int, str]]
) -> Iterator[dict[str, Any]]:
    for track, pid in tracks.items():
        yield _named("process_name", pid, 0, {"name": track})
        yield _named("process_sort_index", pid, 0, {"sort_index": pid})
    for pid, tid, name in sorted({(tracks[track], *row) for (track, _), row in lanes.items()}):
        yield _named("thread_name", pid, tid, {"name": name})
        yield _named("thread_sort_index", pid, tid, {"sort_index": tid})
    for s in spans:
        tid = lanes[s.track, s.lane][0]
        when = {"ts": (s.begin - begin) / 1000, "dur": (s.end - s.begin) / 1000}
        kind = str(s.facts.get("kind", "instep"))
        args = {name: value for name, value in s.facts.items() if name != "kind"}
        yield {"ph": "X", "name": s.name, "cat": kind, "pid": tracks[s.track], "tid": tid, **when, "args": args}


def _named(what: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _lanes(spans: Sequence[Span]) -> dict[tuple[str, Lane], tuple[int, str]]:
    """Return number and name of the row of each lane. Numbered lanes share a row if their times do not overlap."""
    extent: dict[tuple[str, Lane], tuple[int, int]] = {}
    for s in spans:
        begin, end = extent.get((s.track, s.lane), (s.begin, s.end))
        extent[s.track, s.lane] = min(begin, s.begin), max(end, s.end)
    rows: dict[tuple[str, Lane], tuple[int, str]] = {}
    ends: dict[str, list[int]] = {}  # of the shared rows of a track
    named = [key for key in extent if isinstance(key[1], str)]
    for n, (track, lane) in enumerate(sorted(named, key=str), 1):
        rows[track, lane] = (n, str(lane))
    for key in sorted((k for k in extent if not isinstance(k[1], str)), key=lambda k: extent[k]):
        taken = ends.setdefault(key[0], [])
        begin, end = extent[key]
        row = next((i for i, free in enumerate(taken) if free <= begin), len(taken))
        taken[row : row + 1] = [end]
        rows[key] = (len(named) + row + 1, f"at once {row + 1}")
    return rows
