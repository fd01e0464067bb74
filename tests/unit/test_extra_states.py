"""What Transformer Engine keeps beside its weights in a checkpoint: passed over when read, written for its modules."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from instep.checkpoints import convert
from instep.checkpoints.dist_checkpoint import read_index
from instep.checkpoints.megatron import MegatronCheckpoint
from instep.checkpoints.megatron_files import full_shape
from instep.models.shape import ModelShape
from instep.models.weight_map import Kind
from tests.distributed.megatron_layouts import MODELS, random_model
from tests.unit.test_convert import to_hf, to_megatron, weights


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("untied", "moe-mixed"):
        random_model(MODELS[name]).bfloat16().save_pretrained(root / name)
    return root


def whole_model(release: Path, shape: ModelShape) -> dict[str, torch.Tensor]:
    """The weights of `release` under Megatron's names, of one rank."""
    there = MegatronCheckpoint(release, shape)
    return {e.megatron: there.local(e, 0, 1, shape.vocab_size if e.kind is Kind.VOCAB else full_shape(e)[0])
            for e in there.entries}  # fmt: skip


def with_states(model: dict[str, torch.Tensor]) -> dict[str, object]:
    """Beside each weight, norms too, what Transformer Engine's modules of several versions keep there."""
    modules = [name.removesuffix("weight") for name in model if name.endswith(".weight")]
    state, data = torch.arange(5, dtype=torch.uint8), io.BytesIO(b"pickled")
    forms = {
        "_extra_state": state,
        "_extra_state0": state,
        "_extra_state/shard_0_1": data,
        "_extra_state/shard_0.1_1.4": data,
    }
    return model | {module + form: value for module in modules for form, value in forms.items()}


def as_torch(model: dict[str, torch.Tensor], folder: Path) -> None:
    (folder / "mp_rank_00").mkdir(parents=True)
    tensors = {name: t for name, t in with_states(model).items() if isinstance(t, torch.Tensor)}
    torch.save({"model": tensors}, folder / "mp_rank_00" / "model_optim_rng.pt")


def as_torch_dist(model: dict[str, torch.Tensor], folder: Path) -> None:
    named = {name.replace(".local_experts.", ".experts."): tensor for name, tensor in model.items()}
    dcp.save(with_states(named), checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')


@pytest.mark.parametrize("write", [as_torch, as_torch_dist])
@pytest.mark.parametrize("name", ["untied", "moe-mixed"])
def test_states_of_transformer_engine_are_passed_over(models, tmp_path, capsys, write, name):
    assert to_megatron(models / name, tmp_path / "m") == 0
    shape, before = convert._shape(models / name, False), weights(models / name)
    write(whole_model(tmp_path / "m" / "release", shape), tmp_path / "te" / "release")
    read = MegatronCheckpoint(tmp_path / "te" / "release", shape)
    after = {n: t for e in read.entries for n, t in zip(e.names, read.tensors(e), strict=True)}
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    (tmp_path / "te" / "latest_checkpointed_iteration.txt").write_text("release")
    capsys.readouterr()
    assert to_hf(tmp_path / "te", models / name, tmp_path / "hf") == 0
    assert "extra_state" not in "".join(capsys.readouterr())


def test_every_module_of_transformer_engine_finds_its_state(models, tmp_path):
    assert to_megatron(models / "moe-mixed", tmp_path / "m") == 0
    keys = set(read_index(tmp_path / "m" / "release").state_dict_metadata)
    wanted = {"decoder.final_layernorm"}
    for i in range(convert._shape(models / "moe-mixed", False).num_layers):
        parts = ["linear_qkv", "core_attention", "linear_proj", "q_layernorm", "k_layernorm"]
        experts = f"decoder.layers.{i}.mlp.router.weight" in keys
        wanted |= {f"decoder.layers.{i}.self_attention.{part}" for part in parts}
        wanted |= {f"decoder.layers.{i}.{part}" for part in (["pre_mlp_layernorm"] if experts else ["mlp.linear_fc1"])}
    assert {f"{module}._extra_state/shard_0_1" for module in wanted} <= keys
    assert not any("input_layernorm" in key for key in keys)  # fused


def test_states_without_content_take_no_time_of_their_own(models, tmp_path, monkeypatch):
    """There are as many as weights, which counts where experts are small."""
    saved, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda *args, **options: saved.append(args) or save(*args, **options))
    assert to_megatron(models / "moe-mixed", tmp_path / "m") == 0
    weights_there = len(convert.weight_entries(convert._shape(models / "moe-mixed", False)))
    states = sum("_extra_state" in key for key in read_index(tmp_path / "m" / "release").state_dict_metadata)
    assert states > weights_there / 2 and weights_there < len(saved) <= weights_there + 2  # common.pt, and one state
