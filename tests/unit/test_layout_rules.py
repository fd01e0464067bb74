"""Layouts that do not divide are refused by the command line, for actor and critic, before a process starts."""

import itertools
import json
import random
from pathlib import Path

import pytest

from instep.arguments.parse import parse
from instep.arguments.roles import args_of_role
from instep.errors import ConfigError
from instep.models.shape import shape_in_file
from instep.training.megatron.checks import check_arguments
from tests.command_line import CONFIG, argv, make_folder, refusal
from tests.published import config


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Writes the config.json of a published model, and gives it back."""
    make_folder(tmp_path, monkeypatch)

    def write(name: str) -> dict[str, object]:
        Path("model/config.json").write_text(json.dumps(config(name)))
        return config(name)

    return write


def words(text: str) -> list[str]:
    base = "--train-backend megatron --device cuda --rollout-batch-size 240"
    return argv(f"{base} {text}", without="--rollout-batch-size")


@pytest.mark.parametrize(
    "name,flags,says",
    [
        ("qwen3-4B", "--tensor-model-parallel-size 3 --actor-num-gpus-per-node 3", "num_attention_heads 32"),
        ("qwen2.5-0.5B", "--tensor-model-parallel-size 4 --actor-num-gpus-per-node 4", "num_query_groups 2"),
        (
            "deepseek-v3",
            "--expert-tensor-parallel-size 3 --actor-num-gpus-per-node 3",
            "the width 2048 of experts is not a multiple of --expert-tensor-parallel-size 3",
        ),
        (
            "qwen3-4B",
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4 --actor-num-gpus-per-node 2",
            "18 layers of a pipeline rank are not a multiple of --num-virtual-stages-per-pipeline-rank 4",
        ),
        ("moonlight-16B-A3B", "--recompute-granularity selective --recompute-modules mla_up_proj", "mla_up_proj"),
        (
            "qwen3-4B",
            "--recompute-granularity selective --recompute-modules core_attn layernorm",
            "--recompute-modules layernorm (Megatron-Core needs Transformer Engine for it; name other modules",
        ),
        (
            "qwen3-30B-A3B",
            "--advantage-estimator ppo --expert-model-parallel-size 8 --actor-num-gpus-per-node 8 "
            "--critic-num-gpus-per-node 4",
            "EP 8 x ETP 1 x PP 1 = 8 does not divide 4 ranks of the critic",
        ),
    ],
)
def test_it_is_named(model, name, flags, says):
    model(name)
    with pytest.raises(ConfigError) as caught:
        parse(words(flags))
    assert says in str(caught.value)
    assert parse([*words(flags), "--debug-rollout-only"]) if "critic" not in flags else True  # nothing is trained


@pytest.mark.parametrize("wrong", [{"intermediate_size": None}, {"num_attention_heads": 0}, {"rope_scaling": [1]}])
def test_numbers_that_are_none_have_no_layout(model, wrong):
    assert shape_in_file(model("qwen3-4B") | wrong) is None


@pytest.mark.parametrize("name", ["qwen2.5-0.5B", "qwen3-30B-A3B", "moonlight-16B-A3B"])
def test_the_workers_refuse_nothing_that_the_command_line_takes(model, name):
    """Of 60 layouts, both kinds are met."""
    shape, taken, refused = shape_in_file(model(name)), 0, 0
    layouts = list(itertools.product((1, 2, 4, 7), (1, 2, 3), (1, 2), (1, 2, 3, 8), (None, 1, 3), (1, 4, 8), (1, 2)))
    for tp, pp, cp, ep, etp, copies, critic in random.Random(7).sample(layouts, 60):
        ranks = tp * pp * cp * copies
        flags = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --context-parallel-size {cp} "
        flags += (
            f"--sequence-parallel --expert-model-parallel-size {ep if shape.experts else 1} --num-gpus-per-node 4096 "
        )
        flags += f"--expert-tensor-parallel-size {etp} " if etp else ""
        flags += f"--actor-num-gpus-per-node {ranks} --cluster ray --advantage-estimator ppo "
        try:
            args = parse(words(flags + f"--critic-num-gpus-per-node {tp * pp * cp * critic}"))
        except ConfigError:
            refused += 1
            continue
        taken += 1
        for role in ("actor", "critic"):
            own = args_of_role(args, role)
            check_arguments(own, shape)
    assert taken >= 5 and refused >= 5, (taken, refused)


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ("--expert-model-parallel-size 8 --actor-num-gpus-per-node 8", "does not divide the model's 4 experts"),
        ("--expert-model-parallel-size 4 --actor-num-gpus-per-node 2", "EP 4 x ETP 1 x PP 1 = 4 does not divide 2"),
        ("--tensor-model-parallel-size 2 --actor-num-gpus-per-node 2", "needs sequence parallelism"),
        ("--num-experts 8", "is 8, but config.json says 4"),
        ("--moe-router-topk 3", "is 3, but config.json says 2"),
        ("--moe-ffn-hidden-size 8", "is 8, but config.json says 32"),
        (
            "--use-routing-replay --recompute-granularity selective --recompute-modules moe",
            "may get the experts of another micro-batch",
        ),
        ("--use-rollout-routing-replay --rollout-backend vllm --device cpu", "does not record the experts on a CPU"),
        (
            "--use-rollout-routing-replay --rollout-backend vllm --device cuda --prefill-num-servers 1 "
            "--rollout-num-gpus 2",
            "do not know the experts that prefill engines chose",
        ),
        (
            "--use-rollout-routing-replay --rollout-backend vllm --device cuda --vllm-pipeline-parallel-size 2 "
            "--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2",
            "vLLM's pipelines do not return the experts",
        ),
        ("--use-routing-replay --use-rollout-logprobs", "no pass computes old log-probs"),
    ],
)
def test_layouts_of_a_model_with_experts(tmp_path, monkeypatch, extra: str, what: str):
    make_folder(tmp_path, monkeypatch)
    Path("model/config.json").write_text(json.dumps({**CONFIG, **EXPERTS}))
    text = refusal("--train-backend megatron " + extra)
    assert what in text and "things are wrong" not in text
    good = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 --num-experts 4 "
    args = parse(argv(good + "--expert-tensor-parallel-size 1 --actor-num-gpus-per-node 4 --moe-ffn-hidden-size 32"))
    assert args.dp_size == 2 and args.train_backend == "megatron"
