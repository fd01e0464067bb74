"""What transformers fuses, experts above all, has the names of the checkpoint outside of the model, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from instep.engines.embedded.protocol import HttpError
from instep.engines.embedded.weights import LiveWeights
from instep.errors import CheckpointError
from instep.models.checkpoint_names import CheckpointNames, named_weights
from instep.training.hf.model import Policy
from instep.training.hf.weights import load_hf
from tests.architectures import tiny_config
from tests.families import make_family

# One for each kind of mapping: none, a renaming, fused experts, fused and renamed, experts fused in the checkpoint too.
MODELS = "qwen2 gpt_neox qwen3_moe mixtral deepseek_v2 qwen3_next granitemoe jamba gpt_oss".split()


@pytest.mark.parametrize("model_type", MODELS)
def test_there_and_back_is_bit_equal(tmp_path: Path, model_type: str):
    torch.manual_seed(0)
    config = tiny_config(model_type)
    if model_type == "qwen3_moe":
        config.num_experts = 12  # of which 10 comes before 2 in the order of letters
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    written, weights = load_file(tmp_path / "model.safetensors"), named_weights(model)
    names = CheckpointNames(model, written)
    assert (names.missing, names.extra) == ([], [])
    out = {}
    for group in names.groups:
        out |= zip(group.checkpoint, names.to_checkpoint(group, weights), strict=True)
        assert group.shapes == [written[name].shape for name in group.checkpoint]
        for name, tensor in names.to_model(group, [written[name] for name in group.checkpoint]).items():
            assert torch.equal(tensor, weights.pop(name))
    assert not weights and set(out) == set(written)
    assert all(torch.equal(out[name], written[name]) for name in written)
    assert [g.checkpoint for g in CheckpointNames(model).groups] == [g.checkpoint for g in names.groups]


def test_fused_experts_are_kept_fused_where_the_checkpoint_has_them_so():
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    names = CheckpointNames(model, named_weights(model))
    assert not names.missing and not names.extra and all(g.checkpoint == g.model for g in names.groups)


def load(folder: Path) -> None:
    load_hf(Policy(AutoConfig.from_pretrained(folder), torch.float32).model, folder)


def test_a_checkpoint_that_does_not_fit_names_its_own_tensor(tmp_path: Path):
    file = make_family("mixtral", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    load(tmp_path)
    expert = "model.layers.1.{}.experts.2.w3.weight"
    checkpoint, ours = expert.format("block_sparse_moe"), expert.format("mlp")
    lost = tensors.pop(checkpoint)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"1 weights are missing, the first '{ours}'"):
        load(tmp_path)
    save_file(tensors | {checkpoint: lost[:-1].clone()}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"'{checkpoint}' is \[95, 64\] there and \[96, 64\] in the model"):
        load(tmp_path)
    fifth = checkpoint.replace("experts.2", "experts.4")
    save_file(tensors | {checkpoint: lost, fifth: lost.clone()}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"1 weights are not of the model, the first '{fifth}'"):
        load(tmp_path)


def test_the_embedded_engine_takes_experts_one_by_one(tmp_path: Path):
    """In any order, over several updates; a layer is written when all of its experts are there."""
    make_family("mixtral", tmp_path)
    new = {name: tensor + 1 for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).requires_grad_(False)
    live = LiveWeights(model, tmp_path)
    before = live.digests()
    assert before.keys() == new.keys()
    live.start("1", "nonce")
    names = sorted(new, key=hash)
    for part in (names[::2], names[1::2]):
        live._load({name: new[name] for name in part}, exact=True)
    assert live.finish("1") == "1" and not live.pending
    fused = model.model.layers[1].mlp.experts.down_proj
    assert torch.equal(fused[3], new["model.layers.1.block_sparse_moe.experts.3.w2.weight"])
    assert not set(live.digests().values()) & set(before.values())
    live.start("2", "nonce")
    expert = names[-1]
    live._load({name: new[name] for name in names[:-1]}, exact=True)
    with pytest.raises(HttpError, match=f"1 tensors were not delivered: \\['{expert}'"):
        live.finish("2")
