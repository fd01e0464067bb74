"""Hybrid models on the embedded engine: each way brings each version, also of a folder with layers for images."""

import json

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from instep.weights.way import RESTART
from tests.assets import make_prompts
from tests.e2e.commands import grpo_arguments, run
from tests.e2e.test_families import stack, train_once
from tests.unit.test_images import make_tiny

SLOW = [(name, backend) for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe") for backend in ("hf", "megatron")]
FAST = [("qwen3_next", "hf"), ("qwen3_5_moe", "megatron")]


@pytest.mark.parametrize(
    ("name", "backend"), [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]
)
def test_a_hybrid_is_proven_by_every_way(name, backend, tmp_path):
    with stack(name, tmp_path, "--train-backend", backend, "--weight-sync", "shm", kind="embedded") as made:
        sync = made.sync()
        try:
            for way in ("shm", "disk", "nccl", "ipc", RESTART):
                off, allowed = made.difference(sync, way)
                assert off <= min(allowed, 2e-4)
                train_once(made.actor)
        finally:
            sync.close()


@pytest.mark.parametrize(
    ("name", "backend"), [("qwen3_next", "megatron"), pytest.param("qwen3_5_moe", "megatron", marks=pytest.mark.slow)]
)
def test_the_adapter_of_a_hybrid_is_proven_by_every_way(name, backend, tmp_path):
    """Each layer with an adapter counts: a step moves all of B, and the next proof compares log-probs."""
    flags = ["--train-backend", backend, "--lora-rank", "4", "--weight-sync", "lora", "--lr", "1e-2"]
    with stack(name, tmp_path, *flags, kind="embedded") as made:
        sync = made.sync()
        try:
            for way in ("lora", "lora_ipc", "lora_disk", "lora"):
                off, allowed = made.difference(sync, way)
                assert off <= min(allowed, 2e-4)
                train_once(made.actor)
        finally:
            sync.close()


def test_a_run_trains_adapters_of_delta_nets_in_a_published_folder(tmp_path):
    """Ten steps; then the merged export is the published model with the adapter's product in each adapted layer."""
    hf = make_tiny("qwen3_5_moe", tmp_path / "hf", stacked=True)
    make_prompts(tmp_path / "train.jsonl", 16)
    words = "--train-backend megatron --rollout-backend embedded --weight-sync lora --lora-rank 4 --lr 1e-2"
    flags = f"{words} --num-rollout 10 --precision fp32 --vllm-max-model-len 64".split()
    flags += ["--custom-rm-path", "tests.e2e.observed.reward", "--save-hf", str(tmp_path / "out")]
    done = run(grpo_arguments(tmp_path, tmp_path / "run", *flags), 400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 10 and all(row["train/grad_norm"] > 0 for row in steps)
    assert max(row["train/log_prob_gap_max"] for row in steps) < 1e-4
    before, after = (load_file(folder / "model.safetensors") for folder in (hf, tmp_path / "out"))
    changed = {name.split(".")[-2] for name in before if not before[name].equal(after[name])}
    projections = {f"in_proj_{x}" for x in ("qkv", "z", "b", "a")} | {f"{x}_proj" for x in ("q", "k", "v", "o")}
    assert before.keys() == after.keys()
    assert changed == projections | {"out_proj", "gate_proj", "up_proj", "down_proj", "shared_expert_gate"}


@pytest.mark.parametrize(("backend", "way"), [("hf", "shm"), ("megatron", "disk")])
def test_a_run_on_a_published_folder_exports_the_whole_model(backend, way, tmp_path):
    hf = make_tiny("qwen3_5_moe", tmp_path / "hf", stacked=True)
    make_prompts(tmp_path / "train.jsonl", 16)
    flags = ["--train-backend", backend, "--rollout-backend", "embedded", "--weight-sync", way, "--precision", "fp32"]
    flags += ["--save-hf", str(tmp_path / "out"), "--save-interval", "2", "--vllm-max-model-len", "64"]
    done = run(grpo_arguments(tmp_path, tmp_path / "run", *flags), 300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "tensors of layers for images (model.visual." in done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["train/log_prob_gap_max"] for row in rows if "train/log_prob_gap_max" in row]
    assert len(gaps) == 2 and max(gaps) < 1e-4
    before, after = (load_file(folder / "model.safetensors") for folder in (hf, tmp_path / "out"))
    changed = [name for name in before if not before[name].equal(after[name])]
    assert before.keys() == after.keys() and len(changed) > 20 and not any("visual" in name for name in changed)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
