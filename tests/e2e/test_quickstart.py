"""The quickstart reaches its figures, and the model that it exports is what plain transformers sees."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import ENVIRONMENT, run

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.alone]  # `.ci/run` has it by itself
MINUTES = 5 if (os.cpu_count() or 1) >= 4 else 8


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    out = tmp_path_factory.mktemp("quickstart")
    environment = {k: v for k, v in ENVIRONMENT.items() if k != "OMP_NUM_THREADS"}
    script = ROOT / "examples" / "quickstart" / "run.py"
    done = subprocess.run(
        [sys.executable, str(script), "--out", str(out)], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_its_figures(quickstart):
    summary = json.loads((quickstart / "summary.json").read_text())
    assert summary["eval_reward_before"] <= 0.5
    assert summary["eval_reward_after"] >= 0.9
    assert summary["wall_seconds"] <= 60 * MINUTES
    assert summary["peak_pss_bytes"] <= 3e9
    # 1e-5 of the largest log-prob of the probe, about 15: float32 itself is off by 1e-5 there (against float64)
    assert summary["sync_probe_rms_diff"] <= summary["sync_probe_tolerance"] < 2e-4
    assert {"num_steps", "versions"} <= summary.keys()


def test_its_files(quickstart):
    rows = [json.loads(line) for line in (quickstart / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "train/loss" in r]
    assert len(steps) == 25 and max(r["train/log_prob_gap_max"] for r in steps) < 1e-3
    lengths = [r["rollout/response_length_mean"] for r in steps]
    assert lengths[-1] > 1.5 * lengths[0]  # it has learnt to write its steps down
    names = ("report.html", "samples.jsonl", "config.json", "hf/model.safetensors", "hf/tokenizer.json")
    assert all((quickstart / name).stat().st_size for name in names)
    assert list((quickstart / "tensorboard").iterdir())


def test_plain_transformers_scores_as_the_engine_does(quickstart, tmp_path):
    """Greedy decoding of all held-out problems: the engine through `instep train --num-rollout 0`, and `generate`."""
    task, hf = quickstart / "task", quickstart / "hf"
    arguments = ["train", "--hf-checkpoint", hf, "--prompt-data", task / "train.jsonl", "--input-key", "prompt"]
    arguments += ["--label-key", "label", "--apply-chat-template", "--rm-type", "math", "--num-rollout", 0]
    arguments += ["--eval-prompt-data", "held-out", task / "eval.jsonl", "--eval-interval", 1, "--eval-temperature", 0]
    arguments += ["--rollout-batch-size", 32, "--rollout-max-response-len", 64, "--actor-num-gpus-per-node", 1]
    arguments += ["--train-backend", "hf", "--device", "cpu", "--run-dir", tmp_path]
    done = run([str(a) for a in arguments])
    assert done.returncode == 0, done.stderr[-3000:]
    engine = json.loads((tmp_path / "summary.json").read_text())["eval_reward_after"]
    assert abs(engine - greedy_reward(hf, task / "eval.jsonl")) <= 0.02
    assert engine >= 0.9


def greedy_reward(hf: Path, data: Path) -> float:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    prompts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in rows]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    out = model.generate(**inputs, do_sample=False, max_new_tokens=64)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [f"\\boxed{{{row['label']}}}" in text for row, text in zip(rows, texts, strict=True)]
    return sum(right) / len(right)


@pytest.mark.slow
@pytest.mark.vllm
def test_on_two_vllm_engines(tmp_path):
    """`make quickstart-vllm`: the same commands, files and reward."""
    environment = {k: v for k, v in ENVIRONMENT.items() if k != "OMP_NUM_THREADS"}
    command = [sys.executable, str(ROOT / "examples" / "quickstart" / "run.py"), "--out", str(tmp_path)]
    command += ["--rollout-backend", "vllm", "--num-engines", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "summary.json").read_text())["eval_reward_after"] >= 0.9
    test_its_files(tmp_path)
    assert {"engine-0.log", "engine-1.log", "router.log"} <= {path.name for path in (tmp_path / "logs").iterdir()}
