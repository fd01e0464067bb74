"""A Ray cluster of three nodes that runs join: what they reserve there, their ranks, weights and engines."""

import contextlib
import os
import signal
import time

import psutil
import pytest

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.placement import make_plan
from instep.cluster.ray import Ray, RayCluster
from instep.cluster.ray_remote import HostHandle
from instep.engines.spec import Addresses
from instep.engines.vllm_process import serve_arguments
from instep.errors import ConfigError, EngineError, WorkerError
from tests.bounds import until
from tests.e2e import stub_vllm
from tests.e2e.commands import children, gone_within, grpo_arguments, run
from tests.e2e.test_ray import LONG, matching, metrics, start_and_train


@pytest.fixture
def joined(cluster):
    """A connection of this process to the cluster."""
    ray = Ray(cluster[0])
    ray.connect(num_cpus=0, status=print)
    yield ray
    ray.close()


def test_an_actor_that_is_late_says_how_long_and_what_to_do(joined):
    import ray

    class Late:
        def info(self):
            time.sleep(600)

    actor = ray.remote(num_cpus=0)(Late).remote()
    with pytest.raises(WorkerError) as caught:
        HostHandle(actor, timeout=2)
    ray.kill(actor)
    assert caught.value.what == "a node's actor did not answer 'info' within 2 s"
    assert "--worker-start-timeout" in caught.value.remedy and "RAY_worker_niceness=0" in caught.value.remedy


PPO = "--advantage-estimator ppo --actor-num-gpus-per-node 4 --critic-num-gpus-per-node 4 --rollout-num-gpus 8"
TWO_NODES = "--actor-num-gpus-per-node 8 --rollout-num-gpus 16 --rollout-num-gpus-per-engine 16"


@pytest.mark.parametrize("words, num_nodes, free", [(PPO, 2, 8), pytest.param(TWO_NODES, 3, 0, marks=pytest.mark.slow)])
def test_the_seeds_plans_are_reserved_as_planned(joined, words, num_nodes, free):
    import ray

    plan = make_plan(parse(words.split(), "plan"))
    hosts = joined.reserve(plan, gpus=True, timeout=180, status=print)
    assert [host.info.gpus for host in hosts] == [tuple("01234567")] * num_nodes
    assert len({host.info.node_id for host in hosts}) == num_nodes and joined.is_here(hosts[0])
    until(lambda: ray.available_resources().get("GPU", 0) == free)
    (group,) = [g for g in ray.util.placement_group_table().values() if g["state"] == "CREATED"]
    assert group["bundles"] == {i: {"CPU": 8.0, "GPU": 8.0} for i in range(num_nodes)}
    assert group["bundles_to_node_id"] == {i: host.info.node_id for i, host in enumerate(hosts)}
    for host in hosts:
        host.close()


def test_a_plan_that_does_not_fit_says_what_there_is(joined):
    import ray

    until(lambda: ray.available_resources().get("GPU", 0) == 24)  # what an earlier test had is given back in a while
    plan = make_plan(parse("--actor-num-nodes 4 --actor-num-gpus-per-node 8".split(), "plan"))
    with pytest.raises(ConfigError) as caught:
        joined.reserve(plan, gpus=True, timeout=2, status=print)
    text = "the plan needs 5 node(s) with 8, 8, 8, 8, 1 GPUs, but Ray has 3 node(s) with 8, 8, 8 GPUs, 24 of them free"
    assert text in caught.value.what


@pytest.mark.slow
def test_a_run_over_two_nodes_is_the_run_of_one_host(tiny, tmp_path, cluster):
    """Trainer on node 0, engine on node 1, weights through the disk: the same rollouts and losses."""
    common = ["--weight-sync", "disk", "--actor-num-gpus-per-node", "2"]
    more = ["--cluster", "ray", "--ray-address", cluster[0], "--num-gpus-per-node", "2"]
    there = run(grpo_arguments(tiny, tmp_path / "ray", *common, *more))
    assert there.returncode == 0, there.stderr[-3000:]
    here = run(grpo_arguments(tiny, tmp_path / "local", *common))
    assert here.returncode == 0, here.stderr[-3000:]
    for name in ("rollout/response_length_mean", "train/loss", "train/grad_norm"):
        expected = metrics(tmp_path / "local", name)
        assert len(expected) == 2 and metrics(tmp_path / "ray", name) == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert {p.name for p in (tmp_path / "ray" / "logs").iterdir()} >= {"actor-rank1.log", "engine-0.log"}


