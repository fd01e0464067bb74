"""What a step costs the controller when engine and trainer cost nothing (benchmarks/controller_share.py)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bounds import allowed
from tests.e2e.commands import ENVIRONMENT

pytestmark = pytest.mark.vllm  # whose requests the benchmark writes
ROOT = Path(__file__).parents[2]


def measured(out: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.controller_share", "--lengths", "uniform", "--out", str(out), *flags]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_the_controllers_share_is_small_and_grows_with_the_samples_alone(tmp_path: Path) -> None:
    """On two busy cores 0.08 s for 128 samples; the bound is for cores that other tests share."""
    found = measured(tmp_path / "share.json", "--samples", "128", "256")
    few, many = (row["seconds"] for row in found["rows"])
    assert few["cpu"] < 0.4, few
    assert many["cpu"] < 2 * 2 * few["cpu"], (few, many)  # linear in the samples
    assert found["headline"]["cpu_seconds_uniform_128"] == few["cpu"]


@pytest.mark.slow
def test_beside_an_engine_that_takes_its_time_only_the_rest_counts(tmp_path: Path) -> None:
    """32 samples of 512 tokens, of which the engine makes 8,192 a second: 2 seconds."""
    found = measured(tmp_path / "share.json", "--samples", "32", "--tokens-per-second", "8192")
    (row,) = found["rows"]
    for step in row["steps"]:
        assert step["generate wall"] > 2.0
        assert step["beyond the engine"] == pytest.approx(step["wall"] - 2.0)
    assert 0 < found["headline"]["beyond_uniform_32"] < allowed(0.8), row
