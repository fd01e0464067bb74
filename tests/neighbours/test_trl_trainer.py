"""TRL's own `GRPOTrainer`, unmodified, trains the quickstart's task to the same reward in four ways.

TRL 1.10 and 1.16 generate with transformers, in their own process; the same trainers with `use_vllm=True,
vllm_mode="server"` on `instep vllm-serve`; and `instep.train` is called with the same fields of `GRPOConfig`. All begin
with the quickstart's SFT checkpoint, and train as many steps on as many samples; of each, the mean reward of the last
five steps is compared, over 1280 samples.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from instep.system.ports import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS, LAST = 20, 5
CLOSE = 0.05  # runs with other samples differ by up to 0.03
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
TRLS = ("1.10", "1.16")
each_trl = pytest.mark.parametrize("trl", TRLS)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_quickstart(tmp_path_factory.mktemp("quickstart"))


def made_quickstart(out: Path, device: str = "cpu", sft: bool = True) -> Path:
    """A folder with `sft/hf`, the checkpoint to begin with, and `task/train.jsonl`; without `sft` only the latter."""
    code = (
        "import subprocess, sys; sys.path.insert(0, 'examples/quickstart'); import run\n"
        "words = ['--out', sys.argv[1], '--num-threads', '1', '--device', sys.argv[2]]\n"
        f"for _, command in run.stages(run.settings(words))[:{1 + sft}]:\n"
        "    subprocess.run(command, check=True)"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(out), device], cwd=ROOT, env=ENVIRONMENT | ours(), check=True, timeout=600
    )
    return out


def ours() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def python_of(trl: str) -> str:
    """The interpreter of a TRL's environment."""
    path = ROOT / f".venv-trl-{trl}/bin/python"
    if not path.exists():
        pytest.skip(f"{path.parent.parent.name} is not there: make test-neighbours makes it")
    return str(path)


def trained(
    python: str, script: str, quickstart: Path, out: Path, *more: str, steps: int = STEPS, **environment: str
) -> dict[str, Any]:
    """What a script wrote that has trained."""
    out.parent.mkdir(parents=True, exist_ok=True)
    words = [python, str(HERE / script), "--model", str(quickstart / "sft/hf"), "--steps", str(steps)]
    words += ["--data", str(quickstart / "task/train.jsonl"), "--out", str(out), *more]
    with (out.parent / "log.txt").open("w") as log:
        done = subprocess.run(words, env=ENVIRONMENT | environment, cwd=ROOT, stdout=log, stderr=log, timeout=900)
    assert done.returncode == 0, (out.parent / "log.txt").read_text()[-4000:]
    found = json.loads(out.read_text())
    assert len(found["steps"]) == steps
    return found


def rewards(found: dict[str, Any]) -> list[float]:
    return [step["reward"] for step in found["steps"]]


def at_last(found: dict[str, Any]) -> float:
    return sum(rewards(found)[-LAST:]) / LAST


@pytest.fixture(scope="module")
def by_itself(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a version of TRL: what it trains without a server, once."""

    @cache
    def train(trl: str) -> dict[str, Any]:
        out = tmp_path_factory.mktemp(f"own-{trl}") / "steps.json"
        return trained(python_of(trl), "trl_train.py", quickstart, out, PYTHONPATH=str(HERE / "stub_vllm"))

    return train


@contextmanager
def server(
    model: Path, folder: Path, *more: str, engine: str = "embedded", device: str = "cpu", **environment: str
) -> Iterator[int]:
    """The port of an `instep vllm-serve`, which is ended by SIGTERM, and then has left nothing running."""
    port = free_port()
    words = [sys.executable, "-m", "instep.cli", "vllm-serve", "--model", str(model), "--port", str(port)]
    words += ["--rollout-backend", engine, "--device", device, "--run-dir", str(folder), "--num-threads", "1", *more]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.txt").open("w") as log:
        process = subprocess.Popen(words, env=ENVIRONMENT | ours() | environment, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
    assert code == 0, (folder / "server.txt").read_text()[-4000:]


@each_trl
def test_trl_trains_by_itself(trl: str, by_itself: Any) -> None:
    """The baseline: the task is learned."""
    found = by_itself(trl)
    assert found["versions"]["trl"].startswith(trl)
    assert rewards(found)[0] < 0.5 and at_last(found) > 0.85


@each_trl
def test_trls_trainer_on_our_server_learns_as_by_itself(
    trl: str, by_itself: Any, quickstart: Path, tmp_path: Path
) -> None:
    with server(quickstart / "sft/hf", tmp_path / "server") as port:
        more = ["--server", f"http://127.0.0.1:{port}", "--group-port", str(free_port())]
        stub = {"PYTHONPATH": str(HERE / "stub_vllm")}
        found = trained(python_of(trl), "trl_train.py", quickstart, tmp_path / "trl/steps.json", *more, **stub)
    assert at_last(found) == pytest.approx(at_last(by_itself(trl)), abs=CLOSE)
    # The weights that generate are those that train: engine and trainer give the sampled tokens the same log-probs.
    gaps = [step["sampling/sampling_logp_difference/mean"] for step in found["steps"]]
    assert len(gaps) == STEPS and max(gaps) < 1e-4


@pytest.mark.vllm
def test_trls_trainer_on_our_server_over_vllm(quickstart: Path, tmp_path: Path) -> None:
    """Four steps, each with the weights of the step before."""
    with server(quickstart / "sft/hf", tmp_path / "server", engine="vllm") as port:
        more = ["--server", f"http://127.0.0.1:{port}", "--group-port", str(free_port()), "--prompts", "8"]
        stub = {"PYTHONPATH": str(HERE / "stub_vllm")}
        out = tmp_path / "trl/steps.json"
        found = trained(python_of("1.16"), "trl_train.py", quickstart, out, *more, steps=4, **stub)
    assert max(step["sampling/sampling_logp_difference/mean"] for step in found["steps"]) < 1e-4
    assert min(step["grad_norm"] for step in found["steps"]) > 0.01


@pytest.mark.parametrize("how", ["keywords", "config"])
def test_instep_trains_the_same_from_the_fields_of_grpo_config(
    how: str, by_itself: Any, quickstart: Path, tmp_path: Path
) -> None:
    more = ["--config"] if how == "config" else []
    python = python_of("1.16") if how == "config" else sys.executable  # which has a GRPOConfig to give
    found = trained(python, "instep_train.py", quickstart, tmp_path / "steps.json", *more, **ours())
    assert at_last(found) == pytest.approx(at_last(by_itself("1.16")), abs=CLOSE)
    assert found["summary"]["num_steps"] == STEPS