@pytest.mark.slow
def test_ranks_on_two_nodes_train_together_and_stream_to_an_engine_on_a_third(tiny, tmp_path, cluster):
    """They meet at ports of rank 0's host, and one group serves every sync."""
    flags = ["--cluster", "ray", "--ray-address", cluster[0], "--weight-sync", "nccl", "--num-gpus-per-node", "1"]
    done = run(grpo_arguments(tiny, tmp_path, *flags, "--actor-num-nodes", "2", "--rollout-num-gpus", "1"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(metrics(tmp_path, "train/loss")) == 2
    assert metrics(tmp_path, "sync/version") == [2, 3] and max(metrics(tmp_path, "sync/probe_max_abs_diff")) <= 1e-4
    assert min(metrics(tmp_path, "sync/send_seconds")) > 0
    assert {p.name for p in (tmp_path / "logs").iterdir()} >= {"actor-rank0.log", "actor-rank1.log", "engine-0.log"}


@pytest.mark.slow
def test_ranks_on_two_nodes_train_together(tiny, tmp_path, cluster):
    words = f"sft --hf-checkpoint {tiny}/hf --prompt-data {tiny}/sft.jsonl --input-key messages --train-backend hf "
    words += "--rollout-batch-size 8 --global-batch-size 8 --num-rollout 2 --lr 1e-3 --lr-decay-style constant "
    words += "--actor-num-nodes 2 --actor-num-gpus-per-node 1 --num-gpus-per-node 1 --num-threads 1 "
    words += f"--device cpu --run-dir {tmp_path} --cluster ray --ray-address {cluster[0]}"
    done = run(words.split())
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(metrics(tmp_path, "train/loss")) == 2


@pytest.mark.slow
def test_weights_stream_to_engines_on_other_nodes(tiny, tmp_path, cluster):
    """They meet at a port of rank 0's host, and the group serves every sync."""
    flags = ["--cluster", "ray", "--ray-address", cluster[0], "--weight-sync", "nccl", "--num-gpus-per-node", "1"]
    done = run(grpo_arguments(tiny, tmp_path, *flags, "--rollout-num-gpus", "2"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert metrics(tmp_path, "sync/version") == [2, 3] and max(metrics(tmp_path, "sync/probe_max_abs_diff")) <= 1e-4
    assert min(metrics(tmp_path, "sync/send_seconds")) > 0
    assert {p.name for p in (tmp_path / "logs").iterdir()} >= {"actor-rank0.log", "engine-0.log", "engine-1.log"}


@pytest.mark.slow
def test_an_adapter_reaches_an_engine_on_another_node(tiny, tmp_path, cluster):
    """It alone travels, through the run's folder."""
    flags = ["--cluster", "ray", "--ray-address", cluster[0], "--num-gpus-per-node", "1", "--lora-rank", "4"]
    done = run(grpo_arguments(tiny, tmp_path, *flags, "--weight-sync", "lora"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "adapters travel by lora_disk (--weight-sync lora: through --run-dir" in done.stdout + done.stderr
    assert metrics(tmp_path, "sync/version") == [2, 3] and max(metrics(tmp_path, "sync/probe_max_abs_diff")) <= 1e-4
    assert 0 < max(metrics(tmp_path, "sync/bytes")) < 100_000


@pytest.mark.slow
def test_a_killed_controller_leaves_nothing_in_the_cluster(tiny, tmp_path, cluster):
    process = start_and_train(grpo_arguments(tiny, tmp_path, "--cluster", "ray", "--ray-address", cluster[0], *LONG))
    nodes = children(cluster[1].pid)
    ours = [p for name in ("worker_main", "engines.embedded", "ray::Host") for p in matching(nodes, name)]
    assert len(ours) == 4  # an engine has two processes
    process.kill()
    assert gone_within(ours, 30)
    process.communicate()


# ---- engines ---------------------------------------------------------------------------------------------------------


def started(tiny, run_dir, address, words, **settings):
    """The cluster, started, of a run that only samples; and its engines' plan."""
    more = ["--cluster", "ray", "--ray-address", address, "--debug-rollout-only", *words.split()]
    args = parse(grpo_arguments(tiny, run_dir, *more)[1:], "train").replace(**settings)
    cluster = RayCluster(args, log_dir=run_dir / "logs", with_engines=True, status=print)
    with contextlib.ExitStack() as unless_started:
        unless_started.callback(cluster.close)
        cluster.start()
        for engine in cluster.engines:
            engine.wait_ready(120)
        unless_started.pop_all()
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


OF_TWO_NODES = (
    "--rollout-backend vllm --rollout-num-gpus 16 --rollout-num-gpus-per-engine 16 --vllm-data-parallel-size 2 --seed 5"
)


def test_an_engine_of_two_nodes_is_two_processes_that_live_together(tiny, tmp_path, cluster, monkeypatch):
    """The exact command lines and environments, on processes that stand for vLLM; the GPUs are numbers."""
    stub = stub_vllm.install(tmp_path / "stub", monkeypatch)
    there, (spec,) = started(tiny, tmp_path, cluster[0], OF_TWO_NODES, device="cuda", precision="bf16")
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
