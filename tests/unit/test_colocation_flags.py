"""Which of trainer and engines free their GPU memory for the other, as the flags say."""

import pytest

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.controller import device
from instep.errors import ConfigError

COLOCATED = "--colocate --actor-num-gpus-per-node 1 --rollout-backend vllm"


@pytest.mark.parametrize(
    "flags, train, rollout",
    [
        (COLOCATED, True, True),
        (f"{COLOCATED} --device cuda", True, True),
        (f"{COLOCATED} --device cpu", False, False),
        (f"{COLOCATED} --device cpu --offload", True, True),  # and is switched off, with a line, when the run starts
        (f"{COLOCATED} --no-offload-train", False, True),
        (f"{COLOCATED} --no-offload-rollout", True, False),
        (f"{COLOCATED} --offload --no-offload-rollout", True, False),
        (f"{COLOCATED} --device cpu --offload-train", True, False),
        (f"{COLOCATED} --weight-sync single-copy", False, False),
        (f"{COLOCATED} --pause-mode keep", False, False),
        (f"{COLOCATED} --pause-mode keep --offload-train", True, False),
        (f"{COLOCATED} --debug-train-only", False, False),
        ("--actor-num-gpus-per-node 1", False, False),
        ("--actor-num-gpus-per-node 1 --offload", False, False),  # nobody shares a GPU
    ],
)
def test_defaults_are_those_of_slime(flags, train, rollout):
    args = parse(flags.split(), "plan")
    assert (args.offload_train, args.offload_rollout) == (train, rollout)
    assert all(engine.sleeps == rollout for engine in plan_engines(args))


@pytest.mark.parametrize("given", ["--offload", "--offload-train", "--offload-train and --offload-rollout"])
@pytest.mark.parametrize("placed", ["", "--colocate --debug-train-only", "--rollout-external-engine-addrs h:1"])
def test_without_a_shared_gpu_a_line_says_that_nothing_is_freed(given, placed):
    args = parse(f"--actor-num-gpus-per-node 1 {placed} {given.replace('and ', '')}".split(), "plan")
    assert [note for note in args.notes if "offload" in note] == [
        f"{given}: has no effect where trainer and engines do not share GPUs (--colocate)"
    ]


@pytest.mark.parametrize("more, said", [("", True), ("--no-offload-rollout", False), ("--device cpu", False)])
def test_a_line_says_that_engines_that_keep_responses_keep_their_memory(more, said):
    args = parse(f"{COLOCATED} --device cuda --pause-mode keep {more}".split(), "plan")
    assert any("so engines keep their GPU memory" in note for note in args.notes) == said


@pytest.mark.parametrize(
    "flags, what",
    [
        ("--offload-train --no-offload-train", "contradicts --offload-train"),
        ("--offload-rollout --no-offload-rollout", "contradicts --offload-rollout"),
        ("--offload --weight-sync single-copy", "compute with the same weights"),
        ("--offload-rollout --weight-sync single-copy", "compute with the same weights"),
        ("--offload --pause-mode keep", "a sleeping engine keeps no responses"),
    ],
)
def test_what_cannot_be_is_refused(flags, what):
    with pytest.raises(ConfigError) as caught:
        parse(f"{COLOCATED} {flags}".split(), "plan")
    assert what in str(caught.value)


def test_ipc_without_a_shared_gpu_is_refused_where_auto_means_a_gpu(monkeypatch):
    """Also for those who call Python: `instep train` itself reads the command line again."""
    monkeypatch.setattr(device, "device_here", lambda: "cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    flags = "--actor-num-gpus-per-node 1 --rollout-backend vllm --weight-sync ipc"
    with pytest.raises(ConfigError, match="needs a rank of the trainer on each GPU of the engines"):
        device.resolve_on_machine(parse(flags.split(), "plan"), with_engines=False)
    for more in ("--colocate", "--debug-train-only", "--rollout-external-engine-addrs h:1"):
        assert device.resolve_on_machine(parse(f"{flags} {more}".split(), "plan"), with_engines=False).device == "cuda"


def test_ipc_from_memory_that_no_other_process_can_open_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(device, "device_here", lambda: "cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="--weight-sync ipc with expandable_segments in PYTORCH_ALLOC_CONF") as caught:
        device.resolve_on_machine(parse(f"{COLOCATED} --weight-sync ipc".split(), "plan"), with_engines=False)
    assert "use --weight-sync auto" in str(caught.value)
    assert device.resolve_on_machine(parse(COLOCATED.split(), "plan"), with_engines=False).weight_sync == "auto"


def test_engines_beyond_the_trainers_gpus_stay_awake(tmp_path):
    topology = tmp_path / "engines.yaml"
    topology.write_text(
        "vllm:\n  - name: actor\n    server_groups:\n      - worker_type: regular\n        num_gpus: 3\n"
        "        num_gpus_per_engine: 1\n"
    )
    args = parse(f"{COLOCATED} --vllm-config {topology}".split(), "plan")
    assert [engine.sleeps for engine in plan_engines(args)] == [True, False, False]


def test_a_vllm_that_sleeps_gets_what_it_needs_for_that():
    (engine,) = plan_engines(parse(COLOCATED.split(), "plan"))
    named = [word for word in engine.flags if word.endswith(".Middleware")]
    assert named[-2:] == ["instep_engine.vllm.sleep.Middleware", "instep_engine.vllm.auth.Middleware"]
    assert "--enable-sleep-mode" in engine.flags
    (awake,) = plan_engines(parse(f"{COLOCATED} --no-offload-rollout".split(), "plan"))
    assert not {"--enable-sleep-mode", "instep_engine.vllm.sleep.Middleware"} & set(awake.flags)
