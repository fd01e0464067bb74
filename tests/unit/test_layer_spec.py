"""--spec without Megatron: how the function is called, and which parameters its model must have."""

from dataclasses import fields, replace

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from instep.errors import ConfigError
from instep.models.shape import model_shape
from instep.models.weight_map import weight_entries
from instep.training.megatron.hooks import MegatronHooks
from instep.training.megatron.layout import Placement
from instep.training.megatron.weights import check_parameters

NUMBERS = dict(
    vocab_size=50, hidden_size=32, intermediate_size=24, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=64, head_dim=6,
)  # fmt: skip
TIED = model_shape(Qwen3Config(**NUMBERS, tie_word_embeddings=True))
EXPERTS = Qwen3MoeConfig(
    **NUMBERS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, tie_word_embeddings=False
)
NOWHERE = Placement(**dict.fromkeys((f.name for f in fields(Placement)), 0))
PLACE = replace(NOWHERE, pp_size=1, num_chunks=1, stage_layers=[4], ep_size=1)


def with_stage(args, config, vp_stage):
    return args, config, vp_stage


def without_stage(args, config):
    return args, config, "not asked for"


@pytest.mark.parametrize("name, expected", [("with_stage", 3), ("without_stage", "not asked for")])
def test_the_function_gets_the_virtual_stage_if_it_takes_it(name, expected):
    hooks = MegatronHooks({"seed": 1}, None, None, None, None, f"{__name__}.{name}")
    assert hooks.layers(list, {"num_layers": 4}, 3) == [{"seed": 1}, {"num_layers": 4}, expected]


def test_without_the_flag_nothing_is_called():
    hooks = MegatronHooks({}, None, None, None, None)
    assert hooks.layers(list, {}, 3) is None and hooks.builders == ""


def names(shape, keep=lambda entry: True) -> set[str]:
    return {entry.megatron for entry in weight_entries(shape) if keep(entry)}


def problems(there, shape, place) -> str:
    """What is wrong with a model that has these parameters."""
    try:
        check_parameters(there, shape, place, "--spec f")
    except ConfigError as error:
        return error.what
    return ""


def test_each_rank_has_its_part():
    assert problems(names(TIED), TIED, PLACE) == ""
    last = replace(PLACE, pp_rank=1, pp_size=2, stage_layers=[2, 2])
    there = names(TIED, lambda entry: entry.layer in (2, 3)) | {"decoder.final_layernorm.weight"}
    for copy in (set(), {"output_layer.weight"}):  # of the tied embedding
        assert problems(there | copy, TIED, last) == ""
    shape = model_shape(EXPERTS)
    second = replace(PLACE, num_experts=4, ep_rank=1, ep_size=2)
    assert problems(names(shape, lambda entry: entry.expert in (None, 2, 3)), shape, second) == ""


@pytest.mark.parametrize(
    "removed, added, what",
    [
        ("decoder.layers.1.mlp.linear_fc2.weight", "", "decoder.layers.1.mlp.linear_fc2.weight is missing"),
        ("", "decoder.layers.0.gate", "decoder.layers.0.gate is not a parameter of this model"),
        ("", "output_layer.bias", "output_layer.bias is not a parameter of this model"),
    ],
)
def test_other_parameters_are_named(removed, added, what):
    with pytest.raises(ConfigError) as caught:
        check_parameters(names(TIED) - {removed} | ({added} - {""}), TIED, PLACE, "--spec my.f")
    assert what in caught.value.what and caught.value.where == "--spec my.f" and caught.value.remedy


def test_many_are_counted():
    with pytest.raises(ConfigError, match="and 12 more"):
        check_parameters(names(TIED) | {f"mine.{i}" for i in range(20)}, TIED, PLACE, "--spec my.f")
