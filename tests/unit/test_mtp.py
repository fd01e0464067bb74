"""Multi-token prediction of published folders: it is left out, and said."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from instep.arguments.parse import parse
from instep.checkpoints import convert
from instep.checkpoints.megatron import MegatronCheckpoint
from instep.cli import main
from instep.engines.embedded.weights import LiveWeights
from instep.errors import CheckpointError, ConfigError
from instep.models.shape import model_shape
from instep.models.sizes import shape_of
from instep.models.weight_map import weight_entries
from tests.architectures import tiny_config
from tests.assets import make_prompts, make_tokenizer
from tests.distributed.megatron_layouts import MODELS, random_model
from tests.distributed.mtp_oracle import Drafter, checkpoint_weights
from tests.fp8 import change_config, quantize
from tests.unit.test_fp8 import make_run, make_worker, weights, words


def add_mtp(folder: Path, prefix: str) -> set[str]:
    """Give a folder a module of multi-token prediction, a layer like the last one and more; returns its names."""
    file = folder / "model.safetensors"
    tensors, last = load_file(file), "model.layers.1."
    more = {prefix + name.removeprefix(last): t.clone() for name, t in tensors.items() if name.startswith(last)}
    more |= {f"{prefix}{part}.weight": torch.randn(8) for part in ("enorm", "hnorm", "shared_head.norm")}
    save_file(tensors | more, file, {"format": "pt"})
    return set(more)


def test_converters_say_what_of_multi_token_prediction_they_leave_out(tmp_path, capsys):
    hf, m = tmp_path / "hf", tmp_path / "m"
    random_model(MODELS["deepseek"]).bfloat16().save_pretrained(hf)
    mtp = add_mtp(hf, "model.layers.2.")
    meant = quantize(hf)
    assert main(["convert", "hf-to-megatron", "--hf-checkpoint", str(hf), "--save", str(m)]) == 0
    said = f"{len(mtp)} tensors of multi-token prediction"
    assert said in capsys.readouterr().out
    back = ["convert", "megatron-to-hf", "--load", str(m), "--hf-checkpoint", str(hf), "--save", str(tmp_path / "back")]
    assert main(back) == 0 and said not in capsys.readouterr().out
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    written, stored = weights(tmp_path / "back"), weights(hf)
    assert written.keys() == meant.keys() - mtp
    for name, tensor in written.items():
        dtype = torch.bfloat16 if stored[name].dtype is torch.float8_e4m3fn else stored[name].dtype
        assert tensor.dtype is dtype and torch.equal(tensor, meant[name].to(dtype)), name
    assert main(["convert", "fp8-to-bf16", "--hf-checkpoint", str(hf), "--save", str(tmp_path / "whole")]) == 0
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert weights(tmp_path / "whole").keys() == meant.keys() and config["num_nextn_predict_layers"] == 1


def test_that_of_a_megatron_checkpoint_is_left_out_and_said(tmp_path, capsys):
    hf, release = tmp_path / "hf", tmp_path / "m" / "release"
    random_model(MODELS["deepseek"]).save_pretrained(hf)
    shape = convert._shape(hf, False)
    assert main(["convert", "hf-to-megatron", "--hf-checkpoint", str(hf), "--save", str(tmp_path / "m")]) == 0
    there = MegatronCheckpoint(release, shape)
    model = {e.megatron: there.local(e, 0, 1, sum(size[0] for size in e.shapes)) for e in there.entries}
    assert not there.mtp
    shutil.rmtree(release)
    (release / "mp_rank_00").mkdir(parents=True)
    file = release / "mp_rank_00" / "model_optim_rng.pt"
    torch.save({"model": model | {"mtp.layers.0.eh_proj.weight": torch.ones(2, 4)}}, file)
    back = ["convert", "megatron-to-hf", "--load", str(tmp_path / "m"), "--hf-checkpoint", str(hf)]
    assert main([*back, "--save", str(tmp_path / "back")]) == 0
    assert "1 tensors of multi-token prediction" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model_type", "prefix"),
    [("deepseek_v3", "model.layers.2."), ("glm4_moe", "model.layers.2."), ("qwen3_next", "mtp.0.")],
)
def test_the_hf_backend_leaves_it_as_it_is_and_says_so(tmp_path, alone, model_type, prefix):
    torch.manual_seed(0)
    hf = tmp_path / "hf"
    AutoModelForCausalLM.from_config(tiny_config(model_type)).save_pretrained(hf)
    make_tokenizer().save_pretrained(hf)
    make_prompts(tmp_path / "train.jsonl", 2)
    before = weights(hf).keys()
    mtp = add_mtp(hf, prefix)
    worker = make_worker(tmp_path, hf)
    worker.load_weights(hf)
    said = f"{len(mtp)} tensors of multi-token prediction ({min(mtp)}, ...) are not read: they are neither trained nor"
    stored = weights(hf)
    assert worker.remark().count(said) == 1
    worker.export_hf(tmp_path / "export")
    exported = weights(tmp_path / "export")
    assert exported.keys() == before | mtp and all(torch.equal(exported[name], stored[name]) for name in mtp)
    worker.load_weights(tmp_path / "export")
    assert worker.remark().count(said) == 1
    worker.load_reference(hf)
    worker.load_teacher(hf)
    assert {line for line in worker.remark().splitlines() if "multi-token" in line} == {worker.reference.left_out}
    assert said in worker.reference.left_out
    for folder in (hf, tmp_path / "export"):
        assert json.loads((folder / "config.json").read_text()).get("num_nextn_predict_layers", 1) == 1
    if "layers" in prefix:  # of which config.json must say that they are there
        change_config(hf, num_nextn_predict_layers=0)
        other = worker._build(with_optimizer=False)
        with pytest.raises(CheckpointError, match="weights are not of the model, the first 'model.layers.2."):
            other.load_hf(hf)


def test_the_embedded_engine_passes_over_it_in_a_sync(tmp_path):
    model = random_model(MODELS["deepseek"])
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | Drafter(model).weights(), file, {"format": "pt"})
    live, sent = LiveWeights(model.requires_grad_(False), tmp_path), {n: t + 1 for n, t in load_file(file).items()}
    live.start("1", "nonce")
    live._load(sent, exact=True)
    assert live.delivered == sent.keys() and live.finish("1") == "1"
    assert torch.equal(model.model.norm.weight, sent["model.norm.weight"])


def test_its_flags_say_why_they_are_refused(tmp_path):
    make_run(tmp_path, "qwen3")
    plain, one = words(tmp_path, tmp_path / "hf"), ["--mtp-num-layers", "1"]
    megatron = [*plain, "--train-backend", "megatron"]
    refused = [
        ([*plain, *one], "only megatron-core has it, not --train-backend hf"),
        ([*megatron, *one], "checkpoints of this model have 0 layers of multi-token prediction"),
        ([*megatron, "--enable-mtp-training"], "--enable-mtp-training.*--mtp-num-layers"),
        (
            [*megatron, *one, "--context-parallel-size", "2", "--actor-num-gpus-per-node", "2"],
            "--mtp-num-layers with --context",
        ),
    ]
    for line, why in refused:
        with pytest.raises(ConfigError, match=f"(?s){why}"):
            parse(line)
    parse([*plain, "--mtp-num-layers", "0"])


def test_a_model_keeps_all_of_its_layers_or_none():
    shape = model_shape(MODELS["qwen3.5"])
    assert shape.num_mtp_layers == 1 and shape.with_mtp(1).mtp == 1 and shape.with_mtp(0) == shape
    with pytest.raises(ConfigError, match="checkpoints of this model have 1 layers"):
        shape.with_mtp(2)
    with pytest.raises(ConfigError, match="share a projection"):
        replace(shape, num_mtp_layers=2).with_mtp(2)


@pytest.mark.parametrize("name", ["deepseek", "qwen3.5", "qwen3.5-moe", "qwen3-next"])
def test_converters_keep_it_if_asked(tmp_path, name):
    hf, m, back = (tmp_path / part for part in ("hf", "m", "back"))
    model = random_model(MODELS[name])
    model.save_pretrained(hf)
    file = hf / "model.safetensors"
    save_file(load_file(file) | Drafter(model).weights(), file, {"format": "pt"})
    kept = ["--mtp-num-layers", "1", "--hf-checkpoint", str(hf)]
    assert main(["convert", "hf-to-megatron", "--save", str(m), *kept]) == 0
    assert main(["convert", "megatron-to-hf", "--load", str(m), "--save", str(back), *kept]) == 0
    got, want = weights(back), weights(hf)
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)
    assert json.loads((back / "config.json").read_text()).get("num_nextn_predict_layers", 1) == 1
    entries = weight_entries(model_shape(MODELS[name]).with_mtp(1))
    held = sum(prod(size) for e in entries if e.megatron.startswith("mtp.") for size in e.shapes)
    counted = shape_of(str(hf))
    assert counted is not None and counted.total == sum(t.numel() for t in checkpoint_weights(model).values())
    assert counted.with_mtp(1).total - counted.total == pytest.approx(held, rel=0.4)  # a mean layer counts
