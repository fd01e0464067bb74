"""What a step costs the controller when engine and trainer cost nothing (benchmarks/controller_share.py)."""

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.commands import ENVIRONMENT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "controller_share.py"


def test_the_controllers_share_is_small_and_grows_with_the_samples_alone(tmp_path: Path) -> None:
    """On two busy cores 0.08 s for 128 samples; the bound is for cores that other tests share."""
    out = tmp_path / "share.json"
    command = [sys.executable, str(SCRIPT), "--samples", "128", "512", "--lengths", "uniform", "--out", str(out)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(out.read_text())
    few, many = (row["seconds"] for row in found["rows"])
    assert few["cpu"] < 0.4, few
    assert many["cpu"] < 4 * 2 * few["cpu"], (few, many)  # linear in the samples
    assert found["headline"]["cpu_seconds_uniform_128"] == few["cpu"]
