"""Which engines and routers a command line or a `--vllm-config` means: exact plans."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from instep.arguments.parse import parse
from instep.cli import main
from instep.cluster.engine_plan import describe_engines, plan_engines, plan_routers
from instep.cluster.placement import describe, make_plan
from instep.engines.dialect import Parallel
from instep.engines.kind import kind_of
from instep.engines.topology import max_model_lens
from instep.engines.vllm_process import node_environment, serve_arguments
from instep.errors import ConfigError
from instep.rollout.vllm_rollout import get_model_url
from tests.plans import (
    APART,
    AT,
    AUTH,
    COMMON,
    DISAGGREGATED,
    ENDS,
    FAST,
    FED,
    GUIDE,
    ROUTED,
    STICKY,
    arguments,
    engines,
    refusal,
    routers,
    slots,
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_cuda_graphs_reach_all_samples_of_a_rollout():
    def sizes(words: str) -> list[str]:
        (engine,) = engines(f"--rollout-num-gpus 1 --device cuda --rollout-batch-size {words}")
        return engine.own.get("cudagraph_capture_sizes", [])[-2:]

    assert sizes("64 --n-samples-per-prompt 8") == []  # vLLM's own reach 512
    for many in ("65 --n-samples-per-prompt 8", "640 --n-samples-per-prompt 16 --vllm-max-num-seqs 600"):
        assert sizes(many) == ["960", "1024"]
    for own in (
        *("--vllm-max-num-seqs 512", "--vllm-enforce-eager", "--vllm-max-cudagraph-capture-size 256"),
        *("--vllm-compilation-config.mode 0", "--vllm-speculative-config.num_speculative_tokens 3"),
    ):
        assert sizes(f"64 --n-samples-per-prompt 16 {own}") == []


# ---- the seeds' examples ---------------------------------------------------------------------------------------------


def test_the_guides_models():
    found = engines("--vllm-gpu-memory-utilization 0.7", GUIDE)
    assert [(e.name, e.model, e.path, e.role, e.update_weights) for e in found] == [
        ("engine 0", "actor", "models/policy", "regular", True),
        ("engine 1", "actor", "models/policy", "regular", True),
        ("engine 2", "ref", "/path/to/ref_model", "regular", False),
        ("engine 3", "ref", "/path/to/ref_model", "regular", False),
    ]
    assert [e.slots for e in found] == [
        slots(1, range(4)),
        slots(1, range(4, 8)),
        slots(2, (0, 1)),
        slots(2, (2, 3)),
    ]
    assert [e.parallel for e in found] == [Parallel(4), Parallel(4), Parallel(2), Parallel(2)]
    assert serve_arguments(found[2], AT) == [
        *("/path/to/ref_model", "--gpu-memory-utilization", "0.7", *COMMON, "--tensor-parallel-size", "2"),
        *("--host", "127.0.0.1", "--port", "8000"),
    ]
    actor, ref = routers("--router-policy round_robin", GUIDE)
    assert (actor.model, actor.engines, actor.default) == ("actor", (0, 1), True)
    assert (ref.model, ref.engines, ref.default) == ("ref", (2, 3), False)
    assert ref.arguments("127.0.0.1", 3000, 3001) == [
        *("--host", "127.0.0.1", "--port", "3000", "--prometheus-port", "3001", *ROUTED, "--policy", "round_robin"),
    ]
    args = arguments("", GUIDE)
    assert (args.rollout_num_gpus, args.rollout_num_engines, args.rollout_backend) == (12, 4, "vllm")


MIXED = """\
vllm:
  - {name: actor, server_groups: [{worker_type: regular, num_gpus: 2}]}
  - {name: ref, model_path: ref, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 1}]}
