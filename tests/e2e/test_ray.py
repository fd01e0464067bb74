"""`--cluster ray`: a Ray of the run's own, and joining one of several nodes; endings without orphans."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from instep.arguments import parse
from instep.cluster.placement import make_plan
from instep.cluster.ray_remote import HostHandle
from instep.errors import ConfigError, WorkerError
from tests.bounds import allowed, until
from tests.e2e import commands
from tests.e2e.commands import children, gone_within, grpo_arguments, run, words_of
from tests.e2e.conftest import LOOPBACK

HERE = Path(__file__).parent
SCRIPTS = HERE.parent.parent / "scripts"
LONG = ["--num-rollout", "1000", "--rollout-max-response-len", "100"]


def start_and_train(arguments):
    """A run whose first training step is done, so that the engine is at work again."""
    command = [sys.executable, "-m", "instep.cli", *arguments]
    process = subprocess.Popen(
        command, env=commands.ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    path = Path(arguments[arguments.index("--run-dir") + 1]) / "metrics.jsonl"
    deadline = time.monotonic() + 240  # the start is not what is tested
    while not (path.exists() and "train/loss" in path.read_text()):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
    return process


def on_ray(tiny, run_dir, *more):
    return grpo_arguments(tiny, run_dir, "--cluster", "ray", "--ray-address", "local", *more)


def matching(processes, text):
    return [p for p in processes if text in " ".join(words_of(p))]


def metrics(run_dir, name):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


# ---- a Ray of the run's own ------------------------------------------------------------------------------------------


def test_its_own_ray_stays_on_loopback_and_ctrl_c_ends_it(tiny, tmp_path, ray_tmp):
    process = start_and_train(on_ray(tiny, tmp_path, *LONG))
    ours = children(process.pid)
    (folder,) = ray_tmp.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700  # Ray opens its own folder in it to everybody
    assert len(list(folder.rglob("*.sock*"))) + len(list(folder.rglob("plasma_store"))) > 0
    assert matching(ours, "raylet") and matching(ours, "worker_main") and matching(ours, "engines.embedded")
    listening = [c for p in ours for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert len(listening) > 5 and {c.laddr.ip.removeprefix("::ffff:") for c in listening} == {"127.0.0.1"}
    assert {p.nice() for p in matching(ours, "instep.")} == {psutil.Process().nice()}
    assert 8265 not in {c.laddr.port for c in listening}  # the dashboard's
    process.send_signal(signal.SIGINT)
    assert process.wait(240) == 130
    assert gone_within(ours, 10)
    assert list(ray_tmp.iterdir()) == []
    process.communicate()


@pytest.mark.slow
def test_sigusr1_shows_the_stacks_of_its_processes_in_deterministic_mode(tiny, tmp_path, ray_tmp):
    process = start_and_train(on_ray(tiny, tmp_path, *LONG, "--deterministic-mode"))
    ranks, engines = (matching(children(process.pid), name) for name in ("worker_main", "engines.embedded"))
    assert [p.environ()["MKL_CBWR"] for p in [*ranks, *engines]] == ["AUTO"] * 3  # an engine has two
    assert "--batch-invariant" in engines[0].cmdline()
    process.send_signal(signal.SIGUSR1)
    path, ending = tmp_path / "logs" / "dump-0.txt", f"Stacks of actor rank 0 (pid {ranks[0].pid})"
    deadline = time.monotonic() + 60
    while not (path.exists() and ending in path.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(240) == 130
    process.communicate()
    text = path.read_text()
    assert f"Stacks of engine 0 (pid {engines[0].pid})" in text and "worker_main.py" in text
    assert "could not be looked at" not in text


@pytest.mark.slow
def test_rollouts_alone_start_no_rank(tiny, tmp_path, ray_tmp):
    result = run(on_ray(tiny, tmp_path, "--num-rollout", "1", "--debug-rollout-only"))
    assert result.returncode == 0, result.stderr[-3000:]
    assert [p.name for p in sorted((tmp_path / "logs").glob("*.log"))] == ["engine-0.log"]


@pytest.mark.slow
def test_ppo_on_ray_is_the_run_of_one_host(tiny, tmp_path, ray_tmp):
    """There with a critic of two ranks, here of one."""
    ppo = ["--advantage-estimator", "ppo", "--critic-lr", "5e-3", "--global-batch-size", "8"]
    ppo += ["--custom-rm-path", "tests.e2e.observed.reward"]
    there = run(on_ray(tiny, tmp_path / "ray", *ppo, "--critic-num-gpus-per-node", "2"))
    assert there.returncode == 0, there.stderr[-3000:]
    here = run(grpo_arguments(tiny, tmp_path / "local", *ppo))
    assert here.returncode == 0, here.stderr[-3000:]
    for name in ("rollout/response_length_mean", "train/loss", "critic/value_loss", "critic/explained_variance"):
        expected = metrics(tmp_path / "local", name)
        assert len(expected) == 2 and metrics(tmp_path / "ray", name) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    names = {p.name for p in (tmp_path / "ray" / "logs").glob("*.log")}
    assert names == {"actor-rank0.log", "critic-rank0.log", "critic-rank1.log", "engine-0.log"}


def test_a_killed_controller_takes_its_ray_with_it(tiny, tmp_path, ray_tmp):
    process = start_and_train(on_ray(tiny, tmp_path, *LONG))
    ours = children(process.pid)
    process.kill()
    assert gone_within(ours, 10)
    deadline = time.monotonic() + 60
    while list(ray_tmp.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list(ray_tmp.iterdir()) == []
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim, words",
    [
        ("worker_main", ["WorkerError", "actor rank 0", "SIGKILL", "memory at its death", "GB resident (peak"]),
        ("engines.embedded", ["EngineError", "engine 0", "SIGKILL"]),
        ("ray::Host", ["is lost with its node 127.0.0.1"]),
        ("raylet/raylet", ["is lost with its node 127.0.0.1"]),
    ],
)
def test_a_killed_process_is_an_instep_error(tiny, tmp_path, ray_tmp, victim, words):
    process = start_and_train(on_ray(tiny, tmp_path, *LONG))
    ours = children(process.pid)
    (log,) = (tmp_path / "logs").glob("actor-rank0.log")
    with open(log, "a") as file:
        file.write("its last words\n")
    os.kill(matching(ours, victim)[0].pid, signal.SIGKILL)
    started = time.monotonic()
    _, stderr = process.communicate(timeout=240)
    assert time.monotonic() - started < allowed(30)
    assert process.returncode == 1 and "remedy" in stderr, stderr
    assert [word for word in words if word not in stderr] == [], stderr
    assert "its last words" in stderr or victim != "worker_main", stderr
    assert gone_within(ours, 20)


def test_a_worker_that_ends_while_the_run_closes_is_closed_once(monkeypatch):
    """The thread that hears of the worker's end and the one that closes the run end its relay at the same time."""
    from instep.cluster.ray_remote import Relay

    relay, close = Relay(None, "actor rank 0"), Connection._close
    monkeypatch.setattr(Connection, "_close", lambda self: (time.sleep(0.1), close(self)))
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(relay.end) for _ in range(2)]
    assert [end.result() for end in ends] == [None, None]
    relay.close()


