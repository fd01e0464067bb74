"""Qwen3-Next and Qwen3.5 for Megatron: their shapes, the order of rows, what engines cache, what is refused."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Qwen3_5TextConfig, Qwen3NextConfig

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.errors import ConfigError
from instep.models.shape import DeltaNet, Experts, model_shape, shape_in_file
from instep.models.sizes import shape_in, shape_of
from instep.models.weight_map import Kind, fuse, part_ranges, weight_entries
from instep.observability.floors import Model
from instep.preflight.plan.engine import plan_engine
from instep.training.megatron.checks import check_arguments
from tests.command_line import argv, make_folder, refusal
from tests.published import config
from tests.unit.test_models_map import HYBRID, OF_HYBRID, arguments


def test_the_published_configuration_has_a_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3-next-80B-A3B")))
    shape = model_shape(AutoConfig.from_pretrained(tmp_path))
    linear = tuple(i for i in range(48) if i % 4 != 3)
    assert shape.delta == DeltaNet(16, 32, 128, 128, 4, linear, by_head=True)
    assert shape.rotary_dim == 64 and shape.kv_channels == 256 and shape.qk_norm
    assert shape.experts == Experts(512, 10, 512, True, tuple(range(48)), shared_ffn_hidden_size=512, shared_gate=True)
    assert sum(prod(size) for entry in weight_entries(shape) for size in entry.shapes) == 79_674_391_296
    moe = shape_in_file(config("qwen3.5-35B-A3B"))
    assert moe is not None and moe.experts is not None and moe.delta is not None
    assert moe.experts.normalized and moe.ffn_hidden_size == 512 and not moe.delta.by_head


def test_rows_of_both_families_are_one_parameter_by_key_head() -> None:
    """Against the layouts in transformers: Qwen3-Next's rows are ordered by key head, Qwen3.5's by kind."""
    rows = dict(q=6, k=6, v=10, z=10, b=2, a=2)  # of a key head: 2 value heads of width 5
    heads = [{kind: torch.randn(n, 32) for kind, n in rows.items()} for _ in range(4)]
    want = torch.cat([torch.cat([head[kind] for kind in rows]) for head in heads])

    def kinds(names: str) -> torch.Tensor:
        return torch.cat([torch.cat([head[kind] for head in heads]) for kind in names])

    def by_head(names: str) -> torch.Tensor:
        return torch.cat([torch.cat([head[kind] for kind in names]) for head in heads])

    for made, parts in (
        (Qwen3_5TextConfig(**HYBRID), [kinds("qkv"), kinds("z"), kinds("b"), kinds("a")]),
        (Qwen3NextConfig(**HYBRID, **OF_HYBRID), [by_head("qkvz"), by_head("ba")]),
    ):
        shape = model_shape(made)
        entry = next(e for e in weight_entries(shape) if e.kind is Kind.DELTA)
        assert torch.equal(fuse(entry, parts, shape, 144), want)
        for rank in range(2):
            cut = [torch.cat([part[a:b] for a, b in part_ranges(entry, i, rank, 2, 0)]) for i, part in enumerate(parts)]
            assert torch.equal(fuse(entry, cut, shape, 72), want[72 * rank : 72 * (rank + 1)])


def test_queries_and_their_gates_are_apart_in_a_group() -> None:
    shape = model_shape(Qwen3_5TextConfig(**HYBRID))  # 8 heads of width 8 in 4 groups
    entry = next(e for e in weight_entries(shape) if e.kind is Kind.QKV)
    q, k, v = torch.arange(128), torch.arange(32) + 1000, torch.arange(32) + 2000  # a head: 8 of a query, 8 of a gate
    want = []
    for group in range(4):
        for gate in range(2):
            for head in (2 * group, 2 * group + 1):
                want += [16 * head + 8 * gate + i for i in range(8)]
        want += [1000 + 8 * group + i for i in range(8)] + [2000 + 8 * group + i for i in range(8)]
    assert fuse(entry, [q, k, v], shape, 192).tolist() == want


def test_engines_cache_attention_alone_and_states_of_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path, monkeypatch)
    Path("model/config.json").write_text(json.dumps(config("qwen3-next-80B-A3B")))
    shape = shape_in(config("qwen3-next-80B-A3B"))
    assert shape is not None and shape.attending == 12
    assert shape.state == 36 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))
    args = parse(argv("--rollout-backend vllm --rollout-max-response-len 96 --rollout-max-prompt-len 32"), "plan")
    planned = plan_engine(args, plan_engines(args)[0], shape, 400e9)
    assert planned.per_request == planned.longest * 12 * 2 * 2 * 256 * 2 + 4 * shape.state
    assert planned.requests == int(planned.cache / planned.per_request)
    model = Model.of(config("qwen3-next-80B-A3B"), 2)
    assert model is not None and model.attention == 2 * 12 * 16 * 256
    assert shape.flops(10) == 2 * shape.used * 10 + 2 * 12 * 16 * 256 * 10**2


@pytest.mark.parametrize("name", ["qwen3-next-80B-A3B", "qwen3.5-35B-A3B", "qwen3.5-27B"])
def test_a_plan_counts_the_adapter_of_each_projection(name: str) -> None:
    shape, sizes = shape_in_file(config(name)), shape_in(config(name))
    assert shape is not None and sizes is not None
    linear = [e for e in weight_entries(shape) if e.layer is not None and len(e.shapes[0]) == 2]
    dense = [e for e in linear if e.expert is None and "mlp.gate." not in e.names[0]]
    assert sizes.factors(None) == sum(sum(size) for e in dense for size in e.shapes)
    of_delta_nets = [sum(size) for e in dense for n, size in zip(e.names, e.shapes, strict=True) if "linear_attn." in n]
    projections = [*shape.delta.projections, "out_proj"] if shape.delta else []
    assert sizes.factors(projections) == sum(of_delta_nets) > 0
    if shape.experts:
        routed = sum(sum(size) for e in linear if e.expert is not None for size in e.shapes)
        assert sizes.factors(["experts"]) == pytest.approx(routed)


def test_a_layout_that_does_not_divide_the_key_heads_is_named() -> None:
    shape = model_shape(Qwen3_5TextConfig(**HYBRID | {"linear_num_key_heads": 2, "linear_num_value_heads": 2}))
    check_arguments(arguments(tensor_model_parallel_size=2), shape)
    check_arguments(arguments(context_parallel_size=2), shape)
    for sizes in ((4, 1), (2, 2)):
        changes = dict(zip(("tensor_model_parallel_size", "context_parallel_size"), sizes, strict=True))
        with pytest.raises(ConfigError, match="2 key heads of linear attention are not a multiple of --tensor"):
            check_arguments(arguments(**changes), shape)


def test_each_flag_that_contradicts_config_json_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path, monkeypatch)
    Path("model/config.json").write_text(json.dumps(config("qwen3.5-35B-A3B")))
    flags = "--use-gated-attention --apply-layernorm-1p --moe-shared-expert-gate --rotary-percent 0.25"
    assert parse(argv(f"--train-backend megatron {flags} --ffn-hidden-size 512")).notes == []
    text = refusal("--train-backend megatron --rotary-percent 1.0 --moe-shared-expert-intermediate-size 256")
    assert "--rotary-percent: is 1.0" in text and "--moe-shared-expert-intermediate-size: is 256" in text
    Path("model/config.json").write_text(json.dumps(config("qwen3-4B")))
    text = refusal(f"--train-backend megatron {flags}")
    for flag in ("--attention-output-gate", "--apply-layernorm-1p", "--moe-shared-expert-gate"):
        assert f"{flag}: is True, but config.json says False" in text


def test_multi_token_prediction_does_not_count(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    made = Qwen3_5TextConfig(**HYBRID, intermediate_size=24, tie_word_embeddings=True)
    made.save_pretrained(tmp_path)
    sizes = {n: s for e in weight_entries(model_shape(made)) for n, s in zip(e.names, e.shapes, strict=True)}
    tensors = {name: torch.zeros(size) for name, size in (sizes | {"mtp.fc.weight": (32, 64)}).items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    counted, said = shape_of(str(tmp_path)), shape_in(made.to_dict())
    assert counted is not None and said is not None and counted.total == said.total
