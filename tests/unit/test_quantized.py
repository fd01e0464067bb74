"""GPTQ and AWQ folders: what they stand for (`tests/quantized.py` packs it by a loop), who reads it, who refuses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from instep.arguments.parse import parse
from instep.checkpoints.hf_weights import opened_weights
from instep.checkpoints.weight_files import weight_names
from instep.cli import main
from instep.controller.device import resolve_on_machine
from instep.engines.embedded.model import load_model
from instep.engines.embedded.weights import LiveWeights
from instep.errors import CheckpointError, ConfigError
from instep.models.checkpoint_names import CheckpointNames
from instep.preflight.inputs import check_inputs
from tests.architectures import tiny_config
from tests.assets import make_checkpoint, make_prompts
from tests.fp8 import change_config
from tests.live_bytes import LiveBytes
from tests.quantized import GROUP, HOW, quantize, quantized

LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module", params=HOW)
def folder(request, tmp_path_factory) -> Path:
    """A model, with what its tensors stand for in `meant.safetensors` beside it."""
    path = make_checkpoint(tmp_path_factory.mktemp("model") / request.param, layers=1)
    save_file({n: t.contiguous() for n, t in quantize(path, request.param).items()}, path.parent / "meant.safetensors")
    return path


def one_layer(folder: Path, method: str, weight: torch.Tensor, **how) -> torch.Tensor:
    """Write a folder with this weight alone; returns what it stands for."""
    parts, meant = quantized(weight, method, **how)
    save_file({f"{LAYER}.{end}": part for end, part in parts.items()}, folder / "model.safetensors")
    form = {"checkpoint_format": "gptq_v2"} if how.get("stored_less") == 0 else {}
    config = {**HOW[method], "bits": how.get("bits", 4), **form}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return meant


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("awq", {}),
        ("gptq", {}),
        ("gptq", {"symmetric": False}),
        ("gptq", {"symmetric": False, "stored_less": 0}),
        ("gptq", {"symmetric": False, "bits": 8}),
        ("gptq", {"group_of": torch.arange(160).flip(0) % 5}),  # desc_act
        ("gptq", {"group_of": torch.zeros(160, dtype=torch.long)}),  # a group_size of -1
    ],
)
def test_a_packed_weight_and_any_part_of_it_is_what_it_stands_for(tmp_path, method, how):
    torch.manual_seed(0)
    meant = one_layer(tmp_path, method, torch.randn(264, 160), **how)
    with opened_weights(tmp_path, torch.float32) as tensors:
        assert tensors.keys() == {f"{LAYER}.weight"}
        stored = tensors[f"{LAYER}.weight"]
        assert stored.shape == (264, 160) and torch.equal(stored.read(), meant.float())
        for start, stop in [(0, 1), (0, 128), (100, 101), (127, 129), (5, 160), (90, 90)]:
            assert torch.equal(stored.read(0, start, stop), meant[start:stop].float())
            assert torch.equal(stored.read(1, start, stop), meant[:, start:stop].float())
        assert torch.equal(stored.read(0, 200, 264), meant[200:].float())


def test_scales_are_rounded_as_an_engine_that_computes_in_bfloat16_rounds_them(tmp_path):
    torch.manual_seed(0)
    meant = one_layer(tmp_path, "awq", torch.randn(128, 64))
    scales = load_file(tmp_path / "model.safetensors")[f"{LAYER}.scales"].repeat_interleave(GROUP, 0).T
    numbers = (meant / scales.double()).round()
    with opened_weights(tmp_path, torch.bfloat16) as tensors:
        assert torch.equal(tensors[f"{LAYER}.weight"].read(), numbers.bfloat16() * scales.bfloat16())


def test_only_some_rows_are_unpacked_at_a_time(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": HOW["gptq"]}))
    parts = {"qweight": torch.zeros(128, 2048, dtype=torch.int32), "qzeros": torch.zeros(8, 256, dtype=torch.int32)}
    parts["scales"] = torch.ones(8, 2048).half()  # there need be no g_idx
    save_file({f"{LAYER}.{end}": part for end, part in parts.items()}, tmp_path / "model.safetensors")
    with opened_weights(tmp_path, torch.bfloat16) as tensors, LiveBytes() as live:
        assert tensors[f"{LAYER}.weight"].read().eq(-1).all()
    assert live.peak < 4 * 2048 * 1024 + 4 * 128 * 2048, "with what is mapped less than a float32 copy of it"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"qzeros": None}, f"{LAYER}.qweight, of shape (16, 128), is packed, and {LAYER}.qzeros is missing"),
        (
            {"qzeros": torch.zeros(3, 16, dtype=torch.int32)},
            "do not fit together: g_idx [128] of torch.int32, qweight [16, 128] of torch.int32, qzeros [3, 16]",
        ),
        ({"qweight": torch.zeros(16, 128)}, "do not fit"),
        ({"scales": torch.ones(())}, "do not fit"),
        ({"scales": torch.ones(0, 128), "qzeros": torch.zeros(0, 16, dtype=torch.int32)}, "do not fit"),
        ({"g_idx": torch.full((128,), 4, dtype=torch.int32)}, "names groups of inputs outside of 0 to 3"),
        ({"config": {"quant_method": "fp8"}}, "config.json has no quantization_config of GPTQ or AWQ"),
        ({"config": None}, "config.json has no quantization_config of GPTQ or AWQ"),
    ],
)
def test_parts_that_do_not_belong_together_are_one_error(tmp_path, change, what):
    one_layer(tmp_path, "gptq", torch.randn(128, 128))
    if "config" in change:
        change_config(tmp_path, quantization_config=change.pop("config"))
    parts = load_file(tmp_path / "model.safetensors") | {f"{LAYER}.{end}": part for end, part in change.items()}
    save_file({name: part for name, part in parts.items() if part is not None}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught, opened_weights(tmp_path, torch.bfloat16) as tensors:
        tensors[f"{LAYER}.weight"].read()
    assert what in caught.value.what and str(tmp_path) in caught.value.where and caught.value.remedy


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({**HOW["gptq"], "bits": 3}, "(gptq, 3 bits, gptq)"),
        ({**HOW["gptq"], "checkpoint_format": "marlin"}, "(gptq, 4 bits, marlin)"),
        ({**HOW["awq"], "version": "gemv"}, "(awq, 4 bits, gemv)"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, "(bitsandbytes)"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, how, said):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": how}))
    with pytest.raises(
        ConfigError, match="only FP8 .* GPTQ of 4 or 8 bits and AWQ's gemm of 4 bits are read"
    ) as caught:
        with opened_weights(tmp_path, torch.bfloat16):
            pass
    assert said in caught.value.what


def test_the_embedded_engine_computes_with_what_it_stands_for(folder):
    meant = {name: tensor.float() for name, tensor in load_file(folder.parent / "meant.safetensors").items()}
    model = load_model(str(folder), torch.float32, torch.device("cpu"), 64, trust=False)
    weights = model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in meant.items())
    assert LiveWeights(model, folder).digests().keys() == meant.keys()
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert model.generation_config.eos_token_id == ends and not hasattr(model.config, "quantization_config")


def test_experts_keep_their_names_in_the_checkpoint(tmp_path):
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    names = [name for group in CheckpointNames(model).groups for name in group.checkpoint]
    packed = [name.removesuffix("weight") + "qweight" if "experts" in name else name for name in names]
    packed += [name.replace(".qweight", ".scales") for name in packed if name.endswith(".qweight")]
    found = CheckpointNames(model, weight_names(dict.fromkeys(packed)))
    assert not found.missing and not found.extra
    assert sorted(name for group in found.groups for name in group.checkpoint) == sorted(names)


def test_it_is_converted_to_bfloat16(folder, tmp_path):
    (folder / "quantize_config.json").write_text("{}")
    assert main(["convert", "fp8-to-bf16", "--hf-checkpoint", str(folder), "--save", str(tmp_path / "bf16")]) == 0
    meant = {name: tensor for name, tensor in load_file(folder.parent / "meant.safetensors").items()}
    written = load_file(tmp_path / "bf16" / "model.safetensors")
    assert written.keys() == meant.keys() and not (tmp_path / "bf16" / "quantize_config.json").exists()
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    with opened_weights(folder, torch.bfloat16) as tensors:
        assert all(torch.equal(written[name], tensors[name].read()) for name in meant)


VLLM = "--rollout-backend vllm --rollout-num-gpus 1 --precision bf16"
LORA = f"{VLLM} --lora-rank 2 --weight-sync lora"


def words(model: Path, more: str) -> list[str]:
    make_prompts(model.parent / "train.jsonl", 2)
    line = (
        f"--hf-checkpoint {model} --prompt-data {model.parent}/train.jsonl --input-key prompt --rollout-batch-size 1 "
    )
    line += "--num-rollout 1 --actor-num-gpus-per-node 1 --train-backend hf --device cpu --rm-type random "
    return [*line.split(), "--run-dir", str(model.parent / "run"), *more.split()]


@pytest.mark.parametrize(
    "more", [LORA, f"{VLLM} --weight-sync restart", "--precision fp32", "--weight-sync lora --lora-rank 2"]
)
def test_engines_that_take_what_is_trained_load_it(folder, more):
    check_inputs(parse(words(folder, more)))


@pytest.mark.parametrize(
    ("more", "what", "remedy"),
    [
        (VLLM, "cannot load the trained weights", "--weight-sync restart, which starts engines on full weights"),
        (f"{VLLM} --weight-sync shm --lora-rank 2", "cannot load the trained weights", "--weight-sync lora"),
        (LORA.replace("bf16", "fp32"), "only in 16 bits", "--precision bf16"),
    ],
)
def test_engines_that_cannot_take_it_are_refused_with_what_can(folder, more, what, remedy):
    with pytest.raises(ConfigError) as caught:
        parse(words(folder, more))
    assert what in str(caught.value) and remedy in str(caught.value) and str(folder) in str(caught.value)
    auto = words(folder, more.replace("--rollout-backend vllm", ""))
    check_inputs(parse(auto))  # on a CPU this is the embedded engine


def test_where_auto_means_vllm_it_is_refused_on_the_machine(folder, monkeypatch):
    args = parse(words(folder, ""))
    monkeypatch.setattr("instep.controller.device.resolve_backend", lambda args: "vllm")
    with pytest.raises(ConfigError, match="cannot load the trained weights"):
        resolve_on_machine(args.replace(num_threads=1), with_engines=True)
    resolve_on_machine(args.replace(num_threads=1, debug_train_only=True), with_engines=True)
