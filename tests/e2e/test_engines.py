"""Several engines behind a router: one that dies in the middle of a rollout costs nothing."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines, plan_routers
from instep.cluster.engine_start import start_engine, start_router
from instep.engines.wire import GENERATE
from instep.rollout import runtime
from instep.rollout.client import complete
from tests.e2e.commands import ENVIRONMENT, gone_within, grpo_arguments, on_sglang, run, start
from tests.keys import key_file

NUM_ROLLOUT = 4
OF_SGLANG = ("sglang", "sglang_router", "slow")


def two_engines(tiny, run_dir, backend, *more):
    given = ["--rollout-backend", backend, "--rollout-num-gpus", "2", "--num-rollout", str(NUM_ROLLOUT)]
    given += ["--rollout-max-response-len", "64", "--rm-type", "math", "--micro-batch-size", "4", *more]
    return grpo_arguments(tiny, run_dir, *given)


def steps_of(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


HOOKS = ["--custom-rm-path", "tests.e2e.engine_killer.reward", "--reward-timeout", "300", "--no-hook-trial"]


def kill_one(run_dir, arguments, **env):
    """The steps of a run whose engine 1 was killed and came back, with a ledger that lacks nothing."""
    command = [sys.executable, "-m", "instep.cli", *arguments, *HOOKS]
    out = subprocess.PIPE
    done = subprocess.run(command, env=ENVIRONMENT | env, stdout=out, stderr=subprocess.STDOUT, text=True, timeout=570)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "engine 1 died" in done.stdout and "engine 1 serves again" in done.stdout, done.stdout[-4000:]
    return nothing_lost(run_dir)


def nothing_lost(run_dir):
    """The steps of a run whose ledger lacks no group, and whose log-probs agree."""
    ledger = json.loads((run_dir / "summary.json").read_text())["ledger"]
    assert ledger["num_consumed"] == 4 * NUM_ROLLOUT and not ledger["dropped"], ledger
    steps = steps_of(run_dir)
    assert len(steps) == NUM_ROLLOUT and max(row["train/log_prob_gap_max"] for row in steps) < 1e-4
    return steps


@pytest.mark.router
def test_a_killed_engine_costs_no_sample(tiny, tmp_path):
    steps = kill_one(tmp_path, two_engines(tiny, tmp_path, "embedded"))
    assert max(row["sync/probe_max_abs_diff"] for row in steps) <= 1e-5


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="server"),
        pytest.param({"KILL_CORE": "1"}, id="core"),
        # The last call of a rollout: the server, which outlives its core by seconds, refuses the sync that comes next.
        pytest.param({"KILL_CORE": "1", "KILL_AT": "32"}, id="core before a sync"),
    ],
)
def test_a_killed_vllm_costs_no_sample(small, tmp_path, env):
    """Of vLLM's two processes either one; both are gone then, and started anew."""
    steps = kill_one(tmp_path, two_engines(small, tmp_path, "vllm"), **env)
    assert max(row["sync/probe_max_abs_diff"] for row in steps) <= 1e-5


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_and_the_trainer_agree(small, tmp_path):
    """Log-probs of every trained token, before and after updates, to 1e-5 in float32; versions on every token."""
    done = run(
        [*two_engines(small, tmp_path, "vllm"), "--save-debug-rollout-data", str(tmp_path / "{rollout_id}.pt")], 300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = steps_of(tmp_path)
    assert len(steps) == NUM_ROLLOUT and max(row["train/log_prob_gap_max"] for row in steps) < 1e-5


@pytest.mark.vllm
@pytest.mark.slow
def test_a_killed_vllm_that_somebody_else_runs_costs_no_sample(small, tmp_path):
    """Two engines on the CPU, or on one GPU with a part of its memory each; the test starts the killed one again."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = two_engines(small, tmp_path, "vllm", "--device", device, "--precision", "fp32")
    part = ["--vllm-gpu-memory-utilization", "0.1"] if device == "cuda" else []
    args = parse([*given[1:], *part, "--vllm-kv-cache-memory-bytes", str(128 << 20)], "train")
    specs, logs = plan_engines(args), tmp_path / "theirs"
    engines = [start_engine(args, spec, num_threads=1, log_dir=logs) for spec in specs]
    try:
        for engine in engines:
            engine.wait_ready(240)
        at = given.index("--rollout-num-gpus")
        command = [sys.executable, "-m", "instep.cli", *given[:at], *given[at + 2 :], *HOOKS, *key_file(tmp_path)]
        command += ["--rollout-external-engine-addrs", *(e.url.removeprefix("http://") for e in engines)]
        with open(tmp_path / "out.txt", "w") as out:
            process = subprocess.Popen(command, env=ENVIRONMENT, stdout=out, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 480
        while process.poll() is None and time.monotonic() < deadline:
            if not engines[1].process.alive():
                port = int(engines[1].url.rpartition(":")[2])
                engines[1] = start_engine(args, specs[1], num_threads=1, log_dir=logs, port=port)
            time.sleep(0.2)
        process.kill()
    finally:
        for engine in engines:
            engine.stop()
    said = (tmp_path / "out.txt").read_text()
    assert process.wait() == 0 and "engine 1 serves again" in said, said[-4000:]
    steps = nothing_lost(tmp_path)
    assert max(row["sync/probe_max_abs_diff"] for row in steps) <= 1e-5


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        pytest.param("embedded", [], marks=pytest.mark.router),
        pytest.param("sglang", on_sglang(2)[4:], marks=[getattr(pytest.mark, x) for x in OF_SGLANG]),
    ],
)
def test_engines_and_router_that_run_already(tiny, tmp_path, kind, flags):
    """Two engines and a router that somebody else has started; they outlive the run, with its last weights."""
    args = parse(two_engines(tiny, tmp_path, kind, *flags)[1:], "train")
    args = args.replace(device="cpu", precision="fp32")
    specs, logs = plan_engines(args), tmp_path / "theirs"
    engines = [start_engine(args, spec, num_threads=1, log_dir=logs) for spec in specs]
    router = start_router(args, plan_routers(args, specs)[0], engines, logs)
    try:
        for engine in engines:
            engine.wait_ready(120)
        router.wait_ready(120)
        router.set_members([engines[0].url])
        given = [*two_engines(tiny, tmp_path, kind), *key_file(tmp_path), "--rollout-external-engine-addrs"]
        given += [engine.url.removeprefix("http://") for engine in engines]
        given.remove("--rollout-num-gpus")
        given.remove("2")
        host, port = router.url.removeprefix("http://").split(":")
        name = "sglang" if kind == "sglang" else "vllm"
        done = run([*given, f"--{name}-router-ip", host, f"--{name}-router-port", port])
        assert done.returncode == 0, done.stderr[-4000:]
        steps = steps_of(tmp_path)
        assert len(steps) == NUM_ROLLOUT and max(row["train/log_prob_gap_max"] for row in steps) < 1e-5
        assert router.listed() == {engines[0].url}  # as it was
        for engine in engines:
            assert engine.healthy(5.0)
            engine.post("/pause", timeout=5)  # it takes control calls, so nobody holds it
        assert sorted((tmp_path / "logs").iterdir()) == [tmp_path / "logs" / "actor-rank0.log"]
    finally:
        router.stop()
        for engine in engines:
            engine.stop()


@pytest.mark.slow
@pytest.mark.router
def test_an_engine_of_somebody_else_that_stands_still_costs_no_sample(tiny, tmp_path):
    """Nobody ends it, so the router drops the requests that wait there, and the other engine answers them."""
    given = two_engines(tiny, tmp_path, "embedded")
    args = parse(given[1:], "train")
    args = args.replace(device="cpu", precision="fp32")
    engines = [start_engine(args, spec, num_threads=1, log_dir=tmp_path / "theirs") for spec in plan_engines(args)]
    try:
        for engine in engines:
            engine.wait_ready(120)
        at = given.index("--rollout-num-gpus")
        hooks = ["--custom-rm-path", "tests.e2e.engine_killer.reward_that_stops_it", "--no-hook-trial"]
        command = [*given[:at], *given[at + 2 :], *hooks, *key_file(tmp_path), "--rollout-external-engine-addrs"]
        done = run([*command, *(e.url.removeprefix("http://") for e in engines)], 200)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "engine 1 has not answered /health with 200, 3 times in a row: the run waits for it" in done.stdout
        nothing_lost(tmp_path)
    finally:
        for engine in engines:
            engine.stop()


@pytest.mark.router
def test_a_session_stays_with_its_engine(tiny, tmp_path):
    """Requests of one session, one after another and at once, go to one engine; sessions spread over both."""
    args = parse(two_engines(tiny, tmp_path, "embedded")[1:], "train")
    args = args.replace(device="cpu", precision="fp32")
    specs, logs = plan_engines(args), tmp_path / "logs"
    engines = [start_engine(args, spec, num_threads=1, log_dir=logs) for spec in specs]
    router = start_router(args, plan_routers(args, specs)[0], engines, logs)

    async def ask(session):
        url = router.url + GENERATE
        return await complete(url, str(tiny / "hf"), [5, 6, 7], {"max_tokens": 2, "ignore_eos": True}, session=session)

    async def everything():
        sessions = [f"group-{i}" for i in range(16)]
        rounds = [await asyncio.gather(*(ask(s) for s in sessions for _ in range(3))) for _ in range(2)]
        served = [[out.weight_versions[0].version for out in answers] for answers in rounds]
        return [{part[3 * i + j] for part in served for j in range(3)} for i in range(16)]

    try:
        for engine in engines:
            engine.wait_ready(120)
            engine.post("/update_weight_version", {"new_version": engine.name}, timeout=10)  # tells who has answered
        router.wait_ready(120)
        router.set_members([engine.url for engine in engines])
        served = runtime.run(everything(), timeout=60)
        assert all(len(names) == 1 for names in served), served
        by_engine = [sum(names == {engine.name} for names in served) for engine in engines]
        assert sum(by_engine) == 16 and min(by_engine) >= 5, by_engine
    finally:
        runtime.shutdown()
        router.stop()
        for engine in engines:
            engine.stop()


@pytest.mark.vllm
@pytest.mark.slow
def test_nothing_of_vllm_outlives_a_killed_controller(small, tmp_path):
    process = start(two_engines(small, tmp_path, "vllm"))
    controller = psutil.Process(process.pid)
    deadline = time.monotonic() + 200
    while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    family = controller.children(recursive=True)
    assert len(family) >= 6  # a worker, a router, two servers with a core each
    controller.kill()
    process.communicate(timeout=240)
    assert gone_within(family, 5)


def test_vllm_refuses_what_it_would_die_of(tiny, tmp_path):
    done = run(two_engines(tiny, tmp_path, "vllm"))
    wanted = (
        "heads of 16"
        if importlib.util.find_spec("vllm") and importlib.util.find_spec("instep_engine.vllm")
        else "install"
    )
    assert done.returncode != 0 and wanted in done.stderr + done.stdout, done.stderr
    assert not os.path.exists(tmp_path / "summary.json")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for a CPU: two replicas need two GPUs")
def test_both_replicas_of_a_data_parallel_engine_are_fed_and_proven(small, tmp_path):
    """Tokens have the trainer's log-probs, whichever replica made them; what is left over is aborted in both."""
    more = ["--rollout-num-gpus-per-engine", "2", "--vllm-data-parallel-size", "2"]
    done = run([*two_engines(small, tmp_path, "vllm", *more, "--over-sampling-batch-size", "8")], 400)
    assert done.returncode == 0, done.stderr[-4000:]
    steps = steps_of(tmp_path)
    assert len(steps) == NUM_ROLLOUT and max(row["train/log_prob_gap_max"] for row in steps) < 1e-5
    log = (tmp_path / "logs" / "engine-0.log").read_text()
    assert all(f"EngineCore_DP{rank}" in log for rank in (0, 1)), log[-3000:]
