"""Megatron's checkpoints, as instep, slime, vime and Megatron-LM write them, read one slice of one tensor at a time.

Two formats, which differ in the files of the folder:

- `torch_dist`: `.metadata` says where the chunks of each tensor start in the files, for any layout of ranks;
- `torch`: `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`, the state of each tensor-, pipeline- and expert-parallel rank.

Nothing of Megatron is imported, and nothing that a checkpoint names is called. A tensor is found under all names that
Megatron's models use: layers in one tensor (`decoder.layers.mlp.linear_fc2.weight`, `[layers, ...]`) or by number;
experts in one tensor or by number, with separate or joined gate and up rows; separate norms, or norms fused into the
layer after them as in Transformer Engine (`self_attention.linear_qkv.layer_norm_weight`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.checkpoints.dist_checkpoint import METADATA
from instep.checkpoints.megatron_files import (
    EXPERTS,
    FUSED,
    LAYERS,
    LOCAL_EXPERTS,
    MTP,
    RANK_FILE,
    Stored,
    full_shape,
    torch_dist_tensors,
    torch_tensors,
)
from instep.checkpoints.torch_files import load_data
from instep.errors import CheckpointError
from instep.models.shape import ModelShape
from instep.models.weight_map import HEAD, Kind, WeightEntry, join, weight_entries
from instep.system.documents import read_json

_OPTIMIZER = re.compile(r"(?P<prefix>(?:\w+\.)?optimizer\.(?:state\.)?)exp_avg\.")


@dataclass(frozen=True)
class Part:
    """A Megatron parameter, or half of one, in a stored tensor: `index` picks the layer and the expert."""

    key: str
    stored: Stored
    index: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[len(self.index) :]

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 0

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read the box at `offsets` with `sizes`. Raises LookupError if the chunks do not cover it."""
        if not math.prod(sizes):  # a rank whose rows of the vocabulary are padding
            return torch.empty(tuple(sizes), dtype=self.stored.dtype)
        start, size = (*self.index, *offsets), ((1,) * len(self.index) + tuple(sizes))
        out, missing, seen = None, math.prod(sizes), set()
        for chunk in self.stored.at(self.index):
            low = [max(a, b) for a, b in zip(chunk.offsets, start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(chunk.offsets, chunk.sizes, start, size, strict=True)]
            if chunk.offsets in seen or any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            seen.add(chunk.offsets)
            boxes = zip(low, high, chunk.offsets, strict=True)
            piece = chunk.read().view(chunk.sizes)[tuple(slice(a - o, b - o) for a, b, o in boxes)]
            if piece.numel() == math.prod(sizes):
                return piece.reshape(tuple(sizes))
            out = torch.empty(size, dtype=self.stored.dtype) if out is None else out
            out[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))] = piece
            missing -= piece.numel()
        if missing or out is None:
            raise LookupError(f"no file has all of its box of shape {list(size)} at {list(start)}")
        return out.view(tuple(sizes))


