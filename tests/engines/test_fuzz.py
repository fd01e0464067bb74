"""No request of a client ends an engine, lets it hang, or gets a 500: random ones to every route."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.route_fuzz import CONTROL, GENERATION, fuzz
from tests.engines.running import Engine, make_checkpoint, run_engine
from tests.engines.test_weights import session
from tests.keys import HEADERS

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("fuzzed")
    hf = make_checkpoint(folder / "model", tied=True)
    with run_engine("embedded", folder / "model", hf, folder / "log", "--max-model-len", "64") as engine:
        yield engine


def fuzzed(engine: Engine, seed: int, num: int, tmp_path: Path) -> str:
    """The log of an engine that got random requests, and serves as before."""
    before = engine.generate(PROMPT, max_tokens=20, temperature=0)
    seen = fuzz(engine.url, seed, num, GENERATION, headers=HEADERS)
    assert engine.generate(PROMPT, max_tokens=20, temperature=0) == before
    assert min(seen[200], seen[400]) > num / 10, seen  # neither all valid nor all refused
    # Without requests that would wait for the end of a pause.
    fuzz(engine.url, seed + 1, num // 2, CONTROL, headers=HEADERS)
    engine.ok("/resume")
    (folder := tmp_path / "instep-sync-1").mkdir(mode=0o700)
    assert session(engine, engine.hf, folder / "bucket", "default") is None  # it takes weights as ever
    assert engine.generate(PROMPT, max_tokens=20, temperature=0) == before
    deadline = time.monotonic() + 60
    while not engine.ok("/reset_prefix_cache")["success"]:  # nothing goes on for ever
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return (engine.path.parent / "log").read_text()


def test_some_random_requests(served: Engine, tmp_path: Path) -> None:
    assert "Traceback" not in fuzzed(served, 1, 150, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_many_random_requests(served: Engine, tmp_path: Path, seed: int) -> None:
    assert "Traceback" not in fuzzed(served, 100 * seed, 1500, tmp_path)
