"""Atropos' own environments and API server, unmodified, with instep's engines, API and trainer, in all combinations.

The environment is `atropos_env.py`, a `BaseEnv` on the quickstart's task, begun by Atropos' own command line. Runs
begin with the quickstart's SFT checkpoint, whose mean score is 0.37, and train 16 steps on 128 sequences.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from instep.system.ports import free_port
from tests.assets import make_checkpoint, make_prompts
from tests.atropos import REGISTRATION, Client, group, serving
from tests.e2e.test_atropos import outlives_its_api

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".venv-atropos/bin/python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=".venv-atropos is not there: make test-neighbours makes it")
THEIRS = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
OURS = THEIRS | {"PYTHONPATH": str(ROOT)}
INSTEP = [sys.executable, "-m", "instep.cli"]
ATROPOS = "instep_neighbours.atropos"
STEPS = 16


@contextmanager
def program(words: list[Any], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A running program, which is ended."""
    with open(log, "ab") as out:
        process = subprocess.Popen([str(word) for word in words], env=environment, stdout=out, stderr=out, cwd=ROOT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def api_server(kind: str, port: int) -> tuple[list[Any], dict[str, str]]:
    """The command of Atropos' own API server, or of instep's, and its environment."""
    if kind == "atropos":
        return [PYTHON, "-m", "atroposlib.cli.run_api", "--port", port], THEIRS
    return [*INSTEP, "env-api", "--port", port], OURS


def until(what: Callable[[], Any], process: subprocess.Popen[bytes], seconds: float = 240.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if found := what():
                return found
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"it ended with {process.poll()}, or took too long")


# ---- the API ---------------------------------------------------------------------------------------------------------


def test_batches_and_answers_are_those_of_atropos_own_server(tmp_path: Path) -> None:
    """Random groups of three environments: the same answers, and the same batches, ours in the order of cutting."""
    port, rng, num_batches = free_port(), random.Random(0), 0
    words, environment = api_server("atropos", port)
    with program(words, tmp_path / "api.log", environment) as process:
        theirs = Client(f"http://127.0.0.1:{port}")
        until(lambda: theirs.get("/"), process)
        for _ in range(60):
            with serving(max_bytes=1 << 26) as ours:
                theirs.get("/reset_data")
                num_batches += same_answers(rng, ours, theirs)
    assert num_batches > 100


def same_answers(rng: random.Random, ours: Client, theirs: Client) -> int:
    """One session with both servers; the number of its batches."""
    first, num_batches = 100, 0

    def both(method: str, path: str, body: Any = None) -> Any:
        found = [client.ask(method, path, body) for client in (ours, theirs)]
        assert found[0] == found[1], (method, path, body)
        return found[0]

    batch_size = rng.choice([8, 16])
    for client in (ours, theirs):
        client.register(batch_size=batch_size)
    both("POST", "/scored_data", group(8, None, 99))  # theirs knows the latest of an earlier session
    shares = rng.choice([[None] * 3, [0.5, None, 0.25], [0.25, 0.5, None], [0.8, 0.8, None]])
    sizes = [rng.choice([1, 2, 4, 8]) for _ in shares]
    for size, share in zip(sizes, shares, strict=True):
        body = {"max_token_length": rng.choice([32, 64]), "desired_name": "e", "weight": rng.choice([0.5, 1.0, 3.0])}
        both("POST", "/register-env", {**body, "group_size": size, "min_batch_allocation": share})
    for _ in range(rng.randrange(10, 60)):
        env, first = rng.randrange(3), first + 3
        if (what := rng.randrange(13)) < 8:
            size = sizes[env] if rng.random() < 0.7 else rng.choice([1, 2, 3, 4, 8])
            both("POST", "/scored_data", group(size, rng.choice([env, env, env, None]), first))
        elif what == 8:
            both("POST", "/scored_data_list", [group(rng.choice([1, 2, 4]), env, first + i) for i in range(3)])
        elif what == 9:
            both("GET", "/status-env", {"env_id": env})
        elif what == 10:
            both("GET", "/latest_example")
            both("POST", "/disconnect-env", {"env_id": 2})
        else:
            batches = ours.batches()
            assert batches == theirs.batches()[::-1]
            num_batches += len(batches)
            both("GET", "/status")
    return num_batches


def test_a_run_outlives_the_restart_of_atropos_own_server(tmp_path: Path) -> None:
    """What waited in it is lost with it; the trainer registers again, and so do environments that start again."""
    make_checkpoint(tmp_path / "hf")
    make_prompts(tmp_path / "train.jsonl", 64)

    def serve(port: int) -> subprocess.Popen[bytes]:
        words, environment = api_server("atropos", port)
        with open(tmp_path / "api.log", "ab") as out:
            return subprocess.Popen([str(word) for word in words], env=environment, stdout=out, stderr=out)

    outlives_its_api(tmp_path, tmp_path, serve).wait(60)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `sft/hf`, the checkpoint to begin with, and `task/train.jsonl`."""
    out = tmp_path_factory.mktemp("quickstart")
    code = (
        "import subprocess, sys; sys.path.insert(0, 'examples/quickstart'); import run\n"
        "for _, command in run.stages(run.settings(['--out', sys.argv[1], '--num-threads', '1']))[:2]:\n"
        "    subprocess.run(command, check=True)"
    )
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=ROOT, env=OURS, check=True, timeout=600)
    return out


def train_words(quickstart: Path, run_dir: Path, api_port: int, engine_port: int, steps: int = STEPS) -> list[Any]:
    """The command of a run."""
    words = [*INSTEP, "train", "--hf-checkpoint", quickstart / "sft/hf", "--run-dir", run_dir, "--num-rollout", steps]
    words += ["--rollout-function-path", f"{ATROPOS}.generate_rollout", "--disable-rollout-global-dataset"]
    words += ["--custom-reward-post-process-path", f"{ATROPOS}.normalized_scores", "--pause-mode", "keep"]
    words += ["--atropos-url", f"http://localhost:{api_port}", "--engine-port", engine_port, "--atropos-timeout", 200]
    words += "--rollout-batch-size 16 --n-samples-per-prompt 8 --rollout-max-response-len 64".split()
    words += "--lr 5e-4 --lr-decay-style constant --lr-warmup-iters 3 --weight-decay 0 --adam-beta2 0.98".split()
    words += "--train-backend hf --actor-num-gpus-per-node 1 --num-threads 1 --device cpu".split()
    return [*words, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"]


def env_words(quickstart: Path, api_port: int, url: str, key: str, server_type: str, *more: str) -> list[Any]:
    """The command of an environment, with Atropos' own flags."""
    words = [PYTHON, HERE / "atropos_env.py", "serve", "--env.data_path", quickstart / "task/train.jsonl"]
    words += ["--env.tokenizer_name", quickstart / "sft/hf", "--env.rollout_server_url", f"http://localhost:{api_port}"]
    words += ["--openai.server_type", server_type, "--openai.base_url", f"{url}/v1", "--openai.api_key", key]
    words += ["--openai.model_name", quickstart / "sft/hf", "--env.ensure_scores_are_not_same", "false"]
    return [*words, "--env.use_wandb", "false", *more]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "rollout/reward_mean" in row]  # not those of checkpoints


