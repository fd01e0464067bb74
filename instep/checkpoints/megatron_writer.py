"""Write weights as Megatron's `torch_dist`, with the names of Transformer-Engine models, one parameter at a time.

torch's own writer of the format keeps the tensors of a file in memory until the file is complete.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from instep.checkpoints.dist_checkpoint import METADATA
from instep.checkpoints.megatron_files import EXPERTS, FUSED, LOCAL_EXPERTS, full_shape
from instep.errors import CheckpointError
from instep.models.shape import ModelShape
from instep.models.weight_map import Kind, WeightEntry, pieces, weight_entries

FILE_BYTES = 5 * 10**9
VOCAB_MULTIPLE = 128  # Megatron's default of --make-vocab-size-divisible-by


class TorchDistWriter:
    """A context manager that fills the existing folder `folder`; its index is written at the end of the block.

    Each layer has its own tensors (`decoder.layers.3...`), and `content_metadata` says so to Megatron. The experts are
    in one tensor.
    """

    def __init__(self, folder: Path, shape: ModelShape):
        self.folder, self.shape = folder, shape
        self.names = {entry.megatron for entry in weight_entries(shape)}
        self._tensors: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._file: Any = None

    def __enter__(self) -> TorchDistWriter:
        self._checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # they take as long as the writing, and no program reads them
        return self

    def add(self, entry: WeightEntry, tensors: Sequence[Tensor]) -> int:
        """Write the parameter made of the Hugging Face tensors. Return their bytes.

        Raises:
            CheckpointError: the tensors have different types.
        """
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            what = f"{', '.join(entry.names)} are one tensor in Megatron, but have different types: {dtypes}"
            raise CheckpointError(what, where=str(self.folder), remedy="save the Hugging Face checkpoint in one type")
        size = full_shape(entry)
        rows = size[0] if entry.kind is not Kind.VOCAB else -(-size[0] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        key, place, count = self._key(entry)
        chunk = torch.Size((*[1] * len(place), rows, *size[1:]))
        offsets = torch.Size((*place, *[0] * len(size)))
        about = self._tensors.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=dtypes.pop()), torch.Size((*count, rows, *size[1:])), [])
        )
        about.chunks.append(ChunkStorageMetadata(offsets, chunk))
        self._write(MetadataIndex(key, offsets), pieces(entry, tensors, self.shape, rows), chunk)
        module, _, kind = key.rpartition(".")
        if kind == "weight" and (".linear_" in key or module.endswith("layernorm")):  # a separate norm has one, too
            self._extra_state(module, place, count)
        if entry.megatron.endswith("self_attention.linear_proj.weight"):
            self._extra_state(module.replace("linear_proj", "core_attention"), (), ())
        return sum(tensor.nbytes for tensor in tensors)

    def _key(self, entry: WeightEntry) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Return its name in a Transformer-Engine model, the index of its expert, and the number of experts."""
        if not (layer := entry.prefix):
            return entry.megatron, (), ()
        rest = entry.megatron.removeprefix(layer)
        if entry.expert is not None:
            assert self.shape.experts is not None
            rest = EXPERTS + rest.removeprefix(f"{LOCAL_EXPERTS}{entry.expert}.")
            return layer + rest, (entry.expert,), (self.shape.experts.num,)
        for own, fused in FUSED:  # a norm is fused if the layer has the module after it
            if rest.startswith(own) and f"{layer}{fused.rpartition('.')[0]}.weight" in self.names:
                rest = fused + rest.removeprefix(own)
        return layer + rest, (), ()

    def _extra_state(self, module: str, place: tuple[int, ...], count: tuple[int, ...]) -> None:
        """Return the entry that Transformer Engine's modules read: their FP8 scales, here empty."""
        number, size = (".".join(map(str, n)) for n in (place or (0,), count or (1,)))
        key = f"{module}._extra_state/shard_{number}_{size}"
        self._tensors[key] = BytesStorageMetadata()
        self._write(MetadataIndex(key), [_no_scales()])

    def _write(self, index: MetadataIndex, parts: Sequence[Tensor], shape: torch.Size | None = None) -> None:
        """Write the tensor of this shape from its parts, one after the other; without a shape, write their bytes."""
        if self._file is None or self._file.tell() > FILE_BYTES:
            self._close()
            number = len({info.relative_path for info in self._places.values()})
            self._file = open(self.folder / f"__0_{number}.distcp", "wb")  # noqa: SIM115
        start = self._file.tell()
        if shape is None:
            _write_bytes(self._file, parts)
        else:
            with torch.serialization.skip_data():
                torch.save(torch.empty(shape, dtype=parts[0].dtype), _Filled(self._file, parts))
        self._places[index] = _StorageInfo(Path(self._file.name).name, start, self._file.tell() - start)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        torch.serialization.set_crc32_options(self._checksums)
        self._close()
        if kind is not None:
            return
        content = {"non_homogeneous_layers": True, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        common = {
            "args": megatron_arguments(self.shape),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "content_metadata": content,
        }
        torch.save(common, self.folder / "common.pt")
        config = dict(sharded_backend="torch_dist", sharded_backend_version=1, common_backend="torch")
        (self.folder / "metadata.json").write_text(json.dumps({**config, "common_backend_version": 1}))
        with (self.folder / METADATA).open("wb") as file:
            pickle.dump(Metadata(self._tensors, planner_data={}, storage_data=self._places), file)


def megatron_arguments(shape: ModelShape, **others: Any) -> argparse.Namespace:
    """Return the Megatron arguments that its loader compares; `others` replace those of `instep convert`."""
    own = dict(
        **shape.sizes,
        num_experts=shape.experts.num if shape.experts else None,
        max_position_embeddings=shape.max_position_embeddings,
        untie_embeddings_and_output_weights=not shape.tied,
        add_position_embedding=True,
        vocab_size=shape.vocab_size,
        padded_vocab_size=-(-shape.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        make_vocab_size_divisible_by=VOCAB_MULTIPLE,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_save_optim=True,
        no_save_rng=True,
        ckpt_format="torch_dist",
    )
    return argparse.Namespace(**own | others)


def _write_bytes(file: Any, parts: Sequence[Tensor]) -> int:
    return sum(file.write(part.contiguous().view(-1).view(torch.uint8).numpy()) for part in parts)


@cache
def _no_scales() -> Tensor:
    """Return the bytes of an extra state, made once: there is one for each weight, and `torch.save` is slow."""
    data = io.BytesIO()
    torch.save([torch.empty(0, dtype=torch.uint8)], data)  # Megatron keeps a list of objects
    return torch.frombuffer(data.getbuffer(), dtype=torch.uint8)


class _Filled:
    """The file as `torch.save` sees it without data: where it would leave a hole, write the parts of the tensor.

    Nothing is copied, and no memory is taken: to find pages takes the kernel as long as to write them.
    """

    def __init__(self, file: Any, parts: Sequence[Tensor]):
        self._file, self._parts = file, parts
        self.write, self.flush = file.write, file.flush

    def seek(self, size: int, whence: int) -> int:
        written = _write_bytes(self._file, self._parts)
        if (whence, size) != (io.SEEK_CUR, written):
            raise AssertionError(f"torch.save leaves room for {size} bytes, but the tensor has {written}")
        return int(self._file.tell())
