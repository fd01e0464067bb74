"""The guide of Atropos' example trainer, typed into bash; `test_atropos_guide.py` here and in tests/gpu run it.

The commands are the guide's, but for ports, a model's folder in the place of a hub's name, and few steps.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from instep.system.ports import free_port

ROOT = Path(__file__).parents[2]
ATROPOS = ROOT / ".venv-atropos/bin"
MODEL = os.environ.get("GUIDE_MODEL")  # a folder in which examples/atropos/make_model.py has run already
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
    --port {vllm} {server} \\
    > vllm.log 2>&1 &"""
LORA = """export LOGDIR=$PWD
LOGDIR=$LOGDIR python -u example_trainer/vllm_api_server.py \\
    --model models/policy \\
    --port {vllm} \\
    --dtype bfloat16 \\
    --gpu-memory-utilization 0.4 \\
    --enable-lora \\
    --max-lora-rank 32 \\
    --enforce-eager {server} \\
    > vllm.log 2>&1 &"""
TELL = "(while kill -0 $!; do sleep 1; done; echo ended >> vllm.log) 2> /dev/null &"  # not the guide's
TRAINERS = {
    "shared_vllm": """CUDA_VISIBLE_DEVICES=0 LOGDIR=. python -u example_trainer/grpo.py \\
    --model-name models/policy \\
    --weight-bridge-mode shared_vllm \\
    --training-steps {steps} {more} --lr 5e-4 --vllm-port {vllm} --atropos-url http://localhost:{api} \\
    2>&1 | tee trainer.log""",
    "lora_only": """CUDA_VISIBLE_DEVICES={gpu} python -u example_trainer/grpo.py \\
    --model-name models/policy \\
    --weight-bridge-mode lora_only \\
    --vllm-port {vllm} \\
    --lora-r 16 \\
    --lora-alpha 32 \\
    --training-steps {steps} {more} --atropos-url http://localhost:{api} \\
    --lr 5e-3 \\
    --save-path $LOGDIR/checkpoints_lora \\
    --benchmark \\
    2>&1 | tee $LOGDIR/trainer.log""",
    "none": """export LOGDIR=$PWD
CUDA_VISIBLE_DEVICES=0 python -u example_trainer/grpo.py \\
    --model-name models/policy \\
    --weight-bridge-mode none \\
    --vllm-port {vllm} \\
    --training-steps {steps} {more} --atropos-url http://localhost:{api} \\
    --vllm-restart-interval {interval} \\
    --lr 5e-4 \\
    --save-path $LOGDIR/checkpoints_legacy \\
    --benchmark \\
    2>&1 | tee $LOGDIR/trainer.log""",
}
SAVED = {"shared_vllm": "trained_model_checkpoints", "lora_only": "checkpoints_lora", "none": "checkpoints_legacy"}


def lines_of(mode: str, steps: int) -> list[str]:
    """What the guide greps for in the trainer's log."""
    ours = {
        "shared_vllm": [
            "[Setup] ✓ Attached 24 tensors to vLLM's shared memory",
            "[Setup] ✓ Single-copy mode active - using vLLM's tensors directly!",
            f"[2/2] Starting training for {steps} steps",
            f"[SINGLE-COPY] Weights updated in-place - step {steps}",
        ],
        "lora_only": ["LORA MODE (adapter-only training)", "BENCHMARK SUMMARY (lora_only)"],
        "none": ["LEGACY MODE (checkpoint + vLLM restart)", "BENCHMARK SUMMARY (none)"],
    }
    return [*ours[mode], f"Step 1/{steps}", f"Step {steps}/{steps}", "Training finished."]


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    path = f"{ATROPOS}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **more, "PYTHONUNBUFFERED": "1", "PATH": path}


