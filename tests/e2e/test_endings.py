"""What a run leaves behind when all went well; how it ends otherwise is the matter of `tests/faults/`."""

import json

from tests.e2e.commands import grpo_arguments, run


def test_a_run_dir_shows_what_happened(tiny, tmp_path):
    done = run(grpo_arguments(tiny, tmp_path, "--num-rollout", "1"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "logs" / "engine-0.log").exists() and (tmp_path / "logs" / "actor-rank0.log").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ledger"]["num_consumed"] == 4
