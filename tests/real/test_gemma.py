"""Runs of a real pretrained model, Gemma 3 270M in float32, on a CPU: minutes each. `make test-real` fetches it."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from instep.controller.sync.proof import ALLOWED
from tests.e2e.commands import run
from tests.e2e.test_serve import Server

sys.path.insert(0, "examples/real")

import make_task
from run import CACHE, FLAGS

MARKS = {"embedded": [], "vllm": [pytest.mark.vllm], "sglang": [pytest.mark.sglang, pytest.mark.sglang_router]}
WAYS = ["shm", "single-copy", "disk", "lora", "restart"]
CASES = [(engine, way) for engine in ("embedded", "vllm") for way in WAYS]
CASES += [("sglang", way) for way in ("shm", "single-copy", "lora")]
LR = 1e-5


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    make_task.make(folder)
    return folder


@pytest.fixture(scope="module")
def model():
    # Another process: transformers looks once whether accelerate is here, and it is here for the conversion alone.
    subprocess.run([sys.executable, "examples/real/make_model.py", str(CACHE)], check=True, timeout=1200)
    return CACHE


def arguments_of(model, task, run_dir, *more, command="train"):
    out = [command, "--hf-checkpoint", str(model), "--prompt-data", str(task / "train.jsonl"), "--rollout-stop", "\n"]
    out += [*FLAGS.split(), "--rollout-batch-size", "4", "--num-rollout", "2", "--lr", str(LR), "--device", "cpu"]
    return [*out, "--max-tokens-per-gpu", "4096", "--vllm-max-model-len", "256", "--run-dir", str(run_dir), *more]


def steps_of(arguments, roundings=ALLOWED):
    """The rows of the run's steps, whose syncs and gaps are right; the proofs are within so many roundings."""
    done = run(arguments, 900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    with open(f"{arguments[arguments.index('--run-dir') + 1]}/metrics.jsonl") as file:
        steps = [row for row in map(json.loads, file) if "train/loss" in row]
    for row in steps:
        assert row["sync/probe_rms_diff"] < roundings * row["sync/probe_rounding"]
        assert row["train/log_prob_gap_max"] < 1e-2
    assert any(row["train/grad_norm"] > 0 for row in steps)  # a step may have no group with two rewards
    return steps


@pytest.mark.parametrize(("engine", "way"), [pytest.param(*case, marks=MARKS[case[0]]) for case in CASES])
def test_a_step_reaches_the_engine_by_every_way(model, task, tmp_path, engine, way):
    more = ["--lora-rank", "8", "--lr", "1e-4"] if way == "lora" else []
    words = arguments_of(model, task, tmp_path, "--rollout-backend", engine, "--weight-sync", way, *more)
    steps = steps_of(words, ALLOWED if engine == "embedded" else 20.0)  # kernels of a CPU: vLLM's reach 11, SGLang's 16
    assert len(steps) == 2 and [step["sync/version"] for step in steps] == [2, 3]


def test_asynchronous(model, task, tmp_path):
    more = ["--rollout-backend", "embedded", "--max-staleness", "1", "--num-rollout", "3"]
    assert len(steps_of(arguments_of(model, task, tmp_path, *more, command="train-async"))) == 3


def test_resumed_exported_reloaded_and_served(model, task, tmp_path):
    """A run of two rollouts goes on with a third; transformers and `instep serve` answer alike with what it exports."""
    more = ["--rollout-backend", "embedded", "--save", str(tmp_path / "ckpt"), "--save-interval", "1"]
    more += ["--load", str(tmp_path / "ckpt"), "--save-hf", str(tmp_path / "hf")]
    assert len(steps_of(arguments_of(model, task, tmp_path / "run", *more))) == 2
    assert len(steps_of(arguments_of(model, task, tmp_path / "run", *more, "--num-rollout", "3"))) == 3

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    trained, base = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (tmp_path / "hf", model)
    )
    moved = max((a - b).abs().max() for a, b in zip(trained.parameters(), base.parameters(), strict=True))
    assert 0 < moved < 10 * LR
    with open(task / "eval.jsonl") as file:
        prompts = [json.loads(line)["prompt"] for line in file][:8]
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        out = trained.generate(**ids, max_new_tokens=6, do_sample=False)
        answers.append(tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True))
    with Server(tmp_path, "--rollout-backend", "embedded") as server:
        server.wait_for("Ctrl-C ends it")
        for prompt, answer in zip(prompts, answers, strict=True):
            given = server.client.completions.create(
                model=str(tmp_path / "hf"), prompt=prompt, max_tokens=6, temperature=0
            )
            assert given.choices[0].text == answer
        assert server.end() == 0
