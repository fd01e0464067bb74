"""A whole run in an environment, by a stub that speaks the protocol of verifiers (which tests/neighbours has)."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import ENVIRONMENT, grpo_arguments, run

needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("zmq", "msgpack")),
    reason="pyzmq and msgpack come with vLLM",
)


@needs_packages
def test_a_run_in_an_environment_whose_server_dies_once(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    """All tasks are trained on in their order, with the ids and log-probs that the engine gave for each turn."""
    stub = str(Path(__file__).parent / "stub_verifiers")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", os.pathsep.join([stub, *sys.path]))
    monkeypatch.setitem(ENVIRONMENT, "STUB_MARKER", str(tmp_path / "died"))
    more = ["--env", "stub", "--env-args", '{"select": {"limit": 8}}', "--rollout-max-response-len", "8"]
    words = grpo_arguments(tiny, tmp_path / "run", *more)
    for name in ("--prompt-data", "--rm-type"):
        at = words.index(name)
        del words[at : at + 2]
    done = run(words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "died").exists()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/log_prob_gap_max" in line]
    assert len(steps) == 2 and all(0 <= line["train/log_prob_gap_max"] < 1e-4 for line in steps)
    assert [line["rollout/env/num_turns"] for line in lines if "rollout/env/num_turns" in line] == [2.0, 2.0]
    assert "is started again" in done.stderr + done.stdout