"""


@pytest.mark.parametrize(
    "words, ports",
    [
        ("--rollout-backend embedded", [None, None, None]),
        ("--rollout-backend embedded --engine-port 9000", [9000, 9001, 9002]),
        ("--rollout-backend vllm", [None, None, None]),
    ],
)
def test_each_model_is_served_at_a_port_of_its_own(words, ports):
    """That of its gate, before its router or its only engine."""
    args = arguments(words, MIXED).replace(port=8000)  # as `instep serve` does
    found = plan_engines(args)
    assert [engine.port for engine in found] == ports
    assert [router.port for router in plan_routers(args, found)] == [8000, 8001]


def test_hooks_reach_each_model_by_name():
    args = SimpleNamespace(
        vllm_router_ip="127.0.0.1",
        vllm_router_port=3000,
        vllm_model_routers={"actor": ("127.0.0.1", 3000), "ref": ("127.0.0.1", 3100)},
    )
    assert get_model_url(args, "ref") == "http://127.0.0.1:3100/inference/v1/generate"
    assert get_model_url(args, "ref", "/v1/completions") == "http://127.0.0.1:3100/v1/completions"
    assert get_model_url(args) == get_model_url(args, "actor")
    with pytest.raises(ConfigError, match="no model 'reward' is served"):
        get_model_url(args, "reward")


def test_the_guides_engine_of_two_nodes():
    """ "If serving one model with 2 nodes and 16 GPUs, this value should be 16."""
    (engine,) = engines("--rollout-num-gpus 16 --rollout-num-gpus-per-engine 16")
    assert engine.nodes == (slots(1, range(8)), slots(2, range(8)))
    assert (engine.parallel, engine.num_gpus) == (Parallel(16), 16)
    both = ["models/policy", *FED, "--tensor-parallel-size", "16", "--nnodes", "2"]
    where = ["--master-addr", "10.0.0.1", "--master-port", "29501"]
    assert serve_arguments(engine, AT, 0) == [
        *both,
        "--node-rank",
        "0",
        *where,
        "--host",
        "127.0.0.1",
        "--port",
        "8000",
    ]
    assert serve_arguments(engine, AT, 1) == [*both, "--node-rank", "1", *where, "--headless"]
    assert node_environment(engine, AT, "10.0.0.2") == {"VLLM_HOST_IP": "10.0.0.2"}


def test_the_guides_large_expert_parallelism_over_nodes():
    words = "--rollout-num-gpus 16 --rollout-num-gpus-per-engine 16 --vllm-enable-expert-parallel"
    (engine,) = engines(words + " --vllm-data-parallel-size 8")
    assert engine.parallel == Parallel(2, data=8, expert=16)
    assert serve_arguments(engine, AT, 1) == [
        *("models/policy", "--enable-expert-parallel", "--data-parallel-size", "8", *FED),
        *("--tensor-parallel-size", "2"),
        *("--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29501"),
        *("--data-parallel-rpc-port", "29550", "--headless"),
    ]
    (engine,) = engines(words + " --vllm-pipeline-parallel-size 2")
    assert engine.parallel == Parallel(8, pipeline=2, expert=8)
    assert "--data-parallel-rpc-port" not in serve_arguments(engine, AT, 1)


def test_the_guides_ppo_example():
    """4 (actor) + 4 (critic) + 8 (rollout) = 16 GPUs: eight engines of one."""
    words = "--advantage-estimator ppo --actor-num-gpus-per-node 4 --critic-num-gpus-per-node 4 --rollout-num-gpus 8"
    found = engines(words)
    assert [e.slots for e in found] == [slots(1, [gpu]) for gpu in range(8)]
    assert make_plan(arguments(words)).num_gpus == 16


def test_colocated_engines_lie_on_the_trainers_gpus():
    words = "--colocate --actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 4"
    found = engines(words + " --rollout-num-gpus 3")
    assert [e.slots for e in found] == [slots(n, gpus) for n in (0, 1) for gpus in (range(4), range(4, 8))]
    assert make_plan(arguments(words)).num_gpus == 16
    (whole,) = engines("--colocate --actor-num-nodes 2 --rollout-num-gpus-per-engine 16")
    assert whole.nodes == (slots(0, range(8)), slots(1, range(8)))


def test_the_guides_prefill_servers_on_two_gpus():
    words = "--actor-num-gpus-per-node 1 --rollout-num-gpus 2 --prefill-num-servers 1 --engine-port 8000"
    prefill, decode = engines(words)
    assert (prefill.role, prefill.slots, prefill.port) == ("prefill", slots(0, [1]), 8000)
    assert (decode.role, decode.slots, decode.port) == ("decode", slots(0, [2]), 8001)
    assert serve_arguments(prefill, AT) == [
        *("models/policy", "--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}'),
        *(*APART, "--tensor-parallel-size", "1", "--host", "127.0.0.1", "--port", "8000"),
    ]
    assert '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}' in decode.flags
    assert node_environment(decode, AT, "10.0.0.2") == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.2",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
    }
    (router,) = routers(words)
    assert router.arguments("127.0.0.1", 1, 2, [("prefill", "http://p"), ("decode", "http://d")])[6:] == [
        *(
            *STICKY,
            "--vllm-pd-disaggregation",
            "--kv-connector",
            "nixl",
            "--prefill",
            "http://p",
            "--decode",
            "http://d",
        ),
    ]
    assert [
        e.role for e in engines("--rollout-num-gpus 8 --rollout-num-gpus-per-engine 2 --prefill-num-servers 3")
    ] == [
        *("prefill", "prefill", "prefill", "decode"),
    ]