def make_model(folder: Path) -> Path:
    """The folder with `models/policy` and `data/train.jsonl`."""
    if MODEL is not None:
        return Path(MODEL).absolute()
    made = [sys.executable, str(ROOT / "examples/atropos/make_model.py"), "--num-threads", "1"]
    done = subprocess.run(made, cwd=folder, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


class Guide:
    """One mode of the guide, in a folder of its own.

    Args:
        made: the folder of `make_model`.
        more: flags of the trainer beside the guide's; server: those of its vLLM.
        trainer_gpu: of lora_only, whose vLLM has GPU 0.
    """

    def __init__(
        self,
        mode: str,
        folder: Path,
        made: Path,
        *,
        steps: int,
        interval: int = 6,
        more: str = "",
        server: str = "",
        trainer_gpu: int = 1,
    ):
        self.mode, self.folder, self.steps = mode, folder, steps
        self.began, self.seconds = time.monotonic(), dict[str, float]()
        shutil.copytree(ROOT / "examples/atropos", folder, dirs_exist_ok=True)
        for name in ("models", "data"):
            shutil.copytree(made / name, folder / name)
        self._values: dict[str, Any] = {"vllm": free_port(), "api": free_port(), "steps": steps, "interval": interval}
        self._values |= {"more": f"{SIZES} {more}".strip(), "server": server, "gpu": trainer_gpu}
        self._bash = list[subprocess.Popen[str]]()
        self.terminal = self.open_terminal()

    def open_terminal(self) -> subprocess.Popen[str]:
        """One more bash in the folder; what it prints is in the logs."""
        more: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
        self._bash.append(
            subprocess.Popen(["bash"], cwd=self.folder, env=environment(), start_new_session=True, **more)
        )
        return self._bash[-1]

    def type_in(self, text: str, terminal: subprocess.Popen[str] | None = None) -> None:
        into = (terminal or self.terminal).stdin
        assert into is not None
        into.write(text.format(**self._values) + "\n")
        into.flush()

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace") if (self.folder / name).exists() else ""

    def wait_for(self, happens: Callable[[], bool], seconds: float, what: str) -> None:
        """Raises AssertionError with the ends of the logs."""
        deadline = time.monotonic() + seconds
        while not happens():
            logs = "\n".join(f"== {path.name}\n{self.read(path.name)[-2000:]}" for path in self.folder.glob("*.log"))
            assert time.monotonic() < deadline and not self.failed(), f"{self.mode}, not in time: {what}\n{logs}"
            time.sleep(0.5)
        self.seconds[what] = time.monotonic() - self.began

    def failed(self) -> bool:
        """Whether vLLM has ended, or the trainer before its last step."""
        log = self.read("trainer.log")
        ended = log.endswith("ended\n") and "Training finished." not in log
        return ended or self.read("vllm.log").endswith("ended\n")

    def start_server(self, seconds: float) -> None:
        """The API, and vLLM in the modes that have one."""
        server = {"shared_vllm": SINGLE_COPY, "lora_only": LORA, "none": ""}[self.mode]
        self.type_in(f"{API}\n{server}\n{TELL if server else ''}")
        self.wait_for(lambda: "Uvicorn running on" in self.read("api.log"), seconds, "the API runs")
        if server:
            up = f"Uvicorn running on http://127.0.0.1:{self._values['vllm']}"
            self.wait_for(lambda: up in self.read("vllm.log"), seconds, "vLLM runs")
        if self.mode == "shared_vllm":
            assert "Exported 18 params to" in self.read("vllm.log")
            assert (self.folder / "vllm_bridge_config.json").is_file()

    def start_environment(self, terminal: subprocess.Popen[str] | None = None) -> None:
        self.type_in(ENVIRONMENT, terminal)

    def start_trainer(self) -> None:
        self.type_in(TRAINERS[self.mode] + "\necho ended >> trainer.log")

    def wait_for_end(self, seconds: float) -> None:
        self.wait_for(lambda: self.read("trainer.log").endswith("ended\n"), seconds, "the trainer ends")

    def end(self) -> None:
        """End all that was typed in."""
        for number, wait in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 0.0)):
            for bash in self._bash:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(bash.pid, number)
            time.sleep(wait)
        for bash in self._bash:
            bash.wait()

    @property
    def save(self) -> Path:
        return self.folder / SAVED[self.mode]

    @property
    def rows(self) -> list[dict[str, float]]:
        """The metrics of the steps."""
        path = self.save / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [row for row in rows if "train/loss" in row]

    @property
    def scores(self) -> list[float]:
        return [row["rollout/reward_mean"] for row in self.rows]

    def check(self) -> None:
        """What the guide says was printed; each step was trained; what is left loads, and has moved."""
        log, save = self.read("trainer.log"), self.save
        for line in lines_of(self.mode, self.steps):
            assert line in log, f"{line}\n{log[-3000:]}"
        assert len(self.rows) == self.steps
        assert all(math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0 for row in self.rows)
        if self.mode == "lora_only":
            assert (save / f"adapter_step_{self.steps}/adapter_config.json").is_file()
            moved = load_file(save / "final_adapter/adapter_model.safetensors")
            assert any(bool(tensor.any()) for name, tensor in moved.items() if "lora_B" in name)
        else:
            folders = self.folder / "models/policy", save / f"step_{self.steps}"
            before, after = (load_file(folder / "model.safetensors") for folder in folders)
            assert before.keys() == after.keys() and (save / "final_model/tokenizer.json").is_file()
            assert any(not before[name].to(after[name].dtype).equal(after[name]) for name in before)

    def check_scores(self) -> None:
        """They rise."""
        scores = self.scores
        assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.05, scores
