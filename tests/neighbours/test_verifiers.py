"""Environments of the real `verifiers`, which runs in .venv-verifiers, against our engines and our trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import psutil
import pytest
import torch

from instep.arguments.parse import parse
from instep.errors import ConfigError, EngineError, InstepError, RolloutError
from instep.rollout import runtime
from instep.rollout.outputs import as_train_output
from instep.types import Sample
from instep_neighbours.verifiers import Tasks, generate_rollout
from tests import keys
from tests.assets import make_checkpoint
from tests.bounds import allowed
from tests.chat import make_tokenizer
from tests.e2e.commands import ENVIRONMENT, children, gone_within, run, start
from tests.engines import rollouts

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-verifiers" / "bin" / "python"
TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make test-neighbours NEIGHBOURS=verifiers makes it")


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    path = os.pathsep.join([str(HERE / "verifiers_environments"), *sys.path])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", path)
    yield
    runtime.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with single characters, whose template adds to a conversation and changes nothing of it."""
    return make_checkpoint(tmp_path_factory.mktemp("characters") / "hf", head_dim=32, max_len=512)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the special tokens that Qwen3's renderer asks for."""
    folder = make_checkpoint(tmp_path_factory.mktemp("qwen") / "hf", head_dim=32, max_len=512, vocab_size=512)
    make_tokenizer(TOKENS).save_pretrained(folder)
    return folder


def flags(model: Path, run_dir: Path, *more: str, **taskset: Any) -> list[str]:
    """A small run in the environment `vowels`: 2 rollouts of 4 tasks x 4 episodes. Later flags win."""
    own = {"taskset": taskset, "agent": {"runtime": {"type": "subprocess"}}}
    words = f"train --hf-checkpoint {model} --env vowels --env-python {PYTHON} --rollout-batch-size 4"
    words += " --n-samples-per-prompt 4 --rollout-max-response-len 12 --num-rollout 2 --lr 1e-3"
    words += " --lr-decay-style constant --train-backend hf --actor-num-gpus-per-node 1 --num-threads 1 --device cpu"
    words += " --rollout-timeout 60 --rollout-function-path instep_neighbours.verifiers.generate_rollout"
    return [*words.split(), "--run-dir", str(run_dir), "--env-args", json.dumps(own), *more]