def test_prefill_and_decode_on_a_vllm_whose_token_route_passes_over_the_cache(monkeypatch):
    monkeypatch.setattr("instep.engines.vllm.installed_version", lambda _: "0.26.0")
    given = "--vllm-middleware my.Own --rollout-num-gpus 2"
    for engine in engines(f"{given} --prefill-num-servers 1"):
        at = engine.flags.index("instep_engine.vllm.kv_params.Middleware")
        assert engine.flags[at - 1] == "--middleware" and engine.flags[:2] == ("--middleware", "my.Own")
        assert engine.flags[at + 1 : at + 3] == ("--middleware", AUTH)  # the last one is the outermost
        assert FAST not in engine.flags and "--scheduler-cls" not in engine.flags
    for more in ("", " --no-fast-log-probs"):
        for engine in engines(given + more):
            middleware = [flag for name, flag in pairwise(engine.flags) if name == "--middleware"]
            assert middleware == (["my.Own", FAST, AUTH] if not more else ["my.Own", AUTH])
            assert ("--scheduler-cls" in engine.flags) == (not more)
    (own, _) = engines("--vllm-scheduler-cls my.Scheduler --rollout-num-gpus 2")
    assert own.flags.count("--scheduler-cls") == 1


# ---- more of --vllm-config -------------------------------------------------------------------------------------------


