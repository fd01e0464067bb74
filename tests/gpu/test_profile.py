"""The profile of a step on a GPU: CUDA kernels of the trainer on the clock of all processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from instep.cli import main
from tests.assets import make_checkpoint, make_prompts
from tests.e2e.commands import grpo_arguments
from tests.e2e.test_profile import one, read

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_kernels_of_a_step_lie_within_the_calls_that_launch_them(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hf")
    make_prompts(tmp_path / "train.jsonl", 64)
    flags = ["--device", "cuda", "--rollout-backend", "embedded", "--colocate", "--no-offload-train"]
    words = grpo_arguments(tmp_path, tmp_path / "run", *flags, "--no-offload-rollout")
    assert main(["profile", *words[1:]]) == 0
    about, of = read(tmp_path / "run-profile" / "profile" / "step-2.trace.json.gz")
    rank = of["actor rank 0"]
    kernels = [s for s in rank if s["cat"] == "kernel"]
    assert len(kernels) > 50 and max(Counter(s["cat"] for s in rank).values()) < 400_000
    step = one(rank, "train")
    begin, end = one([s for s in rank if s["ts"] > step[0]], "forward_backward")
    inside = [s for s in kernels if begin < s["ts"] and s["ts"] + s["dur"] < end]
    assert len(inside) > 30, "the call waits for its kernels"
    calls = [(s["ts"], s["ts"] + s["dur"]) for s in rank if s["cat"] == "instep"]
    near = [s for s in kernels if any(a - 200 < s["ts"] < b + 200 for a, b in calls)]
    assert len(near) > 0.9 * len(kernels), "kernels are on the clock of the calls"
    text = (tmp_path / "run-profile" / "profile" / "step-2.txt").read_text()
    assert "train: the GPU of actor rank 0 is busy for" in text
    if any(name in torch.cuda.get_device_name() for name in ("H100", "H200", "A100")):
        assert {row["part"] for row in about["table"] if row["floor"]} >= {"generate", "forward and backward"}
