"""`--vllm-config` in runs: several models, a frozen reference that is served, prefill and decode engines."""

import importlib.util
import json
import time
import urllib.request

import pytest
import torch

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.cluster.launch import LocalCluster
from instep.controller.fleet import Fleet
from instep.engines.keys import headers_for
from instep.engines.spec import Addresses
from instep.engines.vllm_process import node_environment, serve_arguments
from tests.assets import make_checkpoint
from tests.e2e import commands, stub_vllm
from tests.e2e.commands import grpo_arguments, run

TWO_MODELS = """\
vllm:
  - name: actor
    server_groups: [{{num_gpus: 1, overrides: {{max_num_seqs: 8}}}}]
  - name: ref
    model_path: {ref}
    update_weights: false
    server_groups: [{{num_gpus: {num_refs}, num_gpus_per_engine: 1}}]
"""
KL = {"loss": "--use-kl-loss --kl-loss-coef 0.1", "reward": "--kl-coef 0.05 --advantage-estimator reinforce_plus_plus"}
# What depends on clocks and memory.
NOT_COMPARED = ("perf/", "memory/", "alarm/", "sync/")


@pytest.fixture(scope="module")
def models(tiny, tmp_path_factory):
    """`hf` is trained; `ref` is another one of its vocabulary. Heads that vLLM has on a CPU."""
    root = tmp_path_factory.mktemp("models")
    make_checkpoint(root / "hf", head_dim=32)
    make_checkpoint(root / "ref", head_dim=32, seed=3)
    (root / "train.jsonl").write_text((tiny / "train.jsonl").read_text())
    return root


def arguments(models, run_dir, *more):
    hooks = () if "--custom-rm-path" in more else ("--custom-rm-path", "tests.e2e.observed.reward")
    return grpo_arguments(models, run_dir, "--num-rollout", "3", "--micro-batch-size", "4", *hooks, *more)


def served(models, run_dir, *more, backend="embedded", num_refs=1):
    run_dir.mkdir(exist_ok=True, parents=True)
    path = run_dir / "topology.yaml"
    path.write_text(TWO_MODELS.format(ref=models / "ref", num_refs=num_refs))
    given = ["--vllm-config", str(path), "--rollout-backend", backend, "--ref-served-model", "ref"]
    return arguments(models, run_dir, *given, *more)


def rows(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "train/loss" in row]


def compare_with_loaded(models, tmp_path, backend, kl):
    """The largest difference of a reference log-prob of a token that is trained on; the runs agree in their metrics."""
    dump = ["--save-debug-train-data", "{}/{{rollout_id}}_{{rank}}.pt"]
    words = ["--num-rollout", "2", *KL[kl].split(), *(["--rollout-backend", backend] if backend != "embedded" else [])]
    runs = {
        "served": served(models, tmp_path / "served", *words, dump[0], dump[1].format(tmp_path / "s"), backend=backend),
        "loaded": arguments(
            *(models, tmp_path / "loaded", *words, dump[0], dump[1].format(tmp_path / "l")),
            *("--ref-load", str(models / "ref"), "--load", str(models / "hf"), "--vllm-max-num-seqs", "8"),
        ),
    }
    for command in runs.values():
        done = run(command, 300)
        assert done.returncode == 0, done.stderr[-4000:]
    here, there = rows(tmp_path / "served"), rows(tmp_path / "loaded")
    assert len(here) == len(there) == 2
    kept = [name for name in there[0] if not name.startswith(NOT_COMPARED)]
    assert "train/kl_loss" in kept or kl != "loss"
    for mine, other in zip(here, there, strict=True):
        assert {name: mine[name] for name in kept} == pytest.approx({n: other[n] for n in kept}, rel=1e-5, abs=1e-5)
    largest = 0.0
    for i in range(2):
        mine, other = (torch.load(tmp_path / d / f"{i}_0.pt", weights_only=False)["rollout_data"] for d in "sl")
        assert [t.tolist() for t in mine["tokens"]] == [t.tolist() for t in other["tokens"]]
        for a, b in zip(mine["ref_log_probs"], other["ref_log_probs"], strict=True):
            largest = max(largest, (a - b).abs().max().item())
        gap = torch.cat(other["ref_log_probs"]) - torch.cat(other["rollout_log_probs"])
        assert gap.abs().max() > 0.1  # it is another model
    return largest


