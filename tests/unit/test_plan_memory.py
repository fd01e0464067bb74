"""`instep plan` counts the memory of each GPU by item and phase, refuses what cannot fit, and names what does."""

import json
from functools import partial
from pathlib import Path

import pytest

from instep.arguments.parse import parse
from instep.cli import main
from instep.cluster.engine_plan import planned_way
from instep.models.config_file import read_config
from instep.models.sizes import shape_of
from instep.preflight.plan import trainer
from instep.preflight.plan.memory import allocated, plan_memory
from tests.assets import make_checkpoint
from tests.memory_plans import SIDE_BY_SIDE, make_folder, of, only, words

GPU_MAIN = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu-main.json"


@pytest.fixture
def folder(tmp_path):
    return partial(make_folder, tmp_path)


@pytest.fixture
def plan(tmp_path):
    return partial(words, tmp_path)


def test_parameters_are_those_of_the_checkpoint_or_follow_from_its_configuration(tmp_path, folder):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for family in ("qwen3", "qwen2", "llama"):
        (tmp_path / family).mkdir()
        config = AutoConfig.for_model(
            family, hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=2, head_dim=16, vocab_size=1000, tie_word_embeddings=family == "qwen3",
        )  # fmt: skip
        config.save_pretrained(tmp_path / family)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        counted = sum(p.numel() for p in model.parameters())
        assert shape_of(str(tmp_path / family)).total == counted, family
        layer = sum(p.numel() for p in model.model.layers[0].parameters())
        assert shape_of(str(tmp_path / family)).layer == layer
    checkpoint = make_checkpoint(tmp_path / "whole")
    from safetensors import safe_open

    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        held = {name: file.get_slice(name).get_shape() for name in file.keys()}
    tied = read_config(checkpoint)["tie_word_embeddings"]
    count = sum(torch.Size(shape).numel() for name, shape in held.items() if not (tied and name == "lm_head.weight"))
    assert shape_of(str(checkpoint)).total == count
    assert shape_of(folder("4b")).total == pytest.approx(4.02e9, rel=0.001)
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    experts |= {"hidden_size": 2048, "num_key_value_heads": 4, "tie_word_embeddings": False, "model_type": "qwen3_moe"}
    mixed = shape_of(folder("4b", **experts))
    assert mixed.total == pytest.approx(30.53e9, rel=0.001) and mixed.used == pytest.approx(3.0e9, rel=0.05)
    assert mixed.factors(["experts"]) == pytest.approx(48 * 128 * 3 * (2048 + 768))
    assert mixed.factors(["experts"], 2, 8) == pytest.approx(48 * 16 * 3 * (2048 + 768))
    assert shape_of(None) is None and shape_of(str(tmp_path)) is None


@pytest.fixture
def of_older_trees(monkeypatch):
    """The plan of what runs did that were measured before: logits of several chunks were all computed again, and FSDP2
    cast each layer on one rank, too."""
    monkeypatch.setattr(trainer, "has_room", lambda *_: False)
    monkeypatch.setattr(trainer, "kept_logits", lambda r: r.responses * (r.responses <= trainer._chunk(r)))


@pytest.mark.parametrize("job", ["ipc-hf", "single-copy-hf", "single-copy-megatron"])
def test_runs_needed_what_is_planned(plan, job, of_older_trees):
    """`scripts/gpu_main.py` on H100 and H200: 0.6 B parameters, 8,192 tokens a micro-batch, prompts of 191 tokens."""
    runs = json.loads(GPU_MAIN.read_text())["runs"]
    row = next(row for run in runs for row in run["rows"] if row["job"] == job)  # the oldest
    way, _, backend = job.rpartition("-")
    flags = f"--train-backend {backend} --weight-sync {way} --use-dynamic-batch-size --max-tokens-per-gpu 8192 "
    flags += "--n-samples-per-prompt 8 --rollout-max-prompt-len 191 --rollout-max-response-len 128"
    planned = allocated(parse(plan(flags, size="0.6b"), "plan"))
    assert planned == pytest.approx(row["median"]["perf/gpu_peak_bytes"], rel=0.05)
    assert planned == pytest.approx(row["median"]["memory/train/trainer_peak_bytes"], rel=0.05)


