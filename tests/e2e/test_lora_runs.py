"""Whole runs that train an adapter with real vLLM."""

import json

import pytest

from tests.e2e.commands import grpo_arguments, on_vllm, run


@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_on_a_quantized_base(small, tmp_path):
    """vLLM keeps the base in fp8, the trainer in bf16: the gap is that of the rounding, and the sync says how much."""
    words = ["--hf-checkpoint", str(small / "hf"), "--lora-rank", "4", "--weight-sync", "lora", "--lr", "1e-3"]
    words += ["--vllm-quantization", "fp8_per_channel", "--precision", "bf16", "--num-rollout", "3"]
    done = run(grpo_arguments(small, tmp_path / "run", *words, *on_vllm()), timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 3 and all(0 < row["sync/probe_rms_diff"] <= row["sync/probe_tolerance"] for row in steps)
    assert 0 < max(row["train/log_prob_gap_max"] for row in steps) < 0.5
    assert "Quantizing 8 layers" in (tmp_path / "run" / "logs" / "engine-0.log").read_text()


@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_on_vllm_trains_on_tokens_of_the_adapter(small, tmp_path):
    """Responses that the router hands out have the trainer's log-probs, also after steps that move them much."""
    words = ["--hf-checkpoint", str(small / "hf"), "--lora-rank", "4", "--weight-sync", "lora", "--lr", "1e-2"]
    words += [
        "--custom-rm-path",
        "tests.e2e.observed.reward",
        "--num-rollout",
        "3",
        "--save-hf",
        str(tmp_path / "hf"),
        "--save-hf-as",
        "adapter",
    ]
    done = run(grpo_arguments(small, tmp_path / "run", *words, *on_vllm()), timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 3 and max(row["train/log_prob_gap_max"] for row in steps) < 1e-4
    assert all(row["train/grad_norm"] > 0 for row in steps)
    assert (tmp_path / "hf" / "adapter_model.safetensors").stat().st_size < 100_000
