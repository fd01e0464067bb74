"""The tensors of a Hugging Face checkpoint, read whole or in parts; quantized tensors are dequantized.

Block-quantized FP8 is DeepSeek-V3's format (arXiv 2412.19437, section 3.3.2). `X` holds float8_e4m3fn. `X_scale_inv`
holds a factor for each block of 128 x 128 elements of `X`. Others (llm-compressor, ModelOpt) have one factor `X_scale`
for all of `X`, and scales of activations, which are not read.

GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978) store integers `[in, out]`, with a zero and a scale for each group of
inputs and each output. The weight is (integer - zero) * scale. An int32 holds several integers, the first in its lowest
bits: in GPTQ's `qweight` neighbouring inputs, otherwise neighbouring outputs. AWQ's have a special order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoints.hf_export import DTYPES, read_hf_config
from instep.checkpoints.quantization import AWQ, PACKED, Quantization, quantization_of
from instep.checkpoints.weight_files import PARTS, opened, weight_files, weight_names
from instep.errors import CheckpointError

FP8, SCALES = "F8_E4M3", ("_scale_inv", "_scale")
_ACTIVATIONS = re.compile(r"\.(input|activation|output|q|k|v|kv|prob)_scale$")
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in an int32, of eight neighbours
ROWS = 128  # rows of a matrix without blocks that are in float32 at a time
_TYPES = {name: getattr(torch, of_torch.removeprefix("torch.")) for of_torch, name in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of an open checkpoint. `dtype` is the type that it is read as; None: one that instep does not write."""

    name: str
    path: Path
    file: Any  # of `opened`
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the part [start, stop) along `dim`, 0 or 1; by default all."""
        if start == 0 and stop is None:
            tensor: Tensor = self.file.get_tensor(self.name)
        else:
            stored = self.file.get_slice(self.name)
            tensor = stored[start:stop] if dim == 0 else stored[:, start:stop]
        return tensor


@dataclass(frozen=True, kw_only=True)
class BlockQuantized(StoredTensor):
    """A matrix in FP8; `scale` has one entry per block of `block` rows and columns (fewer at the ends)."""

    scale: StoredTensor
    block: tuple[int, int]

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        stop, size = self.shape[dim] if stop is None else stop, self.block[dim]
        weight = super().read(dim, start, stop)
        scale = self.scale.read(dim, start // size, -(-stop // size)).float()
        before = [start % size if d == dim else 0 for d in range(2)]  # skipped in the first block
        wide = scale.repeat_interleave(self.block[1], 1)[:, before[1] : before[1] + weight.shape[1]]
        out = torch.empty(weight.shape, dtype=self.dtype)
        for i, of_row in enumerate(wide):  # one row of blocks at a time is in float32
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


@dataclass(frozen=True, kw_only=True)
class PackedTensor(StoredTensor):
    """A matrix packed by GPTQ or AWQ. `parts` are its tensors, by the last part of their names.

    Scales are rounded to `dtype` first, as in an engine that computes in it.
    """

    parts: Mapping[str, StoredTensor]
    how: Quantization

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        stop = self.shape[dim] if stop is None else stop
        parts = {end: part.read() for end, part in self.parts.items()}
        scales, width = parts["scales"].to(self.dtype).float().T, self.shape[0] // parts["qzeros"].shape[1]
        num_in, num_groups = self.shape[1], scales.shape[1]
        group = parts.get("g_idx", torch.arange(num_in) // -(-num_in // num_groups)).long()
        if not bool(((0 <= group) & (group < num_groups)).all()):
            raise _unreadable(self.parts["g_idx"], f"names groups of inputs outside of 0 to {num_groups - 1}")
        top, bottom, columns = (start, stop, slice(None)) if dim == 0 else (0, self.shape[0], slice(start, stop))
        out = torch.empty(bottom - top, len(group[columns]), dtype=self.dtype)
        for first in range(top // ROWS * ROWS, bottom, ROWS):
            rows, words = slice(first, first + ROWS), slice(first // width, (first + ROWS) // width)
            if self.how.name == AWQ:
                numbers, zeros = (_unpacked(parts[end][:, words], _AWQ_PLACES).T for end in ("qweight", "qzeros"))
            else:
                numbers = _unpacked(parts["qweight"][:, rows].T, range(width))
                zeros = _unpacked(parts["qzeros"][:, words], range(width)).T
                zeros = (zeros + self.how.stored_less) % (1 << 32 // width)
            full = (numbers - zeros[:, group]) * scales[rows][:, group]
            low = max(first, top)
            out[low - top : first + ROWS - top] = full[low - first : bottom - first, columns]
        return out


def _unpacked(words: Tensor, places: Sequence[int]) -> Tensor:
    """Unpack the rows of `words`: each int32 holds one integer at each of `places`."""
    bits = 32 // len(places)
    shifts = bits * torch.tensor(places, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (1 << bits) - 1).flatten(1)


@contextmanager
def opened_weights(folder: Path, dtype: torch.dtype) -> Iterator[dict[str, StoredTensor]]:
    """Yield the tensors of the checkpoint `folder` by name, in the order of its index, while all its files are open.

    Args:
        dtype: the dtype of dequantized tensors. Their scales are not listed as tensors.

    Raises:
        CheckpointError: a file is missing or damaged; or a tensor that belongs to a quantized one, such as its scale,
            is missing or has another shape.
        ConfigError: config.json cannot be read, or its quantization is not supported.
    """
    how, files = quantization_of(read_hf_config(folder), str(folder)), weight_files(folder)
    block = how.block if how is not None and how.name not in PACKED else None
    with ExitStack() as stack:
        shards = {path: stack.enter_context(opened(path)) for path in sorted(set(files.values()))}
        slices = {name: shards[path].get_slice(name) for name, path in files.items()}
        tensors = {
            name: StoredTensor(name, path, shards[path], tuple(s.get_shape()), _TYPES.get(s.get_dtype()))
            for name, path, s in zip(files, files.values(), slices.values(), strict=True)
        }
        for name, names in weight_names(files).items():
            if name not in names:
                parts = {n.rpartition(".")[2]: tensors.pop(n) for n in names}
                tensors[name] = _packed(name, parts, how, dtype)
        for name in [name for name, stored in slices.items() if stored.get_dtype() == FP8]:
            scales = [tensors.pop(name + end) for end in SCALES if name + end in tensors]
            tensors[name] = _quantized(tensors[name], scales[0] if scales else None, block, dtype)
        if block is not None:
            tensors = {name: tensor for name, tensor in tensors.items() if not _ACTIVATIONS.search(name)}
        yield tensors


def _packed(name: str, parts: Mapping[str, StoredTensor], how: Quantization | None, dtype: torch.dtype) -> StoredTensor:
    weight = parts["qweight"]
    if how is None or how.name not in PACKED:
        problem = "config.json has no quantization_config of GPTQ or AWQ"
    elif missing := [end for end in PARTS[:3] if end not in parts]:
        problem = f"{name.removesuffix('weight')}{missing[0]} is missing"
    elif (shape := _packed_shape(parts, how.name == AWQ)) is not None:
        return PackedTensor(name, weight.path, weight.file, shape, dtype, parts=parts, how=how)
    else:
        shapes = ", ".join(f"{end} {list(part.shape)} of {part.dtype}" for end, part in parts.items())
        problem = f"its tensors do not fit together: {shapes}"
    raise _unreadable(weight, f"is packed, and {problem}")


def _packed_shape(parts: Mapping[str, StoredTensor], awq: bool) -> tuple[int, int] | None:
    """Return the shape `[out, in]` of the unpacked weight; None if the parts do not fit together."""
    shapes = {end: part.shape for end, part in parts.items()}
    integers = all(part.dtype is torch.int32 for end, part in parts.items() if end != "scales")
    if not integers or len(shapes["qweight"]) != 2:
        return None
    (rows, columns), groups = shapes["qweight"], shapes["scales"][:1]
    for width in (8,) if awq else (8, 4):
        num_in, num_out = (rows, columns * width) if awq else (rows * width, columns)
        fit = {"qzeros": (*groups, num_out // width), "scales": (*groups, num_out), "g_idx": (num_in,)}
        if groups > (0,) and all(shapes[end] == fit[end] for end in shapes if end != "qweight"):
            return num_out, num_in
    return None


def _quantized(
    weight: StoredTensor, scale: StoredTensor | None, block: tuple[int, ...] | None, dtype: torch.dtype
) -> StoredTensor:
    place = (weight.name, weight.path, weight.file, weight.shape, dtype)
    wanted = None
    if block and len(weight.shape) == 2:
        wanted = tuple(-(-n // size) for n, size in zip(weight.shape, block, strict=True))
    if block is None:
        problem = "config.json has no quantization_config of FP8, and there is no hf_quant_config.json"
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
    raise _unreadable(weight, f"is in FP8, and {problem}")


def _unreadable(weight: StoredTensor, what: str) -> CheckpointError:
    remedy = "download the checkpoint again, config.json too; or give one in bfloat16"
    return CheckpointError(
        f"{weight.name}, of shape {weight.shape}, {what}", where=str(weight.path.parent), remedy=remedy
    )
