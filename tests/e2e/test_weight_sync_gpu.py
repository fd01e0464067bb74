"""The syncs that `benchmarks/weight_sync_gpu.py` measures on GPUs, of a tiny model on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bounds import allowed
from tests.e2e.commands import ENVIRONMENT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "weight_sync_gpu.py"


@pytest.mark.slow
@pytest.mark.vllm
def test_syncs_are_measured_while_requests_stay_in_the_engine(tmp_path: Path) -> None:
    limit = allowed(240)
    words = f"--device cpu --size tiny --only tiny:single-copy --num-syncs 3 --limit {limit:.0f}".split()
    for name in ("models", "logs", "out"):
        words += [f"--{name}", str(tmp_path / name)]
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=limit + 160)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (row,) = json.loads((tmp_path / "out").read_text())["rows"]
    assert row["num_syncs"] == 3 and row["answered"] > 0 and row["tokens_per_s"] > 0
    assert row["busy"]["bytes"] == 0 and 0 < row["busy"]["write_seconds"] <= row["busy"]["transfer_seconds"]
    assert row["busy"]["probe_rms_diff"] <= row["busy"]["probe_tolerance"]