def trained(
    tmp_path: Path,
    quickstart: Path,
    api: str,
    environments: list[tuple[str, list[str]]],
    *more: str,
    steps: int = STEPS,
) -> list[dict[str, Any]]:
    """The metrics of a run that these environments have fed, each a server_type and more flags."""
    api_port, engine_port, run_dir = free_port(), free_port(), tmp_path / "run"
    log = tmp_path / "run.log"
    with ExitStack() as stack:
        words, environment = api_server(api, api_port)
        stack.enter_context(program(words, tmp_path / "api.log", environment))
        words = [*train_words(quickstart, run_dir, api_port, engine_port, steps), *more]
        run = stack.enter_context(program(words, log, OURS))
        try:
            key = until(lambda: (run_dir / "api_key").exists() and (run_dir / "api_key").read_text().strip(), run)
            for number, (server_type, flags) in enumerate(environments):
                words = env_words(quickstart, api_port, f"http://localhost:{engine_port}", key, server_type, *flags)
                stack.enter_context(program(words, tmp_path / f"env{number}.log", THEIRS))
            code = run.wait(420)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise AssertionError(log.read_text()[-3000:]) from error
        assert code == 0, log.read_text()[-3000:]
    rows = rows_of(run_dir)
    assert len(rows) == steps
    return rows


@pytest.mark.parametrize("server_type", ["vllm", "openai"])
@pytest.mark.parametrize("api", ["atropos", "instep"])
def test_an_environment_trains_the_model(tmp_path: Path, quickstart: Path, api: str, server_type: str) -> None:
    rows = trained(tmp_path, quickstart, api, [(server_type, [])])
    scores = [row["rollout/reward_mean"] for row in rows]
    assert scores[0] < 0.55 and sum(scores[-3:]) / 3 > 0.8, scores
    if server_type == "vllm":  # tokens and log-probs are the engine's own: those of the first step fit the weights
        assert abs(rows[0]["train/ppo_kl"]) < 1e-5


def test_an_environment_asks_vllm(tmp_path: Path, quickstart: Path) -> None:
    more = ["--rollout-backend", "vllm", "--vllm-kv-cache-memory-bytes", str(256 << 20)]
    rows = trained(tmp_path, quickstart, "instep", [("vllm", [])], *more)
    scores = [row["rollout/reward_mean"] for row in rows]
    assert scores[0] < 0.55 and sum(scores[-3:]) / 3 > 0.8, scores
    assert abs(rows[0]["train/ppo_kl"]) < 1e-4


