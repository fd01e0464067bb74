"""Hugging Face folders in FP8: with scales of blocks, as DeepSeek-V3 and Qwen3's FP8 models are, or of tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

QUANTIZED = re.compile(r"model\.layers\.\d+\..*_proj(_with_mqa)?\.weight")


_PER_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
HOW = {  # of those who write one scale for each tensor: what config.json says, the scale's name and its shape
    "compressed-tensors": (
        {"format": "float-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": _PER_TENSOR}}},
        "weight_scale",
        (1,),
    ),
    "modelopt": ({"quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}, "weight_scale", ()),
    "fp8": ({"activation_scheme": "static", "weight_block_size": None}, "weight_scale_inv", ()),
}


def quantize_tensors(folder: Path, method: str) -> dict[str, torch.Tensor]:
    """As `quantize`, with one scale for each tensor, and those of activations and the cache, which are passed over."""
    how, scale_name, size = HOW[method]
    tensors = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    scales: dict[str, torch.Tensor] = {}
    meant = {name: tensor.float() for name, tensor in tensors.items()}
    for name in filter(QUANTIZED.fullmatch, list(tensors)):
        module, scale = name.removesuffix("weight"), tensors[name].float().abs().max().double() / 448
        scale = scale.float().double()  # as it is stored
        tensors[name] = (tensors[name].double() / scale).to(torch.float8_e4m3fn)
        meant[name] = (tensors[name].double() * scale).float()
        scales[module + scale_name] = scale.float().reshape(size)
        scales[module + ("activation_scale" if method == "fp8" else "input_scale")] = torch.tensor(3.0)
        if module.endswith("k_proj."):
            scales[module + "k_scale"] = torch.tensor(5.0)
            scales[module.replace("k_proj", "v_proj") + "v_scale"] = torch.tensor(7.0)
    _save(folder, scales, tensors, {"quant_method": method, **how})
    return meant


def quantize(folder: Path, block: tuple[int, int] = (16, 24)) -> dict[str, torch.Tensor]:
    """Quantize a folder that `save_pretrained` has written, in place, with the scales in a file of their own.

    Returns:
        What its tensors then stand for, in float32: those that are quantized by a loop over their blocks.
    """
    tensors = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    scales: dict[str, torch.Tensor] = {}
    meant = {name: tensor.float() for name, tensor in tensors.items()}
    for name in filter(QUANTIZED.fullmatch, list(tensors)):
        tensors[name], scales[name + "_scale_inv"], meant[name] = _blocks(tensors[name].float(), *block)
    how = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block)}
    _save(folder, scales, tensors, how)
    return meant


def _save(folder: Path, scales: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], how: object) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    files = {"model-00001-of-00002.safetensors": scales, "model-00002-of-00002.safetensors": tensors}
    for file, content in files.items():
        save_file(content, folder / file, {"format": "pt"})
    index = {name: file for file, content in files.items() for name in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    change_config(folder, quantization_config=how)


def change_config(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def _blocks(full: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num = -(-full.shape[0] // rows), -(-full.shape[1] // columns)
    quantized, scale, meant = full.to(torch.float8_e4m3fn), torch.empty(num), torch.empty_like(full)
    for i in range(num[0]):
        for j in range(num[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = full[part].abs().max() / 448  # the largest float8_e4m3fn
            quantized[part] = (full[part] / scale[i, j]).to(torch.float8_e4m3fn)
            meant[part] = (quantized[part].double() * scale[i, j].double()).float()
    return quantized, scale, meant
