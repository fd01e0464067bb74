"""Engines on the nodes of a Ray cluster: one that dies is started anew, and engines of several nodes."""

import os
import signal

import psutil
import pytest

from instep.arguments import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.ray import RayCluster
from instep.engines.spec import Addresses
from instep.engines.vllm_process import serve_arguments
from instep.errors import EngineError
from tests.e2e import stub_vllm
from tests.e2e.commands import grpo_arguments
from tests.e2e.test_engines import kill_one, two_engines


def started(tiny, run_dir, address, words, **settings):
    """The cluster, started, of a run that only samples; and its engines' plan."""
    more = ["--cluster", "ray", "--ray-address", address, "--debug-rollout-only", *words.split()]
    args = parse(grpo_arguments(tiny, run_dir, *more)[1:], "train").replace(**settings)
    cluster = RayCluster(args, log_dir=run_dir / "logs", with_engines=True, status=print)
    try:
        cluster.start()
        for engine in cluster.engines:
            engine.wait_ready(120)
    except BaseException:
        cluster.close()
        raise
    return cluster, plan_engines(args)


@pytest.mark.slow
def test_an_engine_that_dies_is_started_anew_at_its_address(tiny, tmp_path, cluster):
    words = "--rollout-backend embedded --rollout-num-gpus 2"
    there, _ = started(tiny, tmp_path, cluster[0], words, device="cpu", precision="fp32")
    try:
        engine = there.engines[1]
        before = engine.process
        os.kill(before.pid, signal.SIGKILL)
        assert before.died_within(10)
        with pytest.raises(EngineError, match=r"engine 1 died \(SIGKILL\)"):
            engine.check_alive()
        url = engine.url
        for stop in (False, True):  # the second time one that only stands
            if stop:
                os.kill(engine.process.pid, signal.SIGSTOP)
            there.restart_engine(1)
            engine.wait_ready(120)
            engine.check_alive()
            assert (engine.url, engine.name) == (url, "engine 1") and engine.healthy(5)
        assert before.fault() is not None and not psutil.pid_exists(before.pid)
        assert there.engines[0].healthy(5)
    finally:
        there.close()
    assert not engine.healthy(2)


TWO_NODES = (
    "--rollout-backend vllm --rollout-num-gpus 16 --rollout-num-gpus-per-engine 16 --vllm-data-parallel-size 2 --seed 5"
)


def test_an_engine_of_two_nodes_is_two_processes_that_live_together(tiny, tmp_path, cluster, monkeypatch):
    """The exact command lines and environments, on processes that stand for vLLM; the GPUs are numbers."""
    stub = stub_vllm.install(tmp_path / "stub", monkeypatch)
    there, (spec,) = started(tiny, tmp_path, cluster[0], TWO_NODES, device="cuda", precision="bf16")
    try:
        (engine,) = there.engines
        first = as_planned(stub, spec, engine)
        assert {p.name for p in (tmp_path / "logs").iterdir()} == {"engine-0.log", "engine-0-node1.log"}
        os.kill(first[1]["pid"], signal.SIGKILL)
        assert engine.process.died_within(10)
        with pytest.raises(EngineError, match=r"engine 0 died \(SIGKILL\) on its node 1"):
            engine.check_alive()
        there.restart_engine(0)
        engine.wait_ready(60)
        assert not any(psutil.pid_exists(entry["pid"]) for entry in first)  # the other one was ended
        second = as_planned(stub, spec, engine, former=first)
        assert second[0]["port"] == first[0]["port"]
        pids = [entry["pid"] for entry in second]
        assert [part.pid for part in engine.process.parts] == pids
    finally:
        there.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def as_planned(stub, spec, engine, former=()):
    """What has been started of an engine of two nodes, by node."""
    known = {entry["pid"] for entry in former}
    entries = sorted(
        (e for e in stub.wait_started(len(known) + 2) if e["pid"] not in known), key=lambda e: not e["port"]
    )
    assert len(entries) == 2
    words = entries[0]["argv"]
    ports = (words[words.index(name) + 1] for name in ("--master-port", "--data-parallel-rpc-port"))
    at = Addresses("127.0.0.1", entries[0]["port"], "127.0.0.1", *ports)
    assert len({at.port, *map(int, (at.master_port, at.rpc_port))}) == 3
    for rank, entry in enumerate(entries):
        assert entry["argv"] == ["serve", *serve_arguments(spec, at, rank)]
        assert entry["env"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        assert entry["env"]["VLLM_HOST_IP"] == "127.0.0.1" and entry["env"]["GLOO_SOCKET_IFNAME"] == "lo"
        assert entry["env"]["VLLM_SERVER_DEV_MODE"] == entry["env"]["INSTEP_DIE_WITH_PARENT"] == "1"
    assert engine.url == f"http://127.0.0.1:{at.port}"
    assert ("--headless" in entries[1]["argv"], "--headless" in entries[0]["argv"]) == (True, False)
    return entries


@pytest.mark.slow
@pytest.mark.router
def test_a_killed_engine_costs_no_sample_on_ray(tiny, tmp_path, ray_tmp):
    steps = kill_one(tmp_path, two_engines(tiny, tmp_path, "embedded", "--cluster", "ray", "--ray-address", "local"))
    assert max(row["sync/probe_max_abs_diff"] for row in steps) <= 1e-5
