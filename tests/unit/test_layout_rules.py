"""Layouts that do not divide are refused by the command line, for actor and critic, before a process starts."""

import itertools
import json
import random
from pathlib import Path

import pytest

from instep.arguments import parse
from instep.arguments.roles import args_of_role
from instep.errors import ConfigError
from instep.models.shape import shape_in_file
from instep.training.megatron.checks import check_arguments
from tests.command_line import argv, make_folder
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
            "the width 2048 of experts is no multiple of --expert-tensor-parallel-size 3",
        ),
        (
            "qwen3-4B",
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4 --actor-num-gpus-per-node 2",
            "18 layers of a pipeline rank are no multiple of --num-virtual-stages-per-pipeline-rank 4",
        ),
        ("moonlight-16B-A3B", "--recompute-granularity selective --recompute-modules mla_up_proj", "mla_up_proj"),
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
            check_arguments(own, shape, own.world_size)
    assert taken >= 5 and refused >= 5, (taken, refused)