def test_groups_overrides_and_placeholders():
    words = "--vllm-max-num-batched-tokens 8k --vllm-enable-prefix-caching --vllm-compilation-config.mode 3"
    args = arguments(words, DISAGGREGATED)
    first, second, decode = plan_engines(args)
    assert [e.slots for e in (first, second)] == [slots(1, (0, 1)), slots(1, (2, 3))]
    assert decode.slots == slots(2, range(8))  # what the placeholder leaves of node 1 is too small
    plan = make_plan(args)
    assert plan.reserved == slots(1, (4, 5)) and plan.nodes[1] == list(range(6)) and plan.num_gpus == 22
    assert ("placeholder", 1, "4-5") in describe(plan)
    assert first.flags[:4] == ("--enable-prefix-caching", "--compilation-config.mode", "3", "--max-num-batched-tokens")
    assert first.words["max_num_batched_tokens"] == ["--max-num-batched-tokens", "16384"]
    assert decode.parallel == Parallel(2, data=4, expert=8)
    assert decode.flags == (
        *("--max-num-batched-tokens", "8k", "--data-parallel-size", "4", "--enable-expert-parallel"),
        *("--no-enable-prefix-caching", "--compilation-config", '{"cudagraph_mode": "FULL_DECODE_ONLY"}'),
        *("--cudagraph-capture-sizes", "1", "2", "--hf-overrides", "{}"),
        *("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}'),
        *APART,
    )
    assert decode.num_side_channel_ports == 4 and first.num_side_channel_ports == 1
    assert (args.rollout_num_gpus, args.rollout_num_engines) == (14, 3)
    (router,) = plan_routers(args, [first, second, decode])
    assert router.arguments("h", 1, 2, [("prefill", "a"), ("prefill", "b"), ("decode", "c")])[6:] == [
        *(
            *STICKY,
            "--vllm-pd-disaggregation",
            "--kv-connector",
            "nixl",
            "--prefill",
            "a",
            "--prefill",
            "b",
            "--decode",
            "c",
        ),
    ]


def test_another_connector():
    words = "--rollout-num-gpus 2 --prefill-num-servers 1 --vllm-kv-transfer-config"
    found = plan_engines(
        parse([*words.split(), '{"kv_connector":"MooncakeConnector","kv_role":"kv_both"}'], "plan"),
    )
    assert [e.kv_connector for e in found] == ["mooncake", "mooncake"]
    assert [e.num_side_channel_ports for e in found] == [0, 0] and node_environment(found[0], AT, "h") == {}
    with pytest.raises(ConfigError, match="names no connector that the router knows"):
        parse([*words.split(), '{"kv_connector":"ExampleConnector","kv_role":"kv_both"}'], "plan")


def test_a_group_of_the_usual_size_and_a_frozen_model_first():
    config = """
vllm:
  - {name: judge, model_path: m, update_weights: false, server_groups: [{num_gpus: 2}]}
  - {name: actor, server_groups: [{num_gpus: 4}]}
"""
    found = engines("--rollout-num-gpus-per-engine 2 --rollout-num-gpus 6", config)
    assert [(e.model, e.num_gpus) for e in found] == [("judge", 2), ("actor", 2), ("actor", 2)]
    assert [(r.model, r.default) for r in routers("--rollout-num-gpus-per-engine 2", config)] == [
        ("judge", False),
        ("actor", True),
    ]


def test_colocated_models_begin_on_the_trainers_gpus():
    found = engines("--colocate", GUIDE)
    assert [e.slots for e in found] == [slots(0, range(4)), slots(0, range(4, 8)), slots(1, (0, 1)), slots(1, (2, 3))]
    assert arguments("--colocate --rollout-num-gpus 3", GUIDE).rollout_num_gpus == 12
    behind = "vllm: [{name: actor, server_groups: [{worker_type: placeholder, num_gpus: 4}, {num_gpus: 4}]}]"
    assert [e.slots for e in engines("--colocate", behind)] == [slots(0, [gpu]) for gpu in range(4, 8)]
    text = refusal("--colocate --actor-num-nodes 2", GUIDE)
    assert "take 12 GPUs, but the trainer, which shares with engines (--colocate), has 16" in text
    assert "add a placeholder group" in text


def test_a_part_of_a_run():
    assert engines("--debug-train-only", GUIDE) == [] and routers("--debug-train-only", GUIDE) == []
    assert engines("--debug-rollout-only", GUIDE)[0].slots == slots(0, range(4))


def test_a_router_of_ones_own():
    (router,) = routers("--rollout-num-gpus 2 --vllm-router-ip 10.1.1.1 --vllm-router-port 3000")
    assert router.external == ("10.1.1.1", 3000) and router.engines == (0, 1) and router.default


def test_what_instep_adds():
    """On a CPU more; what the command line or an override says wins."""
    overrides = "{dtype: float16, enforce_eager: false}"
    config = f"vllm: [{{name: actor, server_groups: [{{num_gpus: 1, overrides: {overrides}}}]}}]"
    (engine,) = engines("--device cpu --vllm-kv-cache-memory-bytes 128M", config)
    assert engine.flags == (
        *("--kv-cache-memory-bytes", "128M", "--dtype", "float16", "--no-enforce-eager"),
        *("--seed", "1234", "--logprobs-mode", "processed_logprobs", "--uvicorn-log-level", "warning"),
        *("--weight-transfer-config", '{"backend": "instep_shm"}', "--enable-scale-out"),
        *ENDS,
        *("--no-enable-chunked-prefill", "--distributed-executor-backend", "uni"),
    )
    (engine,) = engines("--device cpu --rollout-num-gpus-per-engine 2")
    assert "--distributed-executor-backend" not in engine.flags and "float32" in engine.flags
    assert "bfloat16" in engines("--device cuda")[0].flags and "float32" in engines("--precision fp32")[0].flags


def test_embedded_engines_in_groups():
    words, config = (
        "--rollout-backend embedded --device cpu",
        """
vllm:
  - {name: actor, server_groups: [{num_gpus: 2, overrides: {max_model_len: 64}}]}
  - {name: ref, model_path: r, update_weights: false, server_groups: [{num_gpus: 1, overrides: {dtype: bfloat16}}]}
""",
    )
    args = arguments(words + " --vllm-max-num-seqs 8", config)
    found = plan_engines(args)
    commands = [kind_of("embedded").command(args, engine, AT)[3:] for engine in found]
    where = "--host 127.0.0.1 --port 8000 --device cpu".split()
    assert commands[0] == ["models/policy", *where, *"--dtype float32 --max-num-seqs 8 --max-model-len 64".split()]
    assert commands[2] == ["r", *where, "--max-num-seqs", "8", "--dtype", "bfloat16"] and len(commands) == 3
    assert max_model_lens(args) == [64]


def test_the_command_prints_the_plan(capsys):
    arguments("", GUIDE)
    words = "plan --vllm-config topology.yaml --hf-checkpoint models/policy --engine-port 8000".split()
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "20 GPUs on 3 nodes of 8" in text
    assert "model actor, which rollouts use by default" in text
    assert "engines 0-1: regular, 4 GPUs each (TP 4), port 8000-8001, gets the trainer's weights" in text
    assert "engines 2-3: regular, 2 GPUs each (TP 2), port 8002-8003, keeps its weights" in text
    assert f"vllm serve /path/to/ref_model {' '.join(COMMON)} --tensor-parallel-size 2 --host HOST --port 8002" in text
    assert text.count(f"router: vllm-router --host HOST --port PORT --prometheus-port PORT {' '.join(STICKY)}") == 2


@pytest.mark.parametrize(
    "words,config",
    [
        (
            "--rollout-num-gpus 16 --rollout-num-gpus-per-engine 16 --vllm-data-parallel-size 8 "
            "--vllm-enable-expert-parallel",
            "",
        ),
        ("--actor-num-gpus-per-node 1 --rollout-num-gpus 2 --prefill-num-servers 1", ""),
        ("", GUIDE),
    ],
    ids=["nodes", "prefill", "models"],
)
def test_the_docs_show_what_the_command_prints(words, config):
    text = (Path(__file__).parents[2] / "docs/engines_topologies.md").read_text()
    assert "\n".join(describe_engines(arguments(words, config))) in text