def test_an_engine_awake_and_asleep_takes_what_was_seen(plan):
    runs = json.loads(GPU_MAIN.read_text())["runs"]
    seen = next(row["first"] for run in runs for row in run["rows"] if row["job"] == "ipc-hf")
    flags = (
        "--offload --weight-sync ipc --use-dynamic-batch-size --max-tokens-per-gpu 8192 --vllm-kv-cache-memory-bytes "
    )
    kind = only(plan(f"{flags} 4294967296 --rollout-batch-size 16 --vllm-max-model-len 512", size="0.6b"))
    rollout = seen["memory/rollout/others_bytes"] + seen["memory/rollout/trainer_reserved_bytes"]
    assert kind.need("rollout") == pytest.approx(rollout, rel=0.1)
    asleep = sum(i.gpu["training"] for i in kind.items if "process" in i.name)
    assert asleep == pytest.approx(seen["memory/train/others_bytes"], rel=0.1)


@pytest.mark.parametrize(  # peak GiB of a script with its own, smaller chunks of logits; sequences of 640 tokens, H100
    "flags, seen, rel",
    [
        ("--no-torch-compile --recompute-granularity full", 13.9, 0.12),
        ("--no-torch-compile", 73.6, 0.1),
        ("", 50.7, 0.1),
    ],
)
def test_a_step_of_32_768_tokens_needs_what_was_seen(plan, flags, seen, rel, of_older_trees):
    flags += " --use-dynamic-batch-size --max-tokens-per-gpu 32768"
    words = plan(f"{flags} --rollout-max-prompt-len 128 --rollout-max-response-len 512", size="0.6b")
    assert allocated(parse(words, "plan"), shares=False, synced=False) / 2**30 == pytest.approx(seen, rel=rel)


@pytest.mark.parametrize(
    "flags, way, buckets",
    [
        ("", "ipc", 1.074),
        ("--weight-sync lora --lora-rank 16", "lora_ipc", 4 * 33.03e6 / 1e9),
        (
            "--weight-sync lora --lora-rank 16 --train-backend hf --actor-num-nodes 2 --num-gpus-per-node 1",
            "lora_disk",
            0.0,
        ),
        ("--weight-sync shm", "shm", 0.0),
        ("--rollout-num-gpus 1", "nccl", 1.074),
        ("--rollout-num-gpus 1 --rollout-backend embedded --device cpu", "shm", 0.0),
        ("--train-backend megatron --actor-num-nodes 2 --num-gpus-per-node 1", "disk", 0.0),
    ],
)
def test_the_plan_knows_the_way_that_a_run_takes(plan, flags, way, buckets):
    words = [word for word in plan(flags) if word != "--colocate" or "--rollout-num-gpus" not in flags]
    args = parse(words, "plan")
    assert planned_way(args) == way
    for kind in plan_memory(args):
        held = [i.gpu["rollout"] for i in kind.items if i.name == "sync buckets"]
        assert held in ([], [pytest.approx(1e9 * buckets, rel=1e-3)])


