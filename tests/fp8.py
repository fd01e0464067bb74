"""Hugging Face folders in block-quantized FP8, as DeepSeek-V3 and Qwen3's FP8 models are published."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

QUANTIZED = re.compile(r"model\.layers\.\d+\..*_proj(_with_mqa)?\.weight")


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
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    files = {"model-00001-of-00002.safetensors": scales, "model-00002-of-00002.safetensors": tensors}
    for file, content in files.items():
        save_file(content, folder / file, {"format": "pt"})
    index = {name: file for file, content in files.items() for name in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    how = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block)}
    change_config(folder, quantization_config=how)
    return meant


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
