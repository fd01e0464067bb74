"""Hugging Face folders quantized as GPTQ or AWQ has it, packed by a loop over single numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.fp8 import QUANTIZED, change_config

GROUP = 32  # inputs that share a scale
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbours is at each place of an int32, the lowest bits first
HOW = {  # what config.json says
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}

# In the place of a kernel that vLLM has on CPUs with AVX-512 only; all else of vLLM's way with these layers is its own.
KERNEL = """
import torch
from torch import library

def unpacked(words):
    return (words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15

def gemm(input, q_weight, output, scales, zeros, bias, pack_factor, isa_hint):
    blocks, size = q_weight.shape  # 16 outputs of every input in a block
    numbers = unpacked(q_weight.view(blocks, size // 2, 2)).flatten(2).transpose(0, 1).flatten(1)
    times = len(numbers) // len(scales)
    zeros = 8 if zeros is None else unpacked(zeros).flatten(1).repeat_interleave(times, 0)
    weight = (numbers - zeros).to(scales.dtype) * scales.repeat_interleave(times, 0)
    output.copy_(torch.nn.functional.linear(input, weight.T, bias))

def register():
    global ops
    ops = library.Library("_C", "FRAGMENT")
    tensors = "Tensor a, Tensor b, Tensor(a2!) c, Tensor d, Tensor? e, Tensor? f"
    ops.define(f"cpu_gemm_wna16({tensors}, SymInt g, str h) -> ()")
    ops.impl("cpu_gemm_wna16", gemm, "CPU")
"""


def with_kernel(folder: Path) -> str:
    """A folder for PYTHONPATH with which vLLM computes with packed weights on any CPU."""
    about = folder / "kernel_in_torch-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kernel-in-torch\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nkernel = kernel_in_torch:register\n")
    (folder / "kernel_in_torch.py").write_text(KERNEL)
    return str(folder)


def pack(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Each `32 // bits` neighbours of a row in an int32."""
    num, out = 32 // bits, []
    for row in numbers.tolist():
        words = []
        for first in range(0, len(row), num):
            word = 0
            for place in range(num):
                word |= row[first + (order[place] if order else place)] << (bits * place)
            words.append(word - 2**32 if word >= 2**31 else word)
        out.append(words)
    return torch.tensor(out, dtype=torch.int32)


def quantized(
    weight: torch.Tensor,
    method: str,
    *,
    bits: int = 4,
    symmetric: bool | None = None,
    group_of: torch.Tensor | None = None,
    stored_less: int = 1,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors that stand for `weight` `[out, in]`, and what they mean, in float64.

    Args:
        symmetric: all zeros are the middle; default: with GPTQ.
        group_of: the group of each input (GPTQ's `desc_act`); default: neighbours.
        stored_less: by how much GPTQ's zeros are stored less than they are: 1 in its first format.
    """
    full = weight.double().T
    group_of = torch.arange(len(full)) // GROUP if group_of is None else group_of
    symmetric, most = (method == "gptq") if symmetric is None else symmetric, 2**bits - 1
    scales, zeros = [], []
    for group in range(int(group_of.max()) + 1):
        own = full[group_of == group]
        low, high = own.amin(0).clamp(max=-1e-3), own.amax(0).clamp(min=1e-3)
        scales.append((torch.maximum(-low, high) / (most // 2) if symmetric else (high - low) / most).half())
        zeros.append(torch.full_like(low, 2 ** (bits - 1)) if symmetric else (-low / scales[-1]).round().clamp(1, most))
    scale, zero = torch.stack(scales), torch.stack(zeros).long()
    numbers = ((full / scale[group_of]).round().long() + zero[group_of]).clamp(0, most)
    meant = ((numbers - zero[group_of]) * scale.double()[group_of]).T
    if method == "awq":
        return {"qweight": pack(numbers, 4, AWQ_ORDER), "qzeros": pack(zero, 4, AWQ_ORDER), "scales": scale}, meant
    packed = {"qweight": pack(numbers.T, bits).T.contiguous(), "qzeros": pack(zero - stored_less, bits)}
    return {**packed, "scales": scale, "g_idx": group_of.int()}, meant


def quantize(folder: Path, method: str) -> dict[str, torch.Tensor]:
    """Quantize the linear layers of a folder that `save_pretrained` has written, in place.

    Returns:
        What its tensors then stand for, in float64.
    """
    (file,) = folder.glob("*.safetensors")
    tensors, meant = {}, {}
    for name, tensor in load_file(file).items():
        parts, meant[name] = {"weight": tensor}, tensor.double()
        if QUANTIZED.fullmatch(name):
            parts, meant[name] = quantized(tensor, method)
        tensors |= {f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()}
    save_file(tensors, file, {"format": "pt"})
    change_config(folder, quantization_config=HOW[method])
    return meant
