"""vLLM with a base as GPTQ or AWQ packs it, under an adapter, and started anew on whole weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.assets import make_checkpoint
from tests.e2e.commands import ENVIRONMENT, grpo_arguments, on_vllm, run
from tests.quantized import quantize, with_kernel

LORA = "--weight-sync lora --lora-rank 4 --lr 1e-2 --num-rollout 3"


CASES = [("gptq", LORA), ("awq", LORA), ("awq", "--weight-sync restart --num-rollout 1")]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(("method", "more"), CASES)
def test_each_sync_is_within_rounding(tiny: Path, tmp_path: Path, monkeypatch, method: str, more: str) -> None:
    model = make_checkpoint(tmp_path / "hf", head_dim=32)
    quantize(model, method)
    if not torch.cpu._is_avx512_supported():
        monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", with_kernel(tmp_path / "kernel"))
    train_on(model, tiny, tmp_path, "CPUWNA16LinearKernel", more)


def train_on(model: Path, tiny: Path, tmp_path: Path, kernel: str, more: str, *flags: str) -> None:
    """The trainer's log-probs are those of vLLM's kernel: the tolerance is that of a base that nobody quantizes."""
    words = [
        "--hf-checkpoint",
        str(model),
        "--rm-type",
        "random",
        *on_vllm(),
        "--precision",
        "bf16",
        *more.split(),
        *flags,
    ]
    done = run(grpo_arguments(tiny, tmp_path / "run", *words, "--save-hf", str(tmp_path / "out")), timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Using {kernel}" in (tmp_path / "run" / "logs" / "engine-0.log").read_text()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    proofs = [step for step in steps if "sync/probe_rms_diff" in step]
    assert len(proofs) == (3 if more == LORA else 1)
    for proof in proofs:
        assert (
            proof["sync/probe_rms_diff"] <= proof["sync/probe_tolerance"] <= 3.5 * proof["sync/probe_rounding"] < 0.02
        )
        assert proof["train/log_prob_gap_mean"] < 0.02  # of the model that it was made from it would be 0.15
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
