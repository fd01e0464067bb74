"""`--cluster ray`: a Ray of the run's own, endings without orphans, and the scripts; see `test_ray_cluster.py`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.bounds import allowed, until
from tests.e2e import commands
from tests.e2e.commands import children, gone_within, grpo_arguments, run, start, words_of
from tests.e2e.conftest import LOOPBACK
from tests.e2e.test_engines import kill_one, two_engines

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
    """Its weights travel in a group that meets at a port of rank 0's node."""
    process = start_and_train(on_ray(tiny, tmp_path, *LONG, "--weight-sync", "nccl"))
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


@pytest.mark.parametrize("at", ["its start", pytest.param("work", marks=pytest.mark.slow)])
def test_a_killed_controller_takes_its_ray_with_it(tiny, tmp_path, ray_tmp, at):
    """At its start ranks and engines have begun, and import what they need."""
    if at == "work":
        process = start_and_train(on_ray(tiny, tmp_path, *LONG))
    else:
        process = start(on_ray(tiny, tmp_path, *LONG))
        until(
            lambda: process.poll() is not None or matching(children(process.pid), "engines.embedded"), 120
        )  # the last
    ours = children(process.pid)
    assert all(matching(ours, name) for name in ("raylet", "ray::Host", "worker_main", "engines.embedded"))
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
        ("worker_main", ["WorkerError", "actor rank 0", "SIGKILL", "may have run out of memory"]),
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


@pytest.mark.slow
@pytest.mark.router
def test_a_killed_engine_costs_no_sample_on_ray(tiny, tmp_path, ray_tmp):
    steps = kill_one(tmp_path, two_engines(tiny, tmp_path, "embedded", "--cluster", "ray", "--ray-address", "local"))
    assert max(row["sync/probe_max_abs_diff"] for row in steps) <= 1e-5


@pytest.mark.parametrize(
    "address, text", [("127.0.0.1:1", "no Ray at '127.0.0.1:1'"), ("ray://127.0.0.1:1", "(no ray://)")]
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
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
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