# ---- a cluster of three nodes ----------------------------------------------------------------------------------------


@pytest.fixture
def joined(cluster):
    """A connection of this process to the cluster."""
    from instep.cluster.ray import Ray

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


@pytest.mark.parametrize("words, num_nodes, free", [(PPO, 2, 8), (TWO_NODES, 3, 0)])
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


def test_ranks_on_two_nodes_train_together(tiny, tmp_path, cluster):
    words = f"sft --hf-checkpoint {tiny}/hf --prompt-data {tiny}/sft.jsonl --input-key messages --train-backend hf "
    words += "--rollout-batch-size 8 --global-batch-size 8 --num-rollout 2 --lr 1e-3 --lr-decay-style constant "
    words += "--actor-num-nodes 2 --actor-num-gpus-per-node 1 --num-gpus-per-node 1 --num-threads 1 "
    words += f"--device cpu --run-dir {tmp_path} --cluster ray --ray-address {cluster[0]}"
    done = run(words.split())
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(metrics(tmp_path, "train/loss")) == 2


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


@pytest.mark.parametrize(
    "address, text", [("127.0.0.1:1", "no Ray at '127.0.0.1:1'"), ("ray://127.0.0.1:1", "is no host:port")]
)
def test_an_address_where_there_is_no_ray(tiny, tmp_path, address, text):
    started = time.monotonic()
    done = run(grpo_arguments(tiny, tmp_path, "--cluster", "ray", "--ray-address", address))
    assert done.returncode == 2 and text in done.stderr and time.monotonic() - started < allowed(30)


