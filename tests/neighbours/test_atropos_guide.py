"""The guide of Atropos' example trainer, typed into bash: the wheel's API and a `BaseEnv` train with instep on the CPU.

The commands are the guide's, but for ports, a model's folder in the place of a hub's name, and few steps. What it greps
for in the logs is there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from instep.ports import free_port

ROOT = Path(__file__).parents[2]
ATROPOS = ROOT / ".venv-atropos/bin"
pytestmark = pytest.mark.skipif(not ATROPOS.is_dir(), reason="make test-neighbours makes .venv-atropos")
STEPS = 12
SIZES = "--batch-size 8 --gradient-accumulation-steps 8"  # on this model; the guide leaves the defaults

API = "run-api --port {api} > api.log 2>&1 &"
ENVIRONMENT = """python environments/gsm8k_server.py serve \\
    --slurm False \\
    --openai.model_name models/policy \\
    --openai.base_url http://localhost:{vllm}/v1 \\
    --openai.server_type vllm \\
    --openai.api_key x \\
    --env.tokenizer_name models/policy \\
    --env.use_wandb False --env.rollout_server_url http://localhost:{api} \\
    > gsm8k.log 2>&1 &"""
SINGLE_COPY = """export VLLM_ENABLE_SHARED_WEIGHTS=1
export VLLM_SKIP_WEIGHT_DAEMON=1
export NUM_INFERENCE_NODES=0
export LOGDIR=.
CUDA_VISIBLE_DEVICES=0 python -u example_trainer/vllm_api_server.py \\
    --model models/policy \\
    --tensor-parallel-size 1 \\
    --port {vllm} \\
    > vllm.log 2>&1 &"""
LORA = """export LOGDIR=$PWD
LOGDIR=$LOGDIR python -u example_trainer/vllm_api_server.py \\
    --model models/policy \\
    --port {vllm} \\
    --dtype bfloat16 \\
    --gpu-memory-utilization 0.4 \\
    --enable-lora \\
    --max-lora-rank 32 \\
    --enforce-eager \\
    > vllm.log 2>&1 &"""
TRAINERS = {
    "shared_vllm": """CUDA_VISIBLE_DEVICES=0 LOGDIR=. python -u example_trainer/grpo.py \\
    --model-name models/policy \\
    --weight-bridge-mode shared_vllm \\
    --training-steps {steps} {sizes} --lr 5e-4 --vllm-port {vllm} --atropos-url http://localhost:{api} \\
    2>&1 | tee trainer.log""",
    "lora_only": """CUDA_VISIBLE_DEVICES=1 python -u example_trainer/grpo.py \\
    --model-name models/policy \\
    --weight-bridge-mode lora_only \\
    --vllm-port {vllm} \\
    --lora-r 16 \\
    --lora-alpha 32 \\
    --training-steps {steps} {sizes} --atropos-url http://localhost:{api} \\
    --lr 5e-3 \\
    --save-path $LOGDIR/checkpoints_lora \\
    --benchmark \\
    2>&1 | tee $LOGDIR/trainer.log""",
    "none": """export LOGDIR=$PWD
CUDA_VISIBLE_DEVICES=0 python -u example_trainer/grpo.py \\
    --model-name models/policy \\
    --weight-bridge-mode none \\
    --vllm-port {vllm} \\
    --training-steps {steps} {sizes} --atropos-url http://localhost:{api} \\
    --vllm-restart-interval 6 \\
    --lr 5e-4 \\
    --save-path $LOGDIR/checkpoints_legacy \\
    --benchmark \\
    2>&1 | tee $LOGDIR/trainer.log""",
}
SAVED = {"shared_vllm": "trained_model_checkpoints", "lora_only": "checkpoints_lora", "none": "checkpoints_legacy"}
LINES = {
    "shared_vllm": [
        "[Setup] ✓ Attached 24 tensors to vLLM's shared memory",
        "[Setup] ✓ Single-copy mode active - using vLLM's tensors directly!",
        f"[2/2] Starting training for {STEPS} steps",
        f"[SINGLE-COPY] Weights updated in-place - step {STEPS}",
    ],
    "lora_only": ["LORA MODE (adapter-only training)", "BENCHMARK SUMMARY (lora_only)"],
    "none": ["LEGACY MODE (checkpoint + vLLM restart)", "BENCHMARK SUMMARY (none)"],
}


@pytest.fixture(scope="module")
def folder_with_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("atropos")
    made = [sys.executable, str(ROOT / "examples/atropos/make_model.py"), "--num-threads", "1"]
    done = subprocess.run(made, cwd=folder, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "plugins/instep-vllm")])
    more = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **more, "PATH": f"{ATROPOS}{os.pathsep}{os.environ['PATH']}"}


def wait_for(happens: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


@pytest.mark.parametrize("mode", ["shared_vllm", "lora_only", "none"])
def test_the_guide_trains(mode: str, folder_with_model: Path, tmp_path: Path) -> None:
    """What the guide says appears; the scores rise; what is left loads, and has moved."""
    shutil.copytree(ROOT / "examples/atropos", tmp_path, dirs_exist_ok=True)
    for name in ("models", "data"):
        shutil.copytree(folder_with_model / name, tmp_path / name)
    ports = {"vllm": free_port(), "api": free_port(), "steps": STEPS, "sizes": SIZES}
    server = {"shared_vllm": SINGLE_COPY, "lora_only": LORA, "none": ""}[mode]
    bash = subprocess.Popen(
        ["bash"], cwd=tmp_path, env=environment(), stdin=subprocess.PIPE, text=True, start_new_session=True
    )

    def type_in(text: str) -> None:
        assert bash.stdin is not None
        bash.stdin.write(text.format(**ports) + "\n")
        bash.stdin.flush()

    def read(name: str) -> str:
        return (tmp_path / name).read_text() if (tmp_path / name).exists() else ""

    try:
        type_in(f"{API}\n{server}")
        if server:
            up = f"Uvicorn running on http://127.0.0.1:{ports['vllm']}"
            wait_for(lambda: up in read("vllm.log"), 240, "vLLM does not run")
        if mode == "shared_vllm":
            assert "Exported 18 params to" in read("vllm.log") and (tmp_path / "vllm_bridge_config.json").is_file()
        type_in(ENVIRONMENT)
        type_in(TRAINERS[mode] + "\necho ended >> trainer.log")
        wait_for(lambda: read("trainer.log").endswith("ended\n"), 900, "the trainer does not end")
    finally:
        os.killpg(bash.pid, signal.SIGTERM)
        time.sleep(3)
        os.killpg(bash.pid, signal.SIGKILL)
        bash.wait()
    log, save = read("trainer.log"), tmp_path / SAVED[mode]
    for line in [*LINES[mode], f"Step 1/{STEPS}", f"Step {STEPS}/{STEPS}", "Training finished."]:
        assert line in log, log[-3000:]
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    scores = [row["rollout/reward_mean"] for row in rows if "rollout/reward_mean" in row]
    assert len(scores) == STEPS and sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.05, scores
    if mode == "lora_only":
        assert (save / f"adapter_step_{STEPS}/adapter_config.json").is_file()
        moved = load_file(save / "final_adapter/adapter_model.safetensors")
        assert any(bool(tensor.any()) for name, tensor in moved.items() if "lora_B" in name)
    else:
        before, after = (
            load_file(f / "model.safetensors") for f in (tmp_path / "models/policy", save / f"step_{STEPS}")
        )
        assert before.keys() == after.keys() and (save / "final_model/tokenizer.json").is_file()
        assert any(not before[name].to(after[name].dtype).equal(after[name]) for name in before)