@pytest.mark.parametrize("kl", ["loss", pytest.param("reward", marks=pytest.mark.slow)])
def test_a_served_reference_is_the_loaded_one(models, tmp_path, kl):
    assert compare_with_loaded(models, tmp_path, "embedded", kl) < 1e-5


@pytest.mark.slow
def test_responses_end_where_the_reference_could_not_score_them(models, tmp_path):
    """Its context is the policy's, and one token has to follow a prompt."""
    more = ["--num-rollout", "1", "--use-kl-loss", "--rollout-max-response-len", "500"]
    done = run(served(models, tmp_path, *more), 300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "prompt and response end at 127 tokens" in done.stdout + done.stderr
    assert rows(tmp_path)[0]["rollout/truncated_ratio"] > 0


@pytest.mark.vllm
@pytest.mark.slow
def test_a_reference_on_vllm_is_the_loaded_one(models, tmp_path):
    assert compare_with_loaded(models, tmp_path, "vllm", "loss") < 1e-5


@pytest.mark.slow
def test_hooks_reach_each_model_by_its_name(models, tmp_path):
    """Beside it: without a KL a frozen model is only served, and no session ever tells it of a version."""
    hook = ["--custom-rm-path", "tests.e2e.topology_hooks.reward", "--no-hook-trial"]
    command = served(models, tmp_path, *hook, "--num-rollout", "2")
    at = command.index("--ref-served-model")
    del command[at : at + 2]
    done = run(command)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [row["sync/version"] for row in rows(tmp_path)] == [2, 3]


def test_the_death_of_the_only_reference_ends_the_run_by_name(models, tmp_path, monkeypatch):
    monkeypatch.setitem(commands.ENVIRONMENT, "KILL_AT", "32")
    hook = ["--custom-rm-path", "tests.e2e.topology_hooks.reward_that_kills_the_reference", "--no-hook-trial"]
    monkeypatch.setitem(commands.ENVIRONMENT, "KILLED", str(tmp_path / "killed"))
    done = run(served(models, tmp_path, *KL["loss"].split(), *hook))
    assert done.returncode == 1 and time.time() - (tmp_path / "killed").stat().st_mtime < 60
    assert "EngineError: engine 1 died (SIGKILL)" in done.stderr, done.stderr
    assert len(rows(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.router
def test_one_of_two_references_that_dies_serves_again(models, tmp_path):
    """As soon as it is ready, and without a session."""
    hook = ["--custom-rm-path", "tests.e2e.topology_hooks.reward_that_kills_a_reference", "--no-hook-trial"]
    more = [*KL["loss"].split(), *hook, "--reward-timeout", "200"]
    done = run(served(models, tmp_path, *more, num_refs=2))
    assert done.returncode == 0, done.stderr[-4000:]
    said = done.stdout + done.stderr
    assert "engine 2 died (SIGKILL): it is restarted" in said and "engine 2 serves again" in said
    assert len(rows(tmp_path)) == 3
    assert {p.name for p in (tmp_path / "logs").glob("router*")} == {"router-ref.log"}  # the actor needs none


@pytest.mark.slow
def test_a_vocabulary_of_another_model_is_refused(models, tmp_path):
    from tests.engines.running import make_checkpoint as make_other

    make_other(tmp_path / "other" / "ref", tied=True)
    (tmp_path / "other" / "hf").symlink_to(models / "hf")
    (tmp_path / "other" / "train.jsonl").symlink_to(models / "train.jsonl")
    done = run(served(tmp_path / "other", tmp_path / "run", *KL["loss"].split()))
    assert done.returncode == 1
    assert "the reference has another vocabulary" in done.stderr and "--ref-served-model ref" in done.stderr


# ---- prefill and decode, on processes that stand for vLLM ------------------------------------------------------------


@pytest.mark.router
def test_prefill_engines_leave_their_router_and_come_back(tiny, tmp_path, monkeypatch):
    """The commands and environments are those of the plan."""
    stub = stub_vllm.install(tmp_path / "stub", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    words = ["--rollout-num-gpus", "4", "--prefill-num-servers", "2", "--debug-rollout-only", "--seed", "7"]
    args = parse(grpo_arguments(tiny, tmp_path, *words)[1:], "train")
    args = args.replace(device="cuda", precision="bf16", num_threads=4)
    cluster = LocalCluster(args, log_dir=tmp_path / "logs", scratch=tmp_path, with_engines=True)
    said: list[str] = []
    restart = cluster.restart_engine
    try:
        cluster.start()
        fleet = Fleet(args, cluster.engines, restart=restart, log_dir=tmp_path / "logs", status=said.append)
        fleet.wait_ready(60)
        fleet.admit(fleet.engines)
        host, port = fleet.hook_attributes()["vllm_model_routers"]["actor"]
        started = stub.started()
        for spec, gpu in zip(plan_engines(args), "4567", strict=True):
            mine = next(entry for entry in started if entry["env"]["CUDA_VISIBLE_DEVICES"] == gpu)
            side_channel = int(mine["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"])
            at = Addresses("127.0.0.1", mine["port"], "127.0.0.1", side_channel_port=side_channel)
            assert mine["argv"] == ["serve", *serve_arguments(spec, at)] and "--weight-transfer-config" in mine["argv"]
            assert node_environment(spec, at, "127.0.0.1").items() <= mine["env"].items()
            assert mine["env"]["VLLM_SERVER_DEV_MODE"] == "1"
        urls = [engine.url for engine in fleet.engines]
        prefills, decodes = (set(column) for column in zip(*asked(host, port, 8), strict=True))
        assert prefills == set(urls[:2]) and decodes == set(urls[2:])
        fleet.engines[0].process.kill()
        fleet.check()
        assert "engine 0 died (SIGKILL): it is restarted" in said
        assert {prefill for prefill, _ in asked(host, port, 8)} == {urls[1]}
        deadline = time.monotonic() + 60
        while not fleet.waiting():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        fleet.admit(fleet.waiting())
        assert {prefill for prefill, _ in asked(host, port, 8)} == set(urls[:2])
        assert fleet.engines[0].url == urls[0]
        fleet.close()
    finally:
        cluster.close()


def asked(host, port, count):
    """Which (prefill, decode) engines answer to `count` sessions, at once."""
    found = set()
    for i in range(count):
        body = json.dumps({"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}).encode()
        headers = {
            "content-type": "application/json",
            "x-session-id": f"group-{i}",
            **headers_for(f"http://{host}:{port}"),
        }
        request = urllib.request.Request(f"http://{host}:{port}/inference/v1/generate", body, headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            found.add(tuple(json.load(answer)["kv_transfer_params"]["path"]))
    return found


def test_nixl_that_is_missing_is_an_error_before_anything_starts(tiny, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nixl" else find_spec(name))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    words = ["--rollout-num-gpus", "2", "--prefill-num-servers", "1", "--debug-rollout-only"]
    args = parse(grpo_arguments(tiny, tmp_path, *words)[1:], "train")
    args = args.replace(device="cuda", precision="bf16", num_threads=4)
    cluster = LocalCluster(args, log_dir=tmp_path / "logs", scratch=tmp_path, with_engines=True)
    with pytest.raises(Exception, match="NIXL, which is not installed here"):
        cluster.start()
    assert not cluster.engines