# ---- scripts ---------------------------------------------------------------------------------------------------------


def script_environment(tmp_path):
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **LOOPBACK, "PATH": path}


def test_ray_run_gives_the_command_a_ray_and_returns_its_code(tmp_path):
    from instep.ports import free_port

    address = f"127.0.0.1:{free_port()}"
    words = f"--rank 0 --num-nodes 1 --num-cpus 1 --head {address} -- sh -c".split()
    probe = f"{sys.executable} -c 'import ray; ray.init(); print(ray.cluster_resources()[\"CPU\"])' > cpus"
    command = [str(SCRIPTS / "ray_run.sh"), *words, f"echo $RAY_ADDRESS > found; {probe}; exit 7"]
    process = subprocess.Popen(command, env=script_environment(tmp_path), cwd=tmp_path)
    ours: list[psutil.Process] = []
    while process.poll() is None:
        ours += [p for p in children(process.pid) if p not in ours] if psutil.pid_exists(process.pid) else []
        time.sleep(0.5)
    assert process.returncode == 7 and (tmp_path / "found").read_text().strip() == address
    assert (tmp_path / "cpus").read_text().strip() == "1.0"
    assert len(ours) > 3 and gone_within(ours, 5)


@pytest.mark.parametrize(
    "words, text",
    [
        ("--rank 2 --num-nodes 2 --head a:1", "--rank 2 is not below"),
        ("--rank 0 --num-nodes 2 --head a", "no HOST:PORT"),
        ("--rank 0 --num-nodes 2 --head a:1", "no command"),
        ("--rank 0 --nodes 2", "unknown option '--nodes'"),
        ("--rank 1 --num-nodes 2 --head 127.0.0.1:1 --wait 1", "no Ray answers at 127.0.0.1:1 after 1 s"),
    ],
)
def test_ray_run_refuses(tmp_path, words, text):
    command = [str(SCRIPTS / "ray_run.sh"), *words.split()]
    done = subprocess.run(command, env=script_environment(tmp_path), capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and text in done.stderr


@pytest.mark.slow
def test_slurm_run_joins_all_hosts(tmp_path):
    """With a `scontrol` and an `srun` that know one host twice; for the second node Ray chooses the address."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 127.0.0.2; echo 127.0.0.3\n")
    srun = "#!/bin/bash\nwhile [[ $1 == --* ]]; do case $1 in *=* | --exclusive) shift ;; *) shift 2 ;; esac; done\n"
    srun += 'SLURM_PROCID=1 "$@" & SLURM_PROCID=0 "$@"; code=$?; wait; exit $code\n'
    (tmp_path / "srun").write_text(srun)
    (tmp_path / "count.py").write_text(
        "import time, ray\nray.init('auto', log_to_driver=False)\nend = time.monotonic() + 60\n"
        "while len([n for n in ray.nodes() if n['Alive']]) < 2 and time.monotonic() < end: time.sleep(0.5)\n"
        "open('found', 'w').write(str([n['Resources'].get('GPU') for n in ray.nodes() if n['Alive']]))\n"
    )
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    env = script_environment(tmp_path) | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", "SLURM_JOB_ID": "12345"}
    env |= {"SLURM_JOB_NODELIST": "host[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    command = [str(SCRIPTS / "slurm_run.sh"), sys.executable, "count.py"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "found").read_text() == "[4.0, 4.0]"
