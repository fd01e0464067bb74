"""Hugging Face weights <-> Megatron's: names and shapes against transformers itself, layouts against slow oracles."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from instep.errors import ConfigError
from instep.models.checkpoint_names import CheckpointNames
from instep.models.shape import model_shape, shape_in_file
from instep.models.sizes import shape_in
from instep.models.weight_map import Kind, fuse, join, part_ranges, unfuse, weight_entries
from instep.training.megatron.checks import check_arguments, padded_vocab_size

NUMBERS = dict(
    vocab_size=50, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=64,
)  # fmt: skip
LATENT = NUMBERS | dict(
    num_key_value_heads=8, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=8, n_group=2, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
HYBRID = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=8,
    max_position_embeddings=64, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=6,
    linear_value_head_dim=5, linear_conv_kernel_dim=3,
)  # fmt: skip
OF_HYBRID = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=16)
CONFIGS = [
    Qwen3Config(**NUMBERS, head_dim=6, tie_word_embeddings=False),
    Qwen3Config(**NUMBERS, head_dim=6, tie_word_embeddings=True),
    Qwen2Config(**NUMBERS, tie_word_embeddings=True),
    LlamaConfig(**NUMBERS, head_dim=6, tie_word_embeddings=False),
    Qwen3MoeConfig(
        **NUMBERS, head_dim=6, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        mlp_only_layers=[0],
    ),
    DeepseekV3Config(**LATENT, q_lora_rank=10, n_shared_experts=2),
    DeepseekV3Config(**LATENT, q_lora_rank=None),
    Qwen3_5TextConfig(**HYBRID, intermediate_size=24, tie_word_embeddings=True),
    Qwen3_5MoeTextConfig(**HYBRID, **OF_HYBRID, tie_word_embeddings=False),
    Qwen3NextConfig(**HYBRID, **OF_HYBRID, intermediate_size=24, mlp_only_layers=[1], tie_word_embeddings=False),
]  # fmt: skip
IDS = ["qwen3", "qwen3-tied", "qwen2", "llama", "qwen3-moe", "deepseek", "deepseek-without-q-lora"]
IDS += ["qwen3.5", "qwen3.5-moe", "qwen3-next"]


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_names_and_shapes_are_those_of_transformers(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = CheckpointNames(model)
    want = {name: s for g in names.groups for name, s in zip(g.checkpoint, g.shapes, strict=True)}
    assert shape_in_file(config.to_dict()) == model_shape(config)  # which is what the command line reads
    entries = weight_entries(model_shape(config))
    got = [(n, s) for e in entries for n, s in zip(e.names, e.shapes, strict=True)]
    assert dict(got) == want and len(got) == len(want)
    assert len({e.megatron for e in entries}) == len(entries)
    counted = shape_in(config.to_dict())
    assert counted is not None and counted.total == sum(prod(size) for size in want.values())


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_cut_fuse_join_gives_the_same_bits(config, size):
    shape = model_shape(config)
    padded = padded_vocab_size(shape.vocab_size, SimpleNamespace(tensor_model_parallel_size=size))
    for entry in weight_entries(shape):
        full = [torch.randn(s) for s in entry.shapes]
        locals_ = []
        for rank in range(size):
            parts = []
            for i, tensor in enumerate(full):
                if entry.split_dim is None:
                    parts.append(tensor)
                else:
                    ranges = part_ranges(entry, i, rank, size, padded)
                    sections = [tensor.narrow(entry.split_dim, a, b - a) for a, b in ranges]
                    parts.append(torch.cat(sections, entry.split_dim))
            rows = padded // size if entry.kind is Kind.VOCAB else sum(p.shape[0] for p in parts)
            locals_.append(fuse(entry, parts, shape, rows))
            assert locals_[-1].shape[0] == rows
        joined = join(entry, locals_[:1] if entry.kind is Kind.REPLICATED else locals_, shape)
        assert all(torch.equal(a, b) for a, b in zip(joined, full, strict=True)), entry.megatron


def test_qkv_rows_by_group_and_gate_up_by_rank():
    """Row numbers against the layout written out: per key/value group its query heads, then k, then v."""
    shape = model_shape(CONFIGS[0])
    heads, groups, d = shape.num_attention_heads, shape.num_query_groups, shape.kv_channels
    entry = next(e for e in weight_entries(shape) if e.kind is Kind.QKV)
    q, k, v = (torch.arange(n * d) + base for n, base in ((heads, 0), (groups, 1000), (groups, 2000)))
    per_group = heads // groups
    want = []
    for g in range(groups):
        for h in range(g * per_group, (g + 1) * per_group):
            want += [h * d + i for i in range(d)]
        want += [1000 + g * d + i for i in range(d)]
        want += [2000 + g * d + i for i in range(d)]
    fused = fuse(entry, [q, k, v], shape, len(want))
    assert fused.tolist() == want
    assert [t.tolist() for t in unfuse(entry, fused, shape)] == [q.tolist(), k.tolist(), v.tolist()]

    gate_up = next(e for e in weight_entries(shape) if e.kind is Kind.GATE_UP)
    gate, up = torch.arange(24), torch.arange(24) + 100
    second = [t[slice(*part_ranges(gate_up, i, 1, 2, 0)[0])] for i, t in enumerate((gate, up))]
    assert fuse(gate_up, second, shape, 24).tolist() == [*range(12, 24), *range(112, 124)]


def test_vocabulary_is_padded_with_zeros_and_cut_again():
    shape = model_shape(CONFIGS[0])
    entry = weight_entries(shape)[0]
    assert part_ranges(entry, 0, 0, 2, 256) == [(0, 50)] and part_ranges(entry, 0, 1, 2, 256) == [(50, 50)]
    empty = fuse(entry, [torch.ones(50, 32)[50:50]], shape, 128)
    assert empty.shape == (128, 32) and not empty.any()
    args = SimpleNamespace(tensor_model_parallel_size=2, make_vocab_size_divisible_by=None)
    assert padded_vocab_size(256, args) == 256 and padded_vocab_size(257, args) == 512
    args.make_vocab_size_divisible_by = 2
    assert padded_vocab_size(257, args) == 260


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MistralConfig(**NUMBERS), ["mistral", "qwen3, qwen2, llama", "--train-backend hf"]),
        (LlamaConfig(**NUMBERS, attention_bias=True, mlp_bias=True), ["attention_bias", "mlp_bias"]),
        (Qwen3Config(**NUMBERS, hidden_act="gelu", attention_dropout=0.1), ["gelu", "attention_dropout"]),
        (Qwen2Config(**NUMBERS, use_sliding_window=True, sliding_window=8, max_window_layers=1), ["sliding"]),
        (
            Qwen3Config(**NUMBERS, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            ["rope_type='dynamic'"],
        ),
        (DeepseekV3Config(**LATENT | {"num_experts_per_tok": 3, "n_group": 4}), ["3 experts of a token from 1 groups"]),
        (DeepseekV3Config(**LATENT, scoring_func="softmax"), ["scoring_func='softmax' (only 'sigmoid')"]),
    ],
    ids=["family", "biases", "activation", "window", "rope", "groups", "scores"],
)
def test_what_is_not_supported_is_named(config, words):
    with pytest.raises(ConfigError) as error:
        model_shape(config)
    assert all(word in str(error.value) for word in words)


def arguments(**changes) -> SimpleNamespace:
    base = dict(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1,
                sequence_parallel=False, num_layers_per_virtual_pipeline_stage=None,
                num_virtual_stages_per_pipeline_rank=None, decoder_first_pipeline_num_layers=None,
                decoder_last_pipeline_num_layers=None, expert_model_parallel_size=1,
                expert_tensor_parallel_size=None, moe_grouped_gemm=False, mtp_num_layers=0,
                megatron_overrides={}, extra_flags=())  # fmt: skip
    return SimpleNamespace(**(base | changes))


def refusal(changes) -> str:
    try:
        check_arguments(arguments(**changes), model_shape(CONFIGS[1]))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("changes", [{}, dict(tensor_model_parallel_size=2, sequence_parallel=True)])
def test_arguments_that_fit_pass(changes):
    assert refusal(changes) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(tensor_model_parallel_size=3), ["num_attention_heads 8", "num_query_groups 4"]),
        (dict(pipeline_model_parallel_size=4), ["2 layers"]),
        (dict(num_virtual_stages_per_pipeline_rank=3), ["2 layers", "--num-virtual-stages-per-pipeline-rank 3"]),
        (dict(num_layers_per_virtual_pipeline_stage=3), ["2 layers", "--num-layers-per-virtual-pipeline-stage 3"]),
        (dict(pipeline_model_parallel_size=2, decoder_last_pipeline_num_layers=2), ["0 layers", "other 1"]),
        (dict(megatron_overrides={"hidden_dropout": 0.1}), ["hidden_dropout", "would change between passes"]),
    ],
    ids=["tp", "pp", "virtual", "virtual-layers", "uneven", "override"],
)
def test_arguments_that_contradict_are_named_together(changes, words):
    error = refusal(changes)
    assert error and all(word in error for word in words), error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(expert_model_parallel_size=3), "4 experts are not a multiple"),
        (dict(expert_tensor_parallel_size=16), "the width 8 of experts"),
    ],
    ids=["experts", "width"],
)
def test_layouts_that_do_not_fit_experts_are_named(changes, words):
    with pytest.raises(ConfigError) as error:
        check_arguments(arguments(**changes), model_shape(CONFIGS[4]))
    assert words in str(error.value)


def test_what_grouped_experts_would_not_do_is_named():
    shape = model_shape(CONFIGS[4])
    overrides = {"recompute_modules": ["core_attn", "moe_act"]}
    with pytest.raises(ConfigError, match="cannot do: moe_apply_probs_on_input with --moe-grouped-gemm"):
        both = overrides | {"moe_apply_probs_on_input": True}
        check_arguments(arguments(moe_grouped_gemm=True, megatron_overrides=both), shape)
    check_arguments(arguments(moe_grouped_gemm=True, megatron_overrides=overrides), shape)


def test_what_does_not_fit_latent_attention_and_shared_experts_is_named():
    shape = model_shape(DeepseekV3Config(**LATENT | {"moe_intermediate_size": 9}))
    changes = dict(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1,
        megatron_overrides={"recompute_modules": ["mla_up_proj"]},
    )  # fmt: skip
    with pytest.raises(ConfigError) as error:
        check_arguments(arguments(**changes), shape)
    assert "the width 9 of shared experts" in str(error.value) and "--recompute-modules mla_up_proj" in str(error.value)
    check_arguments(arguments(), shape)