class MegatronCheckpoint:
    """The weights of the checkpoint `folder` (`iter_0000010`, `release`) for a model of this shape.

    Args:
        fresh_head: the output layer is not read.

    Attributes:
        mtp: names of tensors of multi-token prediction, if the model has no such layers: they are not read.

    Raises:
        CheckpointError: another format, a missing file, or the checkpoint of another model.
    """

    def __init__(self, folder: Path, shape: ModelShape, *, fresh_head: bool = False):
        self.folder, self.shape = folder, shape
        self.entries = weight_entries(shape)
        if (folder / METADATA).is_file():
            _check_backend(folder)
            self.stored = torch_dist_tensors(folder)
        elif any(folder.glob(f"mp_rank_*/{RANK_FILE}")):
            self.stored = torch_tensors(folder, self.entries)
            if shape.tied:
                self.stored.pop(HEAD, None)  # the copy of the embedding in the last stage
        else:
            raise CheckpointError(
                "not a Megatron checkpoint: neither .metadata (torch_dist) nor mp_rank_*/model_optim_rng.pt (torch)",
                where=str(folder),
                remedy="name a checkpoint that instep, slime, vime or Megatron-LM saved in one of the two formats; "
                "convert others to Hugging Face format with the framework that wrote them",
            )
        self.mtp = [] if shape.mtp else sorted(name for name in self.stored if name.startswith(MTP))
        self._check([e for e in self.entries if not (fresh_head and e.megatron == HEAD)])

    def _check(self, entries: Sequence[WeightEntry]) -> None:
        problems, used = [], set()
        for entry in entries:
            parts, want = self._parts(entry, ""), full_shape(entry)
            used |= {part.key for part in parts}
            shape = (sum(part.rows for part in parts), *parts[0].shape[1:]) if parts else ()
            padded = entry.kind is Kind.VOCAB and shape[1:] == want[1:] and shape[:1] >= want[:1]
            outside = [
                part for part in parts if any(i >= n for i, n in zip(part.index, part.stored.shape, strict=False))
            ]
            if not parts or outside:
                problems.append(f"{entry.megatron} is missing")
            elif shape != want and not padded:
                problems.append(f"{entry.megatron} has shape {shape}, config.json says {want}")
            elif parts[0].index and parts[0].key.startswith(LAYERS) and not parts[0].key[len(LAYERS)].isdigit():
                if parts[0].stored.shape[0] != self.shape.num_layers:
                    problems.append(
                        f"{parts[0].key} has {parts[0].stored.shape[0]} layers, not {self.shape.num_layers}"
                    )
        weights = ("embedding.", "decoder.", "output_layer.", *([MTP] if self.shape.mtp else []))
        head = {HEAD} if len(entries) < len(self.entries) else set()
        problems += [f"{key} is not a tensor of this model" for key in self.stored
                     if key.startswith(weights) and key not in used | head]  # fmt: skip
        if problems:
            problems = list(dict.fromkeys(problems))
            more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
            raise CheckpointError(
                f"the checkpoint does not fit: {'; '.join(problems[:6])}{more}",
                where=str(self.folder),
                remedy="load it with the model that wrote it: --hf-checkpoint names its config.json",
            )

    def local(self, entry: WeightEntry, rank: int, size: int, rows: int, prefix: str = "") -> Tensor:
        """Return the Megatron parameter of `entry` on rank `rank` of `size`, in its stored type.

        Args:
            rows: number of rows of the result; rows beyond the vocabulary are zeros.
            prefix: of the names: "" for weights, `optimizer_prefix(...)` for a state of the optimizer.

        Raises:
            CheckpointError: it is missing, or its file is damaged.
        """
        parts, full = self._parts(entry, prefix), full_shape(entry)
        zeros = (0,) * (len(full) - 1)
        if not parts:
            raise self._damaged(f"{prefix}{entry.megatron} is missing")
        if prefix and entry.kind is not Kind.VOCAB and sum(part.rows for part in parts) != full[0]:
            raise self._damaged(f"{parts[0].key} has shape {parts[0].stored.shape}, not the parameter's")
        try:
            if entry.kind is Kind.GATE_UP and (size > 1 or len(parts) > 1):
                step = full[0] // 2 // size
                up = (parts[1], 0) if len(parts) > 1 else (parts[0], full[0] // 2)
                halves = [(parts[0], 0), up]
                pieces = [part.read((o + rank * step, *zeros), (step, *full[1:])) for part, o in halves]
                return torch.cat(pieces)
            if entry.split_dim == 1:
                step = full[1] // size
                return parts[0].read((0, rank * step), (full[0], step))
            if entry.kind is Kind.VOCAB:
                start = min(rank * rows, full[0])
                found = parts[0].read((start, *zeros), (min(rows, full[0] - start), *full[1:]))
                return torch.nn.functional.pad(found, (0, 0, 0, rows - found.shape[0]))
            step = full[0] if entry.split_dim is None else full[0] // size
            start = 0 if entry.split_dim is None else rank * step
            return parts[0].read((start, *zeros), (step, *full[1:]))
        except (LookupError, RuntimeError, OSError, ValueError) as error:
            raise self._damaged(f"{parts[0].key} cannot be read: {error}") from error

    def tensors(self, entry: WeightEntry) -> list[Tensor]:
        """Return the Hugging Face tensors of `entry`, in the order of its names. Raises CheckpointError as `local`."""
        return join(entry, [self.local(entry, 0, 1, full_shape(entry)[0])], self.shape)

    def dtype(self, entry: WeightEntry) -> torch.dtype:
        return self._parts(entry, "")[0].stored.dtype

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(what, where=str(self.folder), remedy="restore its files, or use another checkpoint")

    def _parts(self, entry: WeightEntry, prefix: str) -> list[Part]:
        for name, index in _names(entry):
            if (stored := self.stored.get(prefix + name)) is not None:
                return [Part(prefix + name, stored, index)]
            halves = [self.stored.get(f"{prefix}{name}_{half}") for half in "wv"]  # gate and up, in two tensors
            if halves[0] is not None and halves[1] is not None:
                return [Part(f"{prefix}{name}_{x}", h, index) for x, h in zip("wv", halves, strict=True) if h]
        return []

    # The optimizer

    def optimizer_prefix(self, entry: WeightEntry, name: str) -> str:
        """Return the prefix of the names of the optimizer's state `name`: `exp_avg`, `exp_avg_sq` or `master`.

        Raises:
            CheckpointError: it is missing, or only the ranks that wrote it can read its layout.
        """
        for prefix in self._optimizer_prefixes:
            state = "fp32_param" if name == "master" and prefix.endswith("state.") else name
            if self._parts(entry, f"{prefix}{state}."):
                return f"{prefix}{state}."
        if name == "master" and self.dtype(entry) is torch.float32:
            return ""  # the weights were saved unchanged
        raise self._no_state(f"it has no optimizer state {name} of {entry.megatron}")

    def _no_state(self, what: str) -> CheckpointError:
        remedy = "--no-load-optim starts with new moments"
        if any(key.startswith("optimizer.distributed.") for key in self.stored):
            what = "its optimizer state is in the buckets of the ranks that wrote it (dp_reshardable)"
            remedy += "; Megatron's --dist-ckpt-optim-fully-reshardable saves a state that other layouts can read"
        return CheckpointError(what, where=str(self.folder), remedy=remedy)

    @cached_property
    def _optimizer_prefixes(self) -> list[str]:
        return sorted({m["prefix"] for key in self.stored if (m := _OPTIMIZER.match(key))})

    def optimizer_step(self) -> float:
        """Return the number of steps of the optimizer. Raises CheckpointError if it cannot be read."""
        if not self._optimizer_prefixes:
            raise self._no_state("it has no optimizer state by parameter")
        place = next(iter(sorted(self.folder.glob(f"mp_rank_*/{RANK_FILE}"))), self.folder / "common.pt")
        try:
            steps = list(_steps(load_data(place), set()))
        except (OverflowError, RuntimeError) as error:
            raise self._no_state(f"the optimizer's steps in {place.name} are not a number") from error
        if not steps:
            raise self._no_state(f"{place.name} has no number of optimizer steps")
        return max(steps)


def _check_backend(folder: Path) -> None:
    """Refuse a checkpoint that has an index like `torch_dist`'s, but other tensors. Raises CheckpointError."""
    file = folder / "metadata.json"
    try:
        backend = read_json(file)["sharded_backend"] if file.exists() else None
    except (OSError, ValueError, LookupError, TypeError) as error:
        what, remedy = (
            f"metadata.json does not name a format: {error!r}",
            "copy the checkpoint again, with all its files",
        )
        raise CheckpointError(what, where=str(file), remedy=remedy) from error
    if backend != "torch_dist":
        what = f"of the format {backend}" if backend else "without metadata.json: of --train-backend hf, or torch_dcp"
        raise CheckpointError(
            f"not a Megatron checkpoint of the format torch_dist or torch: it is one {what}",
            where=str(folder),
            remedy="continue in the framework that wrote it, or export it there to a Hugging Face folder (--save-hf)",
        )


def _steps(node: Any, seen: set[int], name: str = "") -> Iterator[float]:
    """Return the step counts in a state of Megatron's optimizers: per group, or for all parameters.

    Args:
        seen: ids of visited objects: a file may hold the same object many times, or an object that contains itself.
    """
    if name in ("optimizer_step", "common_step", "step"):
        if isinstance(node, (int, float)) or (isinstance(node, Tensor) and node.numel() == 1):
            yield float(node)
    elif isinstance(node, (dict, list)) and id(node) not in seen:
        seen.add(id(node))
        for key, value in node.items() if isinstance(node, dict) else [(name, part) for part in node]:
            if name or isinstance(node, list) or key in ("optimizer", "optimizer_step"):
                yield from _steps(value, seen, str(key))


def _names(entry: WeightEntry) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every name that the parameter may have in a checkpoint, and its place in the tensor of that name."""
    if not entry.prefix:
        yield entry.megatron, ()
        return
    rest = entry.megatron.removeprefix(entry.prefix)
    inner: list[tuple[str, tuple[int, ...]]] = [(rest, ())]
    if entry.expert is not None:
        within = rest.removeprefix(f"{LOCAL_EXPERTS}{entry.expert}.")
        inner = [(EXPERTS + within, (entry.expert,)), (f"{EXPERTS}{entry.expert}.{within}", ())]
    inner += [(fused + rest.removeprefix(own), ()) for own, fused in FUSED if rest.startswith(own)]
    for name, index in inner:
        yield entry.prefix + name, index
        if entry.layer is not None:
            yield LAYERS + name, (entry.layer, *index)
