"""A run that is fed through `instep env-api`, by a client that asks the run's engine as Atropos' environments do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.system.ports import free_port
from tests.atropos import Client
from tests.documented import undocumented
from tests.e2e.commands import ENVIRONMENT, grpo_arguments, start

Api = subprocess.Popen[bytes]
GROUP, GROUPS = 4, 4  # of a batch
PROMPTS = [[5, 6, 7 + i] for i in range(GROUPS)]


def env_api(port: int, output: Path) -> Api:
    command = [sys.executable, "-m", "instep.cli", "env-api", "--port", str(port)]
    with open(output, "ab") as file:
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=file, stderr=file)


def until(what: Any, run: subprocess.Popen[str], seconds: float = 300.0) -> Any:
    """The first true value of `what()`; an API that is down is asked again."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and run.poll() is None:
        try:
            if found := what():
                return found
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.1)
    raise AssertionError(run.communicate()[1] if run.poll() is not None else "it took too long")


def rollout(engine: Client, env_id: int, prompt: list[int], scores: list[float]) -> dict[str, Any]:
    """A group of the engine's own tokens and log-probs; the last token of each response is not trained on."""
    body = {"prompt": {"prompt_token_ids": prompt}, "logprobs": 0, "n": GROUP, "max_tokens": 6, "temperature": 0.8}
    answer = engine.post("/generate", body)
    tokens = [prompt + ids for ids in answer["token_ids"]]
    known = [[1.0] * 3 + [next(iter(entry.values())) for (entry,) in rows] for rows in answer["logprobs"]]
    masks = [[-100] * 3 + ids[3:-1] + [-100 if len(ids) > 4 else ids[-1]] for ids in tokens]
    out = {"tokens": tokens, "masks": masks, "scores": scores, "inference_logprobs": known, "env_id": env_id}
    return {**out, "generation_params": {"temperature": 0.8}, "group_overrides": {}, "images": [], "overrides": []}


def test_a_run_is_fed_and_outlives_the_api(tiny, tmp_path):
    api = outlives_its_api(tiny, tmp_path, lambda port: env_api(port, tmp_path / "api.log"))
    assert api.wait(60) == 0 and "0 groups were not requested" in (tmp_path / "api.log").read_text()


def outlives_its_api(tiny: Path, tmp_path: Path, serve: Callable[[int], Api]) -> Api:
    """A run of two rollouts, between which the API that `serve` starts is killed and started anew; the API, ended."""
    port, engine_port, run_dir = free_port(), free_port(), tmp_path / "run"
    api, client = serve(port), Client(f"http://127.0.0.1:{port}")
    more = [
        "--rollout-function-path",
        "instep_neighbours.atropos.generate_rollout",
        "--disable-rollout-global-dataset",
    ]
    more += ["--custom-reward-post-process-path", "instep_neighbours.atropos.normalized_scores", "--no-api-key"]
    more += ["--atropos-url", client.url, "--pause-mode", "keep", "--engine-port", str(engine_port)]
    run = start(grpo_arguments(tiny, run_dir, *more, "--rollout-batch-size", str(GROUPS), "--rm-type", "random"))
    metrics = run_dir / "metrics.jsonl"
    body = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": GROUP}
    try:
        until(lambda: client.post("/register-env", body)["status"] == "success", run)
        engine = Client(f"http://127.0.0.1:{engine_port}")
        sent = [rollout(engine, 0, prompt, [1.0, 0.0, 0.5, 0.0]) for prompt in PROMPTS]
        assert client.post_gzip("/scored_data_list", sent)["groups_processed"] == GROUPS
        until(lambda: metrics.exists() and metrics.read_text().count("\n"), run)
        api.kill()
        api.wait(60)
        time.sleep(1.5)  # the trainer asks meanwhile
        api = serve(port)
        until(lambda: client.get("/status")["current_step"] == 1, run)  # the trainer has registered again
        until(lambda: client.post("/register-env", body)["status"] == "success", run)
        for prompt in PROMPTS:
            assert client.post("/scored_data", rollout(engine, 0, prompt, [0.0, 0.0, 1.0, 0.0])) == {
                "status": "received"
            }
        output = run.communicate(timeout=300)
    finally:
        for process, number in ((run, signal.SIGTERM), (api, signal.SIGTERM)):
            if process.poll() is None:
                process.send_signal(number)
    assert run.returncode == 0, output[1]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["rollout/reward_mean"] for row in rows] == [0.375, 0.25] and undocumented(set(rows[0])) == set()
    assert abs(rows[0]["train/ppo_kl"]) < 1e-5  # tokens, log-probs and temperature fit: the weights were the same
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    kept = [sample for sample in samples if sample["rollout_id"] == 0]
    trained = {tuple(ids) for group in sent for ids in group["tokens"]}
    assert kept and {tuple(PROMPTS[s["group_index"]] + s["tokens"]["ids"]) for s in kept} <= trained
    assert sorted({s["group_index"] for s in samples}) == list(range(2 * GROUPS))
    return api