def test_the_plan_heeds_what_the_allocator_is_told(plan, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert planned_way(parse(plan(""), "plan")) == "shm"
    assert planned_way(parse(plan("--weight-sync lora --lora-rank 16"), "plan")) == "lora"


def test_what_each_choice_saves(plan):
    fixed = "--use-dynamic-batch-size --max-tokens-per-gpu 8192"
    one = only(plan(fixed))
    assert of(one, "masters") == pytest.approx(16.1, rel=0.01) and of(one, "moments") == pytest.approx(32.2, rel=0.01)
    assert one.need("rollout") < 75e9 and one.need("training") > one.need("sync") > one.need("log-probs")
    assert of(only(plan(f"{fixed} --optimizer adamw_8bit")), "moments") == pytest.approx(8.2, rel=0.01)
    offloaded = only(plan(f"{fixed} --optimizer-cpu-offload"))
    assert of(offloaded, "moments") == 0 and offloaded.host == one.host
    four = only(plan(f"{fixed} --actor-num-gpus-per-node 4"))
    assert four.count == 4 and 4 * of(four, "masters") == pytest.approx(of(one, "masters"))
    assert of(four, "activations") == of(one, "activations")
    full, selective = (only(plan(f"{fixed} --recompute-granularity {kind}")) for kind in ("full", "selective"))
    assert of(full, "activations") < 0.2 * of(selective, "activations") < of(one, "activations")
    halved = only(plan("--use-dynamic-batch-size --max-tokens-per-gpu 4096"))
    assert of(halved, "activations") == pytest.approx(of(one, "activations") / 2, rel=0.2), (
        "prompts of parted groups count twice"
    )
    adapter = only(plan(f"{fixed} --lora-rank 16 --weight-sync lora"))
    assert of(adapter, "moments") < 0.3 and of(adapter, "weights") == pytest.approx(8.0, rel=0.05)
    copy = only(plan(f"{fixed} --weight-sync single-copy"))
    assert [i.gpu["training"] for i in copy.items if (i.owner, i.name) == ("actor", "weights")] == [0.0]


def test_an_adapter_leaves_megatron_a_base_without_states(plan):
    fixed = "--lora-rank 16 --train-backend megatron --actor-num-gpus-per-node 2"
    whole = only(plan(f"{fixed} --use-kl-loss --kl-loss-coef 0.1"))
    alone = only(plan("--lora-rank 16"))
    assert of(whole, "weights") == pytest.approx(8.0, rel=0.05) and of(whole, "masters") == of(alone, "masters")
    assert of(whole, "gradients") == of(whole, "masters") == of(whole, "moments") / 2
    assert not [i for i in whole.items if "reference" in i.name]  # it is the policy with its adapter off
    assert of(only(plan(f"{fixed} --use-distributed-optimizer")), "moments") == of(whole, "moments") / 2
    halved = only(plan(f"{fixed} --tensor-model-parallel-size 2"))
    (held,) = [i.gpu["training"] for i in halved.items if (i.owner, i.name) == ("actor", "weights")]
    assert held == pytest.approx(4.0e9, rel=0.05)
    assert of(whole, "masters") / 2 < of(halved, "masters") < 0.9 * of(whole, "masters")  # A or B is whole on each rank


@pytest.mark.parametrize(
    "flags, tp, views",
    [
        ("", 1, True),
        ("--tensor-model-parallel-size 2 --rollout-num-gpus-per-engine 2", 2, True),
        ("--rollout-num-gpus-per-engine 2", 1, False),  # the engine cuts its weights, these ranks do not
        ("--tensor-model-parallel-size 2", 2, False),
        ("--precision fp32", 1, True),
    ],
)
def test_ranks_beside_an_engine_share_masters_and_moments_and_have_whole_gradients(plan, flags, tp, views):
    """Single copy on four GPUs. The parameters by hand: 36 layers of width 2560, 32 heads of 128, 8 key heads."""
    layer = 2560 * 128 * (32 + 8 + 8 + 32) + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    embedding = 151936 * 2560
    total, e = 36 * layer + embedding + 2560, 4 if "fp32" in flags else 2
    more = "--use-dynamic-batch-size --max-tokens-per-gpu 1024 --recompute-granularity full --gpu-memory-gb 200"
    kind = only(plan(f"{more} --weight-sync single-copy --actor-num-gpus-per-node 4 {flags}"))
    assert kind.count == 4
    actor = {item.name: item.gpu for item in kind.items if item.owner == "actor"}
    assert actor["gradients"] == {"training": 4 * total / tp}
    for name, size in {"masters": total, "moments": 2 * total, "weights": 0 if views else e * total / tp}.items():
        size *= 4 / 4 if name != "weights" else 1  # float32 over four ranks
        assert actor[name] == dict.fromkeys(("rollout", "log-probs", "training", "sync"), size), name
    assert actor["work"]["sync"] == e * embedding * (1 + tp / 4)


def test_a_rank_has_a_copy_in_bf16_where_a_third_of_the_gpu_is_left(plan):
    for flags, weights in (("--optimizer adamw_8bit", 8.04), ("", 1.18), ("--gpu-memory-gb 141", 8.04)):
        kind = only(plan(f"--use-dynamic-batch-size --max-tokens-per-gpu 2048 {flags}"))
        (item,) = [i for i in kind.items if (i.owner, i.name) == ("actor", "weights")]
        held = {phase: pytest.approx(weights * 1e9, rel=0.01) for phase in ("log-probs", "training", "sync")}
        assert item.gpu == held and item.host == 0, flags
        moments = 2.03 if "8bit" in flags else 8
        (parked,) = [i.host for i in kind.items if "parked" in i.name]
        assert parked == pytest.approx((4 + moments) * 4.022e9, rel=0.01), "the copy is written anew"
    for size, (copy, gradients, masters) in {80: (1.18, 8.04, 8.04), 141: (8.04, 16.09, 8.04)}.items():
        flags = f"--max-tokens-per-gpu 2048 --optimizer adamw_8bit --actor-num-gpus-per-node 2 --gpu-memory-gb {size}"
        two = only(plan(f"--use-dynamic-batch-size {flags}"))
        found = [
            next(i for i in two.items if i.name == name).gpu["training"] for name in ("weights", "gradients", "masters")
        ]
        assert found == pytest.approx([n * 1e9 for n in (copy, gradients, masters)], rel=0.01)


def test_what_leaves_during_a_sync_is_still_there(plan):
    for backend, count in (("hf", 1), ("megatron", 2)):
        flags = f"--train-backend {backend} --weight-sync ipc --actor-num-gpus-per-node {count}"
        kind = only(plan(f"{flags} --offload --use-dynamic-batch-size --max-tokens-per-gpu 1024 --gpu-memory-gb 200"))
        for name in ("masters", "moments"):
            (gpu,) = [item.gpu for item in kind.items if (item.owner, item.name) == ("actor", name)]
            assert gpu["sync"] == gpu["training"] > 0 and "rollout" not in gpu, (backend, name)


def test_megatron_shares_by_tensor_parallel_ranks_and_states_by_all_if_asked(plan):
    megatron = "--train-backend megatron --actor-num-gpus-per-node 4 --use-dynamic-batch-size --max-tokens-per-gpu 8192"
    plain, spread = only(plan(megatron)), only(plan(f"{megatron} --use-distributed-optimizer"))
    assert of(plain, "masters") == pytest.approx(4 * of(spread, "masters")) == pytest.approx(16.1, rel=0.01)
    assert of(plain, "weights") == of(spread, "weights") == pytest.approx(8.04, rel=0.01)
    for flags in (megatron, f"{megatron} --use-distributed-optimizer"):  # 2 bytes and a scale for each 256
        exact, slim = only(plan(flags)), only(plan(f"{flags} --optimizer adamw_8bit"))
        assert of(slim, "moments") == pytest.approx(of(exact, "moments") * (2 + 8 / 256) / 8, rel=1e-3)
        assert of(slim, "masters") == of(exact, "masters")
    half = only(plan(f"{megatron} --tensor-model-parallel-size 2"))
    assert of(half, "gradients") == pytest.approx(of(plain, "gradients") / 2)
    assert of(plain, "activations") > of(half, "activations") > 0.5 * of(plain, "activations"), "states are whole"


def test_a_reference_is_there_while_it_scores_and_a_critic_has_gpus_of_its_own(plan):
    kind = only(plan("--use-kl-loss --kl-loss-coef 0.1"))
    (reference,) = [item for item in kind.items if item.name == "reference"]
    assert set(reference.gpu) == {"log-probs"} and reference.host == reference.gpu["log-probs"]
    stays = only(plan(f"--use-kl-loss --kl-loss-coef 0.1 --gpu-memory-gb 200 {SIDE_BY_SIDE}"))
    assert len(next(item for item in stays.items if item.name == "reference").gpu) == 4
    actor, critic = plan_memory(parse(plan("--advantage-estimator ppo"), "plan"))
    assert {i.owner for i in actor.items} == {"actor", "engine 0"} and {i.owner for i in critic.items} >= {"critic"}
    assert of(critic, "masters") == pytest.approx(of(actor, "masters"), rel=0.01)


def test_the_table_and_its_json_say_the_same(plan, capsys):
    assert main(["plan", *plan()]) == 0
    out = capsys.readouterr().out
    for text in ("actor: activations", "engine 0: KV cache", "tightest: ", "requests of 2,048 tokens at once", "free"):
        assert text in out
    assert main(["plan", "--json", *plan()]) == 0
    (kind,) = json.loads(capsys.readouterr().out)["memory"]
    same = only(plan())
    assert kind["need"]["training"] == same.need("training") == sum(i.get("training", 0) for i in kind["items"])
    assert kind["fits"] and kind["engines"][0]["requests"] == same.engines[0].requests > 50