def test_several_environments_with_weights_and_turns(tmp_path: Path, quickstart: Path) -> None:
    """One has groups of another size, asks twice, and is due a quarter of each batch: of that it gets what is there.

    That is a pack of two groups at least (`grab_batch_with_minimum_allocations` of Atropos).
    """
    twice = ["--env.two_turns", "true", "--env.group_size", "4", "--env.min_batch_allocation", "0.25"]
    twice += ["--env.max_token_length", "200", "--env.score_offset", "0.5", "--env.inference_weight", "0.5"]
    rows = trained(tmp_path, quickstart, "instep", [("vllm", []), ("vllm", twice)], steps=6)
    shares = {name: value for row in rows for name, value in row.items() if name.endswith("_share")}
    assert set(shares) == {"atropos/env_0_share", "atropos/env_1_share"}
    both = [row for row in rows if len([name for name in row if name.endswith("_share")]) == 2]
    smallest = min(min(row[name] for name in shares) for row in both)
    assert len(both) >= 4 and smallest >= 2 * 4 / 128, rows
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    turns = [s for s in samples if "Are you sure?" in s["response"]]
    assert turns
    for sample in turns:  # the second prompt lies between two trained stretches, and is not trained on
        parts = zip(sample["tokens"]["texts"], sample["tokens"]["loss_mask"], strict=True)
        stretches = "".join(text if mask else "\0" for text, mask in parts).split("\0")
        assert "sure" not in "".join(stretches) and len([part for part in stretches if part]) == 2


def test_a_run_resumes_while_its_environment_goes_on(tmp_path: Path, quickstart: Path) -> None:
    """Four rollouts of `instep train-async`, and four more of a second process: no number of a group twice."""
    api_port, engine_port, run_dir = free_port(), free_port(), tmp_path / "run"
    folder = [tmp_path / "checkpoints"]
    with ExitStack() as stack:
        api = stack.enter_context(program(api_server("instep", api_port)[0], tmp_path / "api.log", OURS))
        until(lambda: Client(f"http://localhost:{api_port}").get("/"), api)
        words = env_words(quickstart, api_port, f"http://localhost:{engine_port}", "none", "vllm")
        env = stack.enter_context(program([*words, "--env.total_steps", "1000"], tmp_path / "env.log", THEIRS))
        for steps in (4, 8):
            words = train_words(quickstart, run_dir, api_port, engine_port, steps)
            words[words.index("train")] = "train-async"
            words += ["--no-api-key", "--save", *folder, "--load", *folder, "--save-interval", 2]
            run = stack.enter_context(program(words, tmp_path / f"run{steps}.log", OURS))
            assert run.wait(240) == 0, (tmp_path / f"run{steps}.log").read_text()[-3000:]
        assert env.poll() is None
    assert [row["step"] for row in rows_of(run_dir)] == list(range(8))
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    rounds = {s["group_index"]: s["rollout_id"] for s in samples}
    assert all(16 * r <= g < 16 * (r + 1) for g, r in rounds.items()) and set(rounds.values()) == set(range(8))


def test_an_environment_asks_instep_serve_and_feeds_a_trainer_elsewhere(tmp_path: Path, quickstart: Path) -> None:
    """Two engines behind a router and the port of `instep serve`; the batches go to a client of the API."""
    api_port, port, run_dir = free_port(), free_port(), tmp_path / "serve"
    words = [*INSTEP, "serve", "--hf-checkpoint", quickstart / "sft/hf", "--port", port, "--run-dir", run_dir]
    words += "--rollout-num-gpus 2 --num-threads 1 --device cpu".split()
    with ExitStack() as stack:
        api = stack.enter_context(program(api_server("instep", api_port)[0], tmp_path / "api.log", OURS))
        trainer = Client(f"http://localhost:{api_port}")
        until(lambda: trainer.get("/"), api)
        server = stack.enter_context(program(words, tmp_path / "serve.log", OURS))
        key = until(lambda: (run_dir / "api_key").exists() and (run_dir / "api_key").read_text().strip(), server)
        trainer.post("/register", {**REGISTRATION, "batch_size": 32, "max_token_len": 200})
        words = env_words(quickstart, api_port, f"http://localhost:{port}", key, "vllm")
        env = stack.enter_context(program(words, tmp_path / "env.log", THEIRS))
        batch = until(lambda: trainer.get("/batch")["batch"], env, 120)
    assert sum(len(g["tokens"]) for g in batch) == 32
    assert all(value < 0 for g in batch for row in g["inference_logprobs"] for value in row if value != 1.0)
