"""Spans of a process: what is recorded, on which clock, and that nothing is while nobody records."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
import torch

from instep.system import spans
from instep.system.spans import Span


@pytest.fixture(autouse=True)
def off():
    yield
    spans.stop()


def test_nothing_is_made_or_kept_while_nobody_records() -> None:
    asked = []
    with spans.span("a", facts=lambda: asked.append(1) or {}):
        pass
    spans.add("b", 1, 2, {})
    assert spans.span("a") is spans.span("b", "track") and spans.now() is None
    assert spans.stop() == [] and asked == []


def test_a_span_has_its_track_its_times_and_what_is_known_at_its_end() -> None:
    before = time.time_ns()
    spans.start("here")
    facts = {"tokens": 0}
    with spans.span("outer", facts=lambda: facts), spans.span("inner", "engine 0"):
        time.sleep(0.01)
        facts["tokens"] = 5
    with pytest.raises(ValueError), spans.span("broken"):
        raise ValueError
    began = spans.now()
    assert began is not None
    spans.add("later", 7, began, {})
    with spans.span("unfinished"):
        inner, outer, broken, later = spans.stop()
    after = time.time_ns()
    assert (outer.track, outer.name, outer.facts, outer.lane) == ("here", "outer", {"tokens": 5}, "main")
    assert (inner.track, inner.name, broken.name) == ("engine 0", "inner", "broken")
    assert before - 1e6 <= outer.begin <= inner.begin < inner.end - 10_000_000 < inner.end <= outer.end <= after + 1e6
    assert (later.lane, later.track, later.begin) == (7, "here", began) and spans.stop() == []


def test_tasks_and_threads_have_lanes_of_their_own() -> None:
    async def job() -> None:
        with spans.span("job"):
            await asyncio.sleep(0.001)

    async def both() -> None:
        await asyncio.gather(job(), job())

    def work() -> None:
        with spans.span("thread"):
            pass

    spans.start("here")
    asyncio.run(both())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    lanes = [s.lane for s in spans.stop()]
    assert len(set(lanes)) == 3 and "main" not in lanes


def test_a_timed_function_is_a_span_which_settles_within() -> None:
    spans.start("here")
    double = spans.timed(lambda x: 2 * x, "double", lambda: time.sleep(0.01))
    assert double(4) == 8
    (only,) = spans.stop()
    assert only.name == "double" and only.end - only.begin >= 10_000_000


def test_events_of_torch_lie_within_our_spans(tmp_path: Path) -> None:
    x = torch.ones(400, 400)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()
    spans.start("here")
    for _ in range(3):
        with spans.span("block"):
            time.sleep(0.002)  # what both clocks may differ by
            x @ x
            time.sleep(0.002)
    ours = spans.stop()
    profiler.stop()
    profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    found = [s for s in spans.of_torch(tmp_path / "trace.json.gz", "rank") if s.name == "aten::mm"]
    assert len(found) == len(ours) == 3
    for product, block in zip(found, ours, strict=True):
        assert block.begin < product.begin < product.end < block.end
        assert product.track == "rank" and product.facts == {"kind": "cpu_op"}


def test_of_too_many_spans_our_own_stay_then_kernels_then_long_operators() -> None:
    def of(name: str, seconds: int, **facts: str) -> Span:
        return Span("t", "main", name, 10, 10 + seconds, facts)

    given = [of("op", 9, kind="cpu_op"), of("op", 2, kind="cpu_op"), of("k", 1, kind="kernel"), of("call", 3)]
    given += [of("outside", 200), Span("t", "main", "early", 9, 11, {})]
    names = [(s.name, s.end - s.begin) for s in spans.within(given, 10, 100, 3)]
    assert names == [("call", 3), ("k", 1), ("op", 9)]
    assert len(spans.within(given, 10, 100, 10)) == 4
