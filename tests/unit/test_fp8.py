"""FP8 with scales of blocks or tensors is read as what it stands for: a loop over the blocks, or a product in float64,
says what that is."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from instep.arguments.parse import parse
from instep.checkpoints import convert
from instep.checkpoints.hf_weights import opened_weights
from instep.checkpoints.megatron import MegatronCheckpoint
from instep.cli import main
from instep.errors import CheckpointError, ConfigError, InstepError
from instep.preflight.inputs import check_inputs
from instep.training.worker import Worker
from tests.architectures import tiny_config
from tests.assets import make_prompts, make_tokenizer
from tests.distributed.megatron_layouts import MODELS, random_model
from tests.fp8 import HOW, change_config, quantize, quantize_tensors
from tests.live_bytes import LiveBytes

SCALES, WEIGHTS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """In FP8, with what their tensors stand for in `NAME.safetensors` beside them."""
    root = tmp_path_factory.mktemp("models")
    for name in ("untied", "moe-mixed"):
        random_model(MODELS[name]).bfloat16().save_pretrained(root / name)
        save_file(quantize(root / name), root / f"{name}.safetensors")
    return root


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("block", [(128, 128), (64, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_part_of_a_matrix_is_that_of_the_whole(tmp_path, block, dtype):
    """Its rows and columns are no multiples of a block's, and parts begin within blocks."""
    torch.manual_seed(0)
    full = torch.randn(300, 421).bfloat16() * torch.logspace(-3, 3, 421).bfloat16()
    save_file({NAME: full, "lm_head.weight": full[:, :9].contiguous()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    meant = quantize(tmp_path, block)[NAME].to(dtype)
    assert not torch.equal(meant, full.to(dtype))
    with opened_weights(tmp_path, dtype) as tensors:
        assert tensors.keys() == {NAME, "lm_head.weight"}
        assert torch.equal(tensors["lm_head.weight"].read(), full[:, :9])
        stored = tensors[NAME]
        assert stored.shape == (300, 421) and torch.equal(stored.read(), meant) and stored.read().dtype is dtype
        for start, stop in [(0, 1), (0, 128), (64, 192), (100, 101), (127, 129), (150, 300), (256, 300), (90, 90)]:
            assert torch.equal(stored.read(0, start, stop), meant[start:stop])
            assert torch.equal(stored.read(1, start, stop), meant[:, start:stop])
        assert torch.equal(stored.read(1, 400, 421), meant[:, 400:])


def test_only_a_row_of_blocks_is_in_float32_at_a_time(tmp_path):
    save_file({NAME: torch.randn(2048, 512).bfloat16()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    quantize(tmp_path, (128, 128))
    with opened_weights(tmp_path, torch.bfloat16) as tensors, LiveBytes() as live:
        assert tensors[NAME].read().nbytes == 2 * 2048 * 512
    assert live.peak < 4 * 2048 * 512, "with what is mapped less than a float32 copy of it alone"


@pytest.mark.parametrize("method", HOW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_scale_for_each_tensor(tmp_path, method, dtype):
    """Scales of activations and of the cache are no tensors of the model."""
    torch.manual_seed(0)
    full = torch.randn(300, 421).bfloat16() * torch.logspace(-3, 3, 421).bfloat16()
    save_file({NAME: full, "model.layers.0.self_attn.k_proj.weight": full[:200] / 7}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    meant = {name: tensor.to(dtype) for name, tensor in quantize_tensors(tmp_path, method).items()}
    with opened_weights(tmp_path, dtype) as tensors:
        assert tensors.keys() == meant.keys()
        assert all(torch.equal(tensor.read(), meant[name]) for name, tensor in tensors.items())
        for start, stop in [(0, 1), (127, 129), (150, 300), (90, 90)]:
            assert torch.equal(tensors[NAME].read(0, start, stop), meant[NAME][start:stop])
            assert torch.equal(tensors[NAME].read(1, start, stop), meant[NAME][:, start:stop])


def test_folders_with_one_scale_for_each_tensor_are_converted(tmp_path, capsys):
    for method in HOW:
        random_model(MODELS["untied"]).bfloat16().save_pretrained(hf := tmp_path / method)
        (hf / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
        meant = quantize_tensors(hf, method)
        for way, save in (("fp8-to-bf16", tmp_path / f"{method}-bf16"), ("hf-to-megatron", tmp_path / f"{method}-m")):
            assert main(["convert", way, "--hf-checkpoint", str(hf), "--save", str(save)]) == 0, capsys.readouterr().err
        written = weights(tmp_path / f"{method}-bf16")
        assert written.keys() == meant.keys()
        assert all(torch.equal(tensor, meant[key].bfloat16()) for key, tensor in written.items())
        assert not (tmp_path / f"{method}-bf16" / "hf_quant_config.json").exists()  # vLLM would believe it
        checkpoint = MegatronCheckpoint(tmp_path / f"{method}-m" / "release", convert._shape(hf, False))
        for entry in checkpoint.entries:
            for name, tensor in zip(entry.names, checkpoint.tensors(entry), strict=True):
                assert torch.equal(tensor, meant[name].bfloat16()), name


def only_beside(hf: Path, text: str) -> None:
    """How a folder is quantized stands in ModelOpt's file of its own alone."""
    config = json.loads((hf / "config.json").read_text())
    config.pop("quantization_config", None)
    (hf / "config.json").write_text(json.dumps(config))
    (hf / "hf_quant_config.json").write_text(text)


def test_a_file_of_modelopt_beside_config_json_says_how_they_are_quantized(tmp_path, capsys):
    hf, save = tmp_path / "hf", tmp_path / "bf16"
    random_model(MODELS["untied"]).bfloat16().save_pretrained(hf)
    meant = quantize_tensors(hf, "modelopt")
    how = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    only_beside(hf, json.dumps({"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": how}))
    assert main(["convert", "fp8-to-bf16", "--hf-checkpoint", str(hf), "--save", str(save)]) == 0
    written = weights(save)
    assert written.keys() == meant.keys() and all(torch.equal(t, meant[key].bfloat16()) for key, t in written.items())
    assert not (save / "hf_quant_config.json").exists()
    capsys.readouterr()
    for text, said in [
        ('{"quantization": {"quant_algo": "NVFP4"}}', "are quantized (modelopt, quant_algo NVFP4)"),
        ('{"quantization": {"quant_algo": "FP8_PB_WO"}}', "are quantized (modelopt, quant_algo FP8_PB_WO)"),
        ('{"quantization": {}}', "are quantized (modelopt, quant_algo None)"),
        ('{"quantization": 8}', "hf_quant_config.json has no object `quantization`"),
        ("{", "hf_quant_config.json cannot be read"),
    ]:
        only_beside(hf, text)
        for way in ("hf-to-megatron", "fp8-to-bf16"):
            assert main(["convert", way, "--hf-checkpoint", str(hf), "--save", str(tmp_path / "new")]) == 2
            error = " ".join(capsys.readouterr().err.split())
            assert said in error and str(hf) in error and "remedy:" in error and not (tmp_path / "new").exists()
    only_beside(save, '{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    assert main(["convert", "hf-to-megatron", "--hf-checkpoint", str(save), "--save", str(tmp_path / "m")]) == 0


def test_a_scale_of_a_tensor_is_one_number(tmp_path):
    random_model(MODELS["untied"]).bfloat16().save_pretrained(tmp_path)
    quantize_tensors(tmp_path, "compressed-tensors")
    damaged(tmp_path, SCALES, f"{NAME}_scale", torch.ones(64, 1))
    with pytest.raises(CheckpointError) as caught, opened_weights(tmp_path, torch.bfloat16):
        pass
    assert f"{NAME}_scale has shape (64, 1), not one element" in caught.value.what
    damaged(tmp_path, SCALES, f"{NAME}_scale", None)
    with pytest.raises(CheckpointError) as caught, opened_weights(tmp_path, torch.bfloat16):
        pass
    assert f"{NAME}_scale is missing" in caught.value.what


def test_a_type_that_is_not_written_is_one_error(tmp_path, capsys):
    random_model(MODELS["untied"]).bfloat16().save_pretrained(tmp_path / "hf")
    quantize_tensors(tmp_path / "hf", "modelopt")
    damaged(tmp_path / "hf", WEIGHTS, NAME, torch.ones(64, 96, dtype=torch.uint16))
    assert main(["convert", "fp8-to-bf16", "--hf-checkpoint", str(tmp_path / "hf"), "--save", str(tmp_path / "h")]) == 1
    assert f"{NAME} has a type that cannot be converted" in " ".join(capsys.readouterr().err.split())


def damaged(folder: Path, file: str, name: str, tensor: torch.Tensor | None) -> None:
    tensors, index = load_file(folder / file), folder / "model.safetensors.index.json"
    there = json.loads(index.read_text())
    tensors.pop(name)
    del there["weight_map"][name]
    if tensor is not None:
        tensors[name], there["weight_map"][name] = tensor, file
    save_file(tensors, folder / file)
    index.write_text(json.dumps(there))


@pytest.mark.parametrize(
    ("change", "error", "what"),
    [
        (lambda f: damaged(f, SCALES, f"{NAME}_scale_inv", None), CheckpointError, f"{NAME}_scale_inv is missing"),
        (
            lambda f: damaged(f, SCALES, f"{NAME}_scale_inv", torch.ones(3, 4)),
            CheckpointError,
            f"{NAME}, of shape (64, 96), is in FP8, and {NAME}_scale_inv has shape (3, 4), not (4, 4) of its blocks",
        ),
        (
            lambda f: damaged(f, WEIGHTS, NAME, torch.ones(64, 2, 48).to(torch.float8_e4m3fn)),
            CheckpointError,
            "has shape (4, 4), not one of its blocks of 16 x 24",
        ),
        (lambda f: change_config(f, quantization_config=None), CheckpointError, "has no quantization_config"),
        (
            lambda f: change_config(f, quantization_config={"quant_method": "bitsandbytes", "bits": 4}),
            ConfigError,
            "are quantized (bitsandbytes): only FP8 with a scale for each block, or for each tensor, GPTQ of 4",
        ),
        (
            lambda f: change_config(f, quantization_config={"quant_method": "fp8", "weight_block_size": [128]}),
            ConfigError,
            "are quantized (fp8, weight_block_size [128])",
        ),
        (
            lambda f: change_config(f, quantization_config={"quant_method": "fp8", "activation_scheme": "static"}),
            CheckpointError,
            "_scale_inv has shape (",
        ),
        (
            lambda f: change_config(f, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"}),
            ConfigError,
            "are quantized (modelopt, quant_algo NVFP4)",
        ),
        (
            lambda f: change_config(
                f,
                quantization_config={
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
                },
            ),
            ConfigError,
            "are quantized (compressed-tensors, float of 8 bits by channel)",
        ),
    ],
)
def test_what_cannot_be_read_is_one_error(models, tmp_path, capsys, change, error, what):
    hf = shutil.copytree(models / "untied", tmp_path / "hf")
    change(hf)
    with pytest.raises(error) as caught, opened_weights(hf, torch.bfloat16):
        pass
    assert what in caught.value.what and str(hf) in caught.value.where and caught.value.remedy
    for way in ("hf-to-megatron", "fp8-to-bf16"):
        assert main(["convert", way, "--hf-checkpoint", str(hf), "--save", str(tmp_path / "new")]) != 0
        said = capsys.readouterr().err
        assert said.count("where:") == 1 and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["untied", "moe-mixed"])
def test_a_conversion_to_megatron_is_in_bfloat16(models, tmp_path, name):
    hf, meant = models / name, load_file(models / f"{name}.safetensors")
    assert main(["convert", "hf-to-megatron", "--hf-checkpoint", str(hf), "--save", str(tmp_path / "m")]) == 0
    checkpoint = MegatronCheckpoint(tmp_path / "m" / "release", convert._shape(hf, False))
    read = {n: t for e in checkpoint.entries for n, t in zip(e.names, checkpoint.tensors(e), strict=True)}
    stored = weights(hf)
    assert read.keys() == meant.keys()
    for key, tensor in read.items():
        dtype = torch.bfloat16 if stored[key].dtype is torch.float8_e4m3fn else stored[key].dtype
        assert tensor.dtype is dtype and torch.equal(tensor, meant[key].to(dtype)), key


def test_the_folder_in_bfloat16_is_what_transformers_loads(models, tmp_path, capsys):
    hf, save, meant = models / "moe-mixed", tmp_path / "bf16", load_file(models / "moe-mixed.safetensors")
    (hf / "tokenizer_config.json").write_text("{}")
    assert main(["convert", "fp8-to-bf16", "--hf-checkpoint", str(hf), "--save", str(save)]) == 0
    assert f"{len(meant)}" in capsys.readouterr().out
    config = json.loads((save / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert (save / "tokenizer_config.json").exists()
    written = weights(save)
    assert written.keys() == meant.keys()
    assert all(torch.equal(tensor, meant[key].bfloat16()) for key, tensor in written.items())
    model, info = AutoModelForCausalLM.from_pretrained(save, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.dtype is torch.bfloat16
    assert main(["convert", "fp8-to-bf16", "--hf-checkpoint", str(save), "--save", str(tmp_path / "again")]) == 2
    assert "its weights are not quantized" in capsys.readouterr().err


def make_run(folder: Path, model_type: str, method: str | None = None) -> dict[str, torch.Tensor]:
    """A model in FP8 in `hf`, with prompts to train it on, and what its tensors stand for."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(model_type)).bfloat16().save_pretrained(folder / "hf")
    make_tokenizer().save_pretrained(folder / "hf")
    make_prompts(folder / "train.jsonl", 2)
    return quantize_tensors(folder / "hf", method) if method else quantize(folder / "hf")


def words(folder: Path, hf: Path, more: str = "--rm-type random --n-samples-per-prompt 4") -> list[str]:
    line = f"--hf-checkpoint {hf} --prompt-data {folder}/train.jsonl --input-key prompt --rollout-batch-size 1 "
    line += "--num-rollout 1 --actor-num-gpus-per-node 1 --train-backend hf --device cpu --precision fp32 "
    return [*line.split(), "--run-dir", str(folder / "run"), *more.split()]


def make_worker(folder: Path, hf: Path) -> Worker:
    worker = Worker(lambda event: None)
    args = parse(words(folder, hf, "--no-torch-compile"), "sft")
    worker.setup(args, 0, 1, str(folder / "rendezvous"), 1)
    return worker


def test_where_engines_load_it_the_remedy_writes_what_they_take(tmp_path, monkeypatch):
    make_run(tmp_path, "qwen3")
    monkeypatch.chdir(tmp_path)
    vllm = "--rm-type random --n-samples-per-prompt 4 --rollout-num-gpus 1 --rollout-backend vllm"
    for more in ("", " --lora-rank 2"):
        with pytest.raises(ConfigError, match="keeps this checkpoint quantized, and cannot load") as error:
            parse(words(tmp_path, tmp_path / "hf", vllm + more))
    replay = f" --load-debug-rollout-data {tmp_path}/train.jsonl"
    for more in (replay, " --debug-rollout-only"):  # there is no engine, or nobody trains what vLLM serves
        check_inputs(parse(words(tmp_path, tmp_path / "hf", vllm + more)))
    check_inputs(parse(words(tmp_path, tmp_path / "hf")))  # the embedded engine reads it as the trainer does
    talk = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}))
    only = f"--prompt-data {tmp_path}/talks.jsonl --input-key messages"
    check_inputs(parse(words(tmp_path, tmp_path / "hf", only), "sft"))
    command = re.search(r"first: `instep ([^`]+)`", error.value.remedy)
    assert command is not None, error.value.remedy
    assert main(shlex.split(command[1])) == 0
    check_inputs(parse(words(tmp_path, tmp_path / "hf-bf16", vllm)))
    only_beside(tmp_path / "hf", '{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(ConfigError, match="keeps this checkpoint quantized, and cannot load"):
        parse(words(tmp_path, tmp_path / "hf", vllm))


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        ("qwen3", None),
        ("qwen3_moe", None),
        ("deepseek_v3", None),
        ("qwen3", "compressed-tensors"),
        ("qwen3", "modelopt"),
    ],
)
def test_the_hf_backend_trains_and_exports_what_it_stands_for(tmp_path, alone, model_type, method):
    meant, hf = make_run(tmp_path, model_type, method), tmp_path / "hf"
    worker = make_worker(tmp_path, hf)
    worker.load_weights(hf)
    worker.remark()
    worker.export_hf(tmp_path / "export")
    written = weights(tmp_path / "export")
    assert written.keys() == meant.keys() and all(torch.equal(written[key].float(), meant[key]) for key in meant)
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    assert not hasattr(worker.backend.policy.model.config, "quantization_config")


def test_an_error_in_the_weights_reaches_the_user_of_the_hf_backend(tmp_path, alone):
    make_run(tmp_path, "qwen3")
    damaged(tmp_path / "hf", SCALES, f"{NAME}_scale_inv", None)
    worker = make_worker(tmp_path, tmp_path / "hf")
    with pytest.raises(InstepError, match="_scale_inv is missing"):
        worker.load_weights(tmp_path / "hf")
