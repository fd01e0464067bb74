"""TRL's own trainer and its real weight group: NCCL, from the first GPU to `instep vllm-serve` on the second one.

    pytest -m gpu -s tests/gpu/test_trl.py

TRL and vLLM are those that this Python imports: on a GPU host TRL 1.16 and vLLM 0.26 (scripts/gpu_session.sh).
INSTEP_TEST_ON_CPU=1 tries all but NCCL without a GPU, with .venv-trl-1.16 and the stand-in for vLLM.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

from instep.system.ports import free_port
from tests.neighbours.test_trl_trainer import HERE, at_last, made_quickstart, python_of, rewards, server, trained

CPU = bool(os.environ.get("INSTEP_TEST_ON_CPU"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2 and not CPU, reason="needs two GPUs"),
    pytest.mark.skipif(not CPU and importlib.util.find_spec("trl") is None, reason="TRL is not installed here"),
]


def test_trls_trainer_sends_its_weights_by_nccl(tmp_path: Path) -> None:
    """Its rewards rise only if the server generates with what it has learned."""
    made = made_quickstart(tmp_path / "quickstart", "cpu" if CPU else "cuda", sft=not CPU)
    if CPU:  # a model that has learned nothing does: minutes less
        (made / "sft").mkdir()
        (made / "sft/hf").symlink_to(made / "task/hf")
    flags = [] if CPU else "--enforce_eager True --gpu_memory_utilization 0.3".split()
    engine, device = ("embedded", "cpu") if CPU else ("vllm", "cuda")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environment = {"CUDA_VISIBLE_DEVICES": gpus[0], "VLLM_HOST_IP": "127.0.0.1"}
    environment["PYTHONPATH"] = str(HERE / "stub_vllm") if CPU else os.environ.get("PYTHONPATH", "")
    where = {"engine": engine, "device": device, "CUDA_VISIBLE_DEVICES": gpus[1] if not CPU else ""}
    with server(made / "sft/hf", tmp_path / "server", *flags, **where) as port:
        more = ["--server", f"http://127.0.0.1:{port}", "--group-port", str(free_port())]
        more += ["--prompts", "8"] if CPU else ["--cuda"]
        python, out = python_of("1.16") if CPU else sys.executable, tmp_path / "trl/steps.json"
        found = trained(python, "trl_train.py", made, out, *more, steps=3 if CPU else 20, **environment)
    gaps = [step["sampling/sampling_logp_difference/mean"] for step in found["steps"]]
    seconds = sorted(step["seconds"] for step in found["steps"])
    print(f"\n{found['versions']}; rewards {' '.join(f'{r:.2f}' for r in rewards(found))}")
    print(f"gaps of log-probs up to {max(gaps):.1e}; a step {seconds[len(seconds) // 2]:.2f} s")
    told = (tmp_path / "server/server.txt").read_text()
    assert f"version {len(gaps)}: " in told, told
    if CPU:
        assert max(gaps) < 1e-4
    else:
        assert at_last(found) > 0.8 > rewards(found)[0] + 0.2
        assert max(gaps) < 0.05  # of an engine in bfloat16
