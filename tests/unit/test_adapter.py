"""Adapters without processes: which checkpoint belongs to which model, and how the embedded engine merges them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from instep.checkpoints.adapter import LAYOUT, Lora, base_of, check_layout, write_layout
from instep.engines.embedded.adapter import Adapter
from instep.errors import CheckpointError
from instep.training.hf.lora import adapted, attach
from instep_engine.manifest import WeightMismatch
from tests.families import FAMILIES

LORA, MODULES = Lora(2, 6, None), ["layer.0.q", "layer.1.q"]
CONFIG = {"r": 2, "lora_alpha": 6, "num_tensors": 2}


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    save_file({"w": torch.arange(4.0)}, folder / "model.safetensors")
    return base_of(folder)


def test_a_checkpoint_belongs_to_its_adapter_and_base(tmp_path, base):
    folder = tmp_path / "saved"
    folder.mkdir()
    assert check_layout(folder, LORA, MODULES, base) is False  # it holds all weights
    write_layout(folder, LORA, MODULES, base)
    assert check_layout(folder, LORA, MODULES, base) is True
    moved = replace(base, path="elsewhere")
    assert check_layout(folder, LORA, MODULES, moved) is True  # the same files in another folder
    save_file({"w": torch.arange(4.0) + 1}, tmp_path / "base" / "model.safetensors")
    for lora, modules, theirs, words in (
        (LORA, MODULES, base_of(tmp_path / "base"), "another base"),
        (Lora(4, 6, None), MODULES, base, "rank 2 there, 4 here"),
        (Lora(2, 2, None), MODULES, base, "alpha 6 there, 2 here"),
        (LORA, MODULES[:1], base, "modules 2 there, 1 here"),
        (None, [], None, "holds only a LoRA adapter of"),
        (LORA, MODULES, None, "holds only a LoRA adapter of"),
    ):
        with pytest.raises(CheckpointError, match=words):
            check_layout(folder, lora, modules, theirs)
    write_layout(folder, LORA, [*MODULES, "layer.0.kv_b_proj"], base)  # by a version whose default had it
    with pytest.raises(CheckpointError, match="give --lora-target-modules kv_b_proj q"):
        check_layout(folder, LORA, MODULES, base)
    (folder / LAYOUT).write_text(json.dumps({"rank": 2}))
    with pytest.raises(CheckpointError, match="does not say what its adapter is"):
        check_layout(folder, LORA, MODULES, base)


def tensors(layer: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 3, generator=generator), torch.randn(4, 2, generator=generator)
    return {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}


def product(layer: str, seed: int) -> torch.Tensor:
    a, b = tensors(layer, seed).values()
    return 3 * b @ a


def test_an_adapter_replaces_the_former_one_and_leaves_the_base():
    weights = {f"layer.{i}.q.weight": torch.randn(4, 3) for i in range(2)}
    begun = {name: w.clone() for name, w in weights.items()}
    adapter = Adapter(weights)
    for layer, seed in (("layer.0.q", 1), ("layer.0.q", 2), ("layer.1.q", 3)):
        adapter.receive(tensors(layer, seed), CONFIG)
        adapter.merge()
        for name, w in weights.items():
            expected = begun[name] + (product(layer, seed) if name == f"{layer}.weight" else 0)
            torch.testing.assert_close(w, expected)
    weights["layer.1.q.weight"].copy_(begun["layer.1.q.weight"] + 5)  # a session of all weights
    adapter.forget(["layer.1.q.weight"])
    adapter.receive(tensors("layer.1.q", 4), CONFIG)
    adapter.merge()
    torch.testing.assert_close(weights["layer.1.q.weight"], begun["layer.1.q.weight"] + 5 + product("layer.1.q", 4))


def test_what_is_no_adapter_of_the_model_is_refused_by_name():
    adapter = Adapter({"layer.0.q.weight": torch.randn(4, 3), "norm.weight": torch.randn(3)})
    good = tensors("layer.0.q", 1)
    a, b = good
    for wrong, words in (
        (tensors("layer.9.q", 1), r"layer\.9\.q\.lora_A\.weight belongs to no layer"),
        (tensors("norm", 1), r"norm\.lora_A\.weight belongs to no layer"),
        ({b: good[b].T.contiguous()}, r"lora_B\.weight: received shape"),
        ({a: good[a].double()}, r"lora_A\.weight: received shape and dtype"),
        ({a: good[a] * torch.inf}, r"lora_A\.weight is not finite"),
    ):
        with pytest.raises(WeightMismatch, match=words):
            adapter.receive(wrong, CONFIG)
    adapter.receive({a: good[a]}, CONFIG)
    with pytest.raises(WeightMismatch, match="came twice"):
        adapter.receive({a: good[a]}, CONFIG)
    with pytest.raises(WeightMismatch, match="different adapters"):
        adapter.receive({b: good[b]}, {**CONFIG, "lora_alpha": 1})
    with pytest.raises(WeightMismatch, match=r"1 of 2 tensors .* lora_B|1 of 2 tensors .*lora_B\.weight was not"):
        adapter.merge()


@pytest.mark.parametrize("targets, last", [(None, "q_proj kv_a_proj_with_mqa o_proj"), (("kv_b_proj",), "kv_b_proj")])
def test_latent_attention_has_adapters_where_vllm_has_them(targets, last):
    """Of kv_b_proj vLLM uses the weight alone, so that it has one only where it is named."""
    family = FAMILIES["deepseek_v2"]
    config = AutoConfig.for_model(family.model_type, **family.settings, num_hidden_layers=1, vocab_size=8)
    model = AutoModelForCausalLM.from_config(config)
    attach(model, Lora(2, 4, targets), 1)
    names = {name.rpartition(".")[2] for name in adapted(model) if ".self_attn." in name}
    assert names == set(last.split())
