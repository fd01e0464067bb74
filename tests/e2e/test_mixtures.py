"""Whole runs: of a mixture of experts with the embedded engine, and of a model that is trained padded."""

import json

import pytest
from safetensors.torch import load_file

from tests.assets import make_conversations, make_prompts
from tests.e2e.commands import grpo_arguments, run
from tests.families import make_family

pytestmark = pytest.mark.slow


MEGATRON = ["--train-backend", "megatron", "--actor-num-gpus-per-node", "2", "--expert-model-parallel-size", "2"]
RATE = 0.01  # by which a step moves the bias of an expert
DEEPSEEK = [*MEGATRON, "--precision", "fp32", "--moe-router-bias-update-rate", str(RATE)]
MEGATRON += ["--moe-aux-loss-coeff", "0.01"]


@pytest.mark.parametrize(("family", "more"), [("mixtral", []), ("qwen3_moe", MEGATRON), ("deepseek_v3", DEEPSEEK)])
def test_a_mixture_trains_with_the_embedded_engine(tmp_path, family, more):
    checkpoint = make_family(family, tmp_path / "hf")
    make_prompts(tmp_path / "train.jsonl", 16)
    flags = ["--rollout-backend", "embedded", "--rollout-max-context-len", "128", "--save-hf", str(tmp_path / "out")]
    done = run(grpo_arguments(tmp_path, tmp_path / "run", *flags, *more, "--save", str(tmp_path / "save")), 300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 2 and max(row["train/log_prob_gap_max"] for row in steps) < 1e-4
    assert all(row["sync/probe_rms_diff"] <= row["sync/probe_tolerance"] < 2e-4 for row in steps)
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "out"))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    for name in (n for n in before if n.endswith("e_score_correction_bias")):  # which the engine got, too: see the gap
        moved = (after[name] - before[name]) / RATE
        assert moved.round().abs().max() == len(steps) and (moved - moved.round()).abs().max() < 1e-4


def test_a_run_says_that_its_model_is_trained_padded(tmp_path):
    make_family("gemma2", tmp_path / "hf")
    make_conversations(tmp_path / "sft.jsonl", 16)
    flags = {
        "--hf-checkpoint": tmp_path / "hf",
        "--prompt-data": tmp_path / "sft.jsonl",
        "--input-key": "messages",
        "--rollout-batch-size": 8,
        "--num-rollout": 2,
        "--lr": 1e-3,
        "--train-backend": "hf",
        "--actor-num-gpus-per-node": 2,
        "--num-threads": 2,
        "--device": "cpu",
        "--run-dir": tmp_path / "run",
    }
    done = run(["sft", *(str(x) for flag in flags.items() for x in flag)], 300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Gemma2ForCausalLM is trained padded, which is slower: its attention caps scores (softcap 50" in done.stdout
