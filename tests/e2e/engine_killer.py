"""A reward that kills engine 1 in the middle of a rollout, and lets a later one wait until it is back."""

from __future__ import annotations

import asyncio
import os
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import psutil

from tests.e2e.commands import words_of

KILL_AT, WAIT_AT = int(os.environ.get("KILL_AT", "20")), 40  # calls
WAIT_SECONDS = 240.0
_num_calls = 0


async def reward(args: Any, sample: Any) -> float:
    global _num_calls
    _num_calls += 1
    url = args.rollout_engine_urls[1]
    if _num_calls == KILL_AT:
        process_at(url).kill()
    if _num_calls == WAIT_AT:
        deadline = time.monotonic() + WAIT_SECONDS
        while not await asyncio.to_thread(healthy, url):
            assert time.monotonic() < deadline, "engine 1 did not come back"
            await asyncio.sleep(0.2)
        await asyncio.sleep(3.0)  # for its session
    return float(len(sample.tokens) % 2)


async def reward_that_stops_it(args: Any, sample: Any) -> float:
    """Engine 1 stands still from one call on: its requests get no answer, and no end."""
    global _num_calls
    _num_calls += 1
    if _num_calls == KILL_AT:
        process = process_at(args.rollout_engine_urls[1])
        for part in (process, *process.children()):
            part.suspend()
    return float(len(sample.tokens) % 2)


def process_at(url: str) -> psutil.Process:
    """The engine's own process, or, where KILL_CORE is set, the one of vLLM that computes."""
    port = urlsplit(url).port
    family = psutil.Process(os.getpid())
    siblings = family.parent().children()  # an engine that the test runs
    members = [*family.children(recursive=True), *siblings]
    by_name = [p for p in members if f"--port {port} " in " ".join(words_of(p)) + " "]
    for process in by_name or [p for p in members if listens_at(p, port)]:  # vLLM's title has no port
        if os.environ.get("KILL_CORE"):
            return max(process.children(), key=lambda child: child.memory_info().rss)
        return process
    raise AssertionError(f"no process of {url}")


def listens_at(process: psutil.Process, port: int | None) -> bool:
    try:
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("tcp"))
    except psutil.Error:  # it has just ended
        return False


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False