def metrics(run_dir: Path, name: str) -> list[float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def task_order(run_dir: Path) -> list[list[int]]:
    """The tasks of each rollout that was dumped, in order."""
    dumps = [torch.load(path, weights_only=False) for path in sorted(run_dir.glob("dump-*.pt"))]
    groups = [dict.fromkeys((s["group_index"], s["metadata"]["task"]["idx"]) for s in d["samples"]) for d in dumps]
    return [[task for _, task in sorted(group)] for group in groups]


# ---- whole runs ------------------------------------------------------------------------------------------------------


def test_a_run_learns_a_single_turn(model: Path, tmp_path: Path) -> None:
    more = ["--num-rollout", "12", "--n-samples-per-prompt", "8", "--lr", "4e-3", "--eval-interval", "12"]
    done = run(flags(model, tmp_path, *more, "--env-eval-args", '{"select": {"limit": 2}}'), timeout=600)
    assert done.returncode == 0, done.stderr
    rewards = metrics(tmp_path, "rollout/env/rewards/vowels")
    assert sum(rewards[-3:]) / 3 > 2 * sum(rewards[:3]) / 3
    assert max(metrics(tmp_path, "train/log_prob_gap_max")) < 1e-4
    assert metrics(tmp_path, "rollout/reward_mean") == pytest.approx(rewards)
    assert metrics(tmp_path, "rollout/env/num_turns") == [1.0] * 12
    assert len(metrics(tmp_path, "eval/vowels/num_turns")) == 2


def test_several_turns_and_a_resume(model: Path, tmp_path: Path) -> None:
    """Turns of several servers become samples; a run that goes on takes the tasks that are next."""
    more = ["--env-num-servers", "2", "--over-sampling-batch-size", "6", "--save", str(tmp_path / "ckpt")]
    more += ["--rollout-shuffle", "--save-debug-rollout-data", str(tmp_path / "dump-{rollout_id}.pt")]
    done = run(flags(model, tmp_path, *more, num_turns=3, num_tasks=40), timeout=600)
    assert done.returncode == 0, done.stderr
    assert set(metrics(tmp_path, "rollout/env/num_turns")) == {3.0}
    assert max(metrics(tmp_path, "train/log_prob_gap_max")) < 1e-4
    more += ["--num-rollout", "3", "--load", str(tmp_path / "ckpt")]
    done = run(flags(model, tmp_path, *more, num_turns=3, num_tasks=40), timeout=600)
    assert done.returncode == 0, done.stderr
    tasks = [task for of_rollout in task_order(tmp_path) for task in of_rollout]
    assert len(tasks) == 12 == len(set(tasks))


@pytest.mark.vllm
def test_on_vllm(qwen: Path, tmp_path: Path) -> None:
    more = ["--rollout-backend", "vllm", "--vllm-kv-cache-memory-bytes", str(128 << 20), "--env-renderer", "qwen3"]
    done = run(flags(qwen, tmp_path, *more, num_turns=2), timeout=900)
    assert done.returncode == 0, done.stderr
    assert max(metrics(tmp_path, "train/log_prob_gap_max")) < 1e-3
    assert metrics(tmp_path, "rollout/env/num_turns") == [2.0, 2.0]


def test_verifiers_own_chat_program(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness `null`: a program of verifiers in a process for each episode, whose packages `uv` installs."""
    monkeypatch.setitem(ENVIRONMENT, "PATH", os.pathsep.join([str(PYTHON.parent), os.environ["PATH"]]))
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    more = ["--env-args", json.dumps({"agent": agent, "serve": {"max_concurrent": 2}}), "--num-rollout", "1"]
    done = run(flags(model, tmp_path, *more, "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"), timeout=600)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path, "rollout/env/num_turns") == [1.0]
    assert max(metrics(tmp_path, "train/log_prob_gap_max")) < 1e-4
    assert "AsyncOpenAI" in (tmp_path / "logs" / "env-0.log").read_text()


# ---- token by token --------------------------------------------------------------------------------------------------


@contextmanager
def recording(engine: str) -> Iterator[tuple[int, list[tuple[dict[str, Any], dict[str, Any]]]]]:
    """A proxy of an engine, with its port and the JSON of every generation: request and answer."""
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0)) or None
            names = ("Authorization", "Content-Type", "Accept")
            headers = {name: self.headers[name] for name in names if self.headers[name]}
            with urlopen(Request(engine + self.path, body, headers, method=self.command), timeout=60) as upstream:
                raw = upstream.read()
            if self.path == "/inference/v1/generate" and body:
                seen.append((json.loads(body), json.loads(raw)))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, seen
        server.shutdown()


def rollout(argv: list[str], port: int, engine: Any) -> list[Sample]:
    """One rollout of a run without its trainer, whose engine is at `port`."""
    keys.knowing(f"http://127.0.0.1:{port}")
    found = {"vllm_router_ip": "127.0.0.1", "vllm_router_port": port, "rollout_engine_urls": [engine.url]}
    args = parse(argv[1:]).view({**found, "rollout_engine_kind": "embedded"})  # type: ignore[typeddict-item]
    output = as_train_output(generate_rollout(args, 0, rollouts.LedgeredDataSource(Tasks(args), rollouts.Ledger())))
    return [sample for group in output.samples for sample in group]


@pytest.mark.parametrize("renderer", ["default", "qwen3"])
def test_samples_hold_what_the_engine_gave(renderer: str, qwen: Path, tmp_path: Path) -> None:
    """Every answer of the engine stands in a sample after its very prompt, and nothing else is trained on."""
    engine = rollouts.start_engine(qwen, tmp_path)
    try:
        with recording(engine.url) as (port, seen):
            samples = rollout(flags(qwen, tmp_path, "--env-renderer", renderer, num_turns=3), port, engine)
    finally:
        engine.process.stop()
    assert len(seen) == 16 * 3
    for request, answer in seen:
        (choice,) = answer["choices"]
        prompt, ids = request["token_ids"], choice["token_ids"]
        log_probs, end = [entry["logprob"] for entry in choice["logprobs"]["content"]], len(prompt) + len(ids)
        holding = [s for s in samples if s.tokens[:end] == prompt + ids and _trained(s, len(prompt), end) == log_probs]
        assert holding
    assert sum(sum(s.loss_mask or []) for s in samples) == sum(len(a["choices"][0]["token_ids"]) for _, a in seen)
    rollouts.check_log_probs(qwen, [_only_trained(s) for s in samples])


def _trained(sample: Sample, begin: int, end: int) -> list[float] | None:
    """The log-probs of tokens `begin` to `end` of a sample, if all of them are trained on."""
    assert sample.loss_mask is not None and sample.rollout_log_probs is not None
    begin, end = begin - sample.prompt_length, end - sample.prompt_length
    return sample.rollout_log_probs[begin:end] if all(sample.loss_mask[begin:end]) else None


def _only_trained(sample: Sample) -> Any:
    """`sample` with the tokens up to its first turn's end, whose log-probs are all known."""
    assert sample.loss_mask is not None and sample.rollout_log_probs is not None
    first = sample.loss_mask.index(1)
    end = next((i for i in range(first, sample.response_length) if not sample.loss_mask[i]), sample.response_length)
    tokens = sample.tokens[: sample.prompt_length + end]
    return SimpleNamespace(
        tokens=tokens, response_length=end - first, rollout_log_probs=sample.rollout_log_probs[first:end]
    )


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    running = rollouts.start_engine(model, tmp_path_factory.mktemp("engine"))
    yield running
    running.process.stop()


def one_rollout(model: Path, engine: Any, run_dir: Path, *more: str, **taskset: Any) -> list[Sample]:
    return rollout(flags(model, run_dir, *more, **taskset), int(engine.url.rpartition(":")[2]), engine)


@pytest.mark.parametrize("fault", ["kill once", "stop once"])
def test_a_server_that_dies_or_stands_still_is_started_again(
    fault: str, model: Path, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its episodes are begun anew: nothing is lost."""
    monkeypatch.chdir(tmp_path)
    samples = one_rollout(model, engine, tmp_path / "run", fault=fault)
    assert (tmp_path / "done").exists()
    assert len({s.execution_id for s in samples}) == 16
    assert (tmp_path / "run" / "logs" / "env-1.log").exists()


def test_an_environment_that_always_kills_its_server_ends_the_run(
    model: Path, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineError, match="has ended 3 (times|servers)|3 servers") as caught:
        one_rollout(model, engine, tmp_path / "run", fault="kill")
    assert "SIGKILL" in str(caught.value) or "env-" in str(caught.value)


def test_an_episode_that_fails_is_named(model: Path, engine: Any, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="asked to raise") as caught:
        one_rollout(model, engine, tmp_path, fault="raise")
    assert "task 0" in caught.value.where
    kept = one_rollout(model, engine, tmp_path / "skip", "--skip-failed-groups", fault="raise")
    tasks = {s.metadata["task"]["idx"] for s in kept}
    assert len(tasks) == 4 and 0 not in tasks


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--env", "no_such_environment"], "'no_such_environment' not found"),
        (["--env-python", sys.executable], "has no verifiers"),
        (["--env-python", "/no/python"], "cannot be run"),
        (["--env-args", '{"taskset": {"num_tusks": 3}}'], "num_tusks"),
        (["--env-args", '{"serve": {"pool": 3}}'], "only max_concurrent acts"),
        (["--env-address", "tcp://127.0.0.1:9"], "no env server of verifiers answers"),
    ],
)
def test_what_cannot_start_is_refused_with_a_reason(
    more: list[str], said: str, model: Path, engine: Any, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, EngineError)) as caught:
        one_rollout(model, engine, tmp_path, *more)
    assert said in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_of_somebody_elses(number: int, model: Path, engine: Any, tmp_path: Path) -> None:
    """It is used while it runs; when it ends or stands still, the rollout ends with its address within 10 s."""
    program = """if True:
        import sys
        from verifiers.v1.serve import serve_env
        from verifiers.v1.utils.loaders import resolve_env_config
        env = {"taskset": {"id": "vowels"}, "agent": {"runtime": {"type": "subprocess"}}}
        serve_env(max_workers=1, address=sys.argv[1], config=resolve_env_config(env))
    """
    address = f"ipc://{tmp_path}/server"
    theirs = subprocess.Popen([str(PYTHON), "-c", program, address])
    try:
        assert len(one_rollout(model, engine, tmp_path, "--env-address", address)) >= 16
        caught: list[InstepError] = []

        def hang() -> None:
            try:
                one_rollout(model, engine, tmp_path / "2", "--env-address", address, fault="hang", num_tasks=1)
            except InstepError as error:
                caught.append(error)

        waiting = threading.Thread(target=hang)
        waiting.start()
        time.sleep(8)
        assert waiting.is_alive()
        theirs.send_signal(number)
        ended = time.monotonic()
        waiting.join(30)
        assert caught and address in str(caught[0]) and time.monotonic() - ended < allowed(10)
    finally:
        theirs.kill()
        theirs.wait(60)


def test_no_process_outlives_a_run_that_is_killed(model: Path, tmp_path: Path) -> None:
    process = start(flags(model, tmp_path, "--num-rollout", "1", fault="hang"))
    deadline = time.monotonic() + 120
    while not any("host.py" in " ".join(child.cmdline()) for child in _children(process.pid)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    time.sleep(5)
    ours = _children(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert gone_within(ours, 15)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return children(pid)
    except psutil.NoSuchProcess:
        return []
