"""Scenarios run two at a time in the background, in the order of the tests, which wait for theirs."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.assets import make_checkpoint, make_prompts
from tests.e2e.commands import grpo_arguments, run
from tests.faults.harness import Place, Result
from tests.faults.suite import SCENARIOS

NUM_AT_ONCE = 2


def run_all(names: list[str], root: Path) -> tuple[ThreadPoolExecutor, dict[str, Future[dict[str, Result]]]]:
    """Begin the scenarios, in folders below `root`; what becomes of each, and what runs them."""
    tiny, saved = prepare(root / "prepared")
    pool = ThreadPoolExecutor(NUM_AT_ONCE)

    def work(name: str) -> dict[str, Result]:
        place = Place(tiny, saved, root / name)
        place.folder.mkdir()
        SCENARIOS[name](place)
        return place.results

    return pool, {name: pool.submit(work, name) for name in names}


def prepare(root: Path) -> tuple[Path, Path]:
    """`tiny/` (model and data) and `saved/`, the checkpoints of a run of two rollouts on them."""
    make_checkpoint(root / "tiny" / "hf")
    make_prompts(root / "tiny" / "train.jsonl", 64)
    done = run(grpo_arguments(root / "tiny", root / "run", "--save", str(root / "saved"), "--save-interval", "1"))
    assert done.returncode == 0, done.stderr[-3000:]
    return root / "tiny", root / "saved"


@pytest.fixture(scope="session")
def outcomes(request, tmp_path_factory) -> Iterator[dict[str, Future[dict[str, Result]]]]:
    """The selected scenarios, at work."""
    names = [item.callspec.params["scenario"] for item in request.session.items if "outcomes" in item.fixturenames]
    pool, futures = run_all(names, tmp_path_factory.mktemp("faults"))
    yield futures
    pool.shutdown(cancel_futures=True)
