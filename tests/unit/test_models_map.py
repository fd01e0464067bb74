"""Hugging Face weights <-> Megatron's: names and shapes against transformers itself, layouts against slow oracles."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from instep.errors import ConfigError
from instep.models.shape import model_shape
from instep.models.weight_map import Kind, fuse, join, part_range, unfuse, weight_entries
from instep.training.megatron.checks import check_arguments, padded_vocab_size

NUMBERS = dict(
    vocab_size=50, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=64,
)  # fmt: skip
CONFIGS = [
    Qwen3Config(**NUMBERS, head_dim=6, tie_word_embeddings=False),
    Qwen3Config(**NUMBERS, head_dim=6, tie_word_embeddings=True),
    Qwen2Config(**NUMBERS, tie_word_embeddings=True),
    LlamaConfig(**NUMBERS, head_dim=6, tie_word_embeddings=False),
]
IDS = ["qwen3", "qwen3-tied", "qwen2", "llama"]


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_names_and_shapes_are_those_of_transformers(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    want = {name: tuple(p.shape) for name, p in model.named_parameters()}
    entries = weight_entries(model_shape(config))
    got = [(n, s) for e in entries for n, s in zip(e.names, e.shapes, strict=True)]
    assert dict(got) == want and len(got) == len(want)
    assert len({e.megatron for e in entries}) == len(entries)


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
                    start, stop = part_range(entry, i, rank, size, padded)
                    parts.append(tensor.narrow(entry.split_dim, start, stop - start))
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
    second = [t[slice(*part_range(gate_up, i, 1, 2, 0))] for i, t in enumerate((gate, up))]
    assert fuse(gate_up, second, shape, 24).tolist() == [*range(12, 24), *range(112, 124)]


def test_vocabulary_is_padded_with_zeros_and_cut_again():
    shape = model_shape(CONFIGS[0])
    entry = weight_entries(shape)[0]
    assert part_range(entry, 0, 0, 2, 256) == (0, 50) and part_range(entry, 0, 1, 2, 256) == (50, 50)
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
    ],
    ids=["family", "biases", "activation", "window", "rope"],
)
def test_what_is_not_supported_is_named(config, words):
    with pytest.raises(ConfigError) as error:
        model_shape(config)
    assert all(word in str(error.value) for word in words)


def arguments(**changes) -> SimpleNamespace:
    base = dict(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, sequence_parallel=False,
                megatron_overrides={})  # fmt: skip
    return SimpleNamespace(**(base | changes))


def test_arguments_that_fit_pass():
    shape = model_shape(CONFIGS[1])
    check_arguments(arguments(), shape, 1)
    check_arguments(arguments(tensor_model_parallel_size=2, sequence_parallel=True), shape, 4)


@pytest.mark.parametrize(
    ("changes", "world", "words"),
    [
        (dict(sequence_parallel=True), 1, ["--sequence-parallel with"]),
        (dict(tensor_model_parallel_size=3), 3, ["num_attention_heads 8", "num_query_groups 4"]),
        (dict(pipeline_model_parallel_size=4), 4, ["2 layers"]),
        (dict(tensor_model_parallel_size=2), 3, ["3 ranks"]),
        (dict(megatron_overrides={"hidden_dropout": 0.1}), 1, ["hidden_dropout", "repeatable"]),
    ],
    ids=["sp", "tp", "pp", "world", "override"],
)
def test_arguments_that_contradict_are_named_together(changes, world, words):
    with pytest.raises(ConfigError) as error:
        check_arguments(arguments(**changes), model_shape(CONFIGS[1]), world)
    assert all(word in str(error.value) for word in words), str(error.value)
