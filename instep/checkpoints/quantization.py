"""The quantization of the weights of a Hugging Face folder, by its config.json. This file needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from instep.errors import ConfigError

FP8, GPTQ, AWQ = "FP8", "GPTQ", "AWQ"
PACKED = (GPTQ, AWQ)  # these quantize only weights: layers compute in 16 bits
_STORED_LESS = {"gptq": 1, "gptq_v2": 0}  # formats of GPTQ, and the number to add to stored zeros


@dataclass(frozen=True)
class Quantization:
    """How the weights of a checkpoint are quantized.

    Attributes:
        block: of FP8: rows and columns of the blocks that share a scale; (): each tensor has one.
        stored_less: for GPTQ: the number to add to its stored zeros.
    """

    name: str
    block: tuple[int, ...] = ()
    stored_less: int = 0


def quantization_of(config: dict[str, Any], where: str) -> Quantization | None:
    """Return the quantization of a checkpoint, from its config.json; None for a checkpoint that is not quantized.

    Raises:
        ConfigError: its quantization is not supported.
    """
    how = config.get("quantization_config") or {}
    method, block = how.get("quant_method"), how.get("weight_block_size")
    if method is None:
        return None
    said = ""
    if method == "fp8":
        if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
            return Quantization(FP8, (block[0], block[1]))
        if block is None:
            return Quantization(FP8)
        said = f", weight_block_size {block}"
    elif method == "modelopt":
        algorithm = how.get("quant_algo")
        if str(algorithm).upper() == "FP8":
            return Quantization(FP8)
        said = f", quant_algo {algorithm}"
    elif method == "compressed-tensors":
        weights = [group.get("weights") or {} for group in (how.get("config_groups") or {}).values()]
        forms = [f"{w.get('type')} of {w.get('num_bits')} bits by {w.get('strategy')}" for w in weights]
        if set(forms) == {"float of 8 bits by tensor"}:
            return Quantization(FP8)
        said = f", {' and '.join(forms) or 'no config_groups'}"
    elif method in ("gptq", "awq"):
        bits, names = how.get("bits"), ("checkpoint_format", "format", "version")
        layout = str(next(filter(None, map(how.get, names)), "gptq" if method == "gptq" else "gemm")).lower()
        if method == "gptq" and bits in (4, 8) and layout in _STORED_LESS:
            return Quantization(GPTQ, stored_less=_STORED_LESS[layout])
        if method == "awq" and bits == 4 and layout == "gemm":
            return Quantization(AWQ)
        said = f", {bits} bits, {layout}"
    raise ConfigError(
        f"the weights of this checkpoint are quantized ({method}{said}): only FP8 with a scale for each block, or for "
        "each tensor, GPTQ of 4 or 8 bits and AWQ's gemm of 4 bits are read",
        where=where,
        remedy="give the original checkpoint, or convert this one to bfloat16 first",
    )
