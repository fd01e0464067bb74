"""The tensors of a Hugging Face checkpoint, read one or one part at a time; those in FP8 become what the model takes.

Block-quantized FP8 is how DeepSeek-V3 is published (arXiv 2412.19437, section 3.3.2): `X` holds float8_e4m3fn,
`X_scale_inv` a number for each block of 128 x 128 of its elements, with which these are multiplied. Others
(llm-compressor, ModelOpt) have one number `X_scale` for all of `X`, and scales of activations, which are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoints.hf_export import DTYPES, fp8_block, read_hf_config
from instep.checkpoints.weight_files import opened, weight_files
from instep.errors import CheckpointError

FP8, SCALES = "F8_E4M3", ("_scale_inv", "_scale")
_ACTIVATIONS = re.compile(r"\.(input|activation|output|q|k|v|kv|prob)_scale$")
ROWS = 128  # of a matrix with one scale, which are in float32 at a time
_TYPES = {name: getattr(torch, of_torch.removeprefix("torch.")) for of_torch, name in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of an open checkpoint. `dtype` is what it is read as; None: a type that instep does not write."""

    name: str
    path: Path
    file: Any  # of `opened`
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Its part [start, stop) along `dim`, 0 or 1; by default all of it."""
        if start == 0 and stop is None:
            tensor: Tensor = self.file.get_tensor(self.name)
        else:
            stored = self.file.get_slice(self.name)
            tensor = stored[start:stop] if dim == 0 else stored[:, start:stop]
        return tensor


@dataclass(frozen=True, kw_only=True)
class BlockQuantized(StoredTensor):
    """A matrix in FP8; `scale` is that of its blocks, each of `block` rows and columns (fewer at the ends)."""

    scale: StoredTensor
    block: tuple[int, int]

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        stop, size = self.shape[dim] if stop is None else stop, self.block[dim]
        weight = super().read(dim, start, stop)
        scale = self.scale.read(dim, start // size, -(-stop // size)).float()
        before = [start % size if d == dim else 0 for d in range(2)]  # of the first block's rows and columns, left out
        wide = scale.repeat_interleave(self.block[1], 1)[:, before[1] : before[1] + weight.shape[1]]
        out = torch.empty(weight.shape, dtype=self.dtype)
        for i, of_row in enumerate(wide):  # a row of blocks at a time is in float32
            rows = slice(max(0, i * self.block[0] - before[0]), (i + 1) * self.block[0] - before[0])
            out[rows] = weight[rows].float() * of_row
        return out


@dataclass(frozen=True, kw_only=True)
class TensorQuantized(StoredTensor):
    """A tensor in FP8; `scale` has one element."""

    scale: StoredTensor

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        weight, scale = super().read(dim, start, stop), self.scale.read().float().view(())
        out = torch.empty(weight.shape, dtype=self.dtype)
        for to, rows in zip(out.split(ROWS), weight.split(ROWS), strict=True):
            to.copy_(rows.float() * scale)
        return out


@contextmanager
def opened_weights(folder: Path, dtype: torch.dtype) -> Iterator[dict[str, StoredTensor]]:
    """The tensors of the checkpoint `folder` by name, in the order of its index, while all its files are open.

    Args:
        dtype: what tensors in FP8 are read as. Their scales are no tensors of their own here.

    Raises:
        CheckpointError: a file is missing or damaged, or a tensor in FP8 has no scale, or one of another shape.
        ConfigError: no readable config.json; its weights are quantized in another way.
    """
    block, files = fp8_block(read_hf_config(folder), str(folder)), weight_files(folder)
    with ExitStack() as stack:
        shards = {path: stack.enter_context(opened(path)) for path in sorted(set(files.values()))}
        slices = {name: shards[path].get_slice(name) for name, path in files.items()}
        tensors = {
            name: StoredTensor(name, path, shards[path], tuple(s.get_shape()), _TYPES.get(s.get_dtype()))
            for name, path, s in zip(files, files.values(), slices.values(), strict=True)
        }
        for name in [name for name, stored in slices.items() if stored.get_dtype() == FP8]:
            scales = [tensors.pop(name + end) for end in SCALES if name + end in tensors]
            tensors[name] = _quantized(tensors[name], scales[0] if scales else None, block, dtype)
        if block is not None:
            tensors = {name: tensor for name, tensor in tensors.items() if not _ACTIVATIONS.search(name)}
        yield tensors


def _quantized(
    weight: StoredTensor, scale: StoredTensor | None, block: tuple[int, ...] | None, dtype: torch.dtype
) -> StoredTensor:
    place = (weight.name, weight.path, weight.file, weight.shape, dtype)
    wanted = None
    if block and len(weight.shape) == 2:
        wanted = tuple(-(-n // size) for n, size in zip(weight.shape, block, strict=True))
    if block is None:
        problem = "config.json has no quantization_config of FP8, nor is there a hf_quant_config.json"
    elif scale is None:
        problem = f"{weight.name}{SCALES[0 if block else 1]} is missing"
    elif not block:
        if scale.shape in ((), (1,)):
            return TensorQuantized(*place, scale=scale)
        problem = f"{scale.name} has shape {scale.shape}, not one element"
    elif scale.shape != wanted:
        by = " x ".join(map(str, block))
        problem = f"{scale.name} has shape {scale.shape}, not {wanted or 'one'} of its blocks of {by}"
    else:
        return BlockQuantized(*place, scale=scale, block=(block[0], block[1]))
    raise CheckpointError(
        f"{weight.name}, of shape {weight.shape}, is in FP8, and {problem}",
        where=str(weight.path.parent),
        remedy="download the checkpoint again, config.json too; or give one in bfloat16",
    )
