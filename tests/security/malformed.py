"""Checkpoints as careless or hostile programs write them: of the wrong types, without end, or beyond their folder."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)

from instep.checkpoints.dist_checkpoint import METADATA, read_index

Damage = Callable[[Path], object]  # of a folder
DEEP = 20_000
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
WIDE = torch.Size((2**40, 2**20))


def index(change: Callable[[Metadata], object]) -> Damage:
    """Write the index of `folder` again, after a change of its content, or with what `change` returns."""

    def damage(folder: Path) -> None:
        content = read_index(folder)
        other = change(content)
        (folder / METADATA).write_bytes(pickle.dumps(content if other is None else other))

    return damage


def places(change: Callable[[Any], object]) -> Damage:
    """Change the place of each tensor in its file."""

    def all_of(content: Metadata) -> None:
        for info in content.storage_data.values():
            change(info)

    return index(all_of)


def tensors(change: Callable[[Any], object]) -> Damage:
    def all_of(content: Metadata) -> None:
        for about in content.state_dict_metadata.values():
            if not isinstance(about, BytesStorageMetadata):
                change(about)

    return index(all_of)


def renamed(old: str, new: str) -> Damage:
    """A tensor under another name, in the index and in its places."""

    def damage(content: Metadata) -> None:
        stored = content.state_dict_metadata
        content.state_dict_metadata = {new if k == old else k: v for k, v in stored.items()}
        content.storage_data = {
            MetadataIndex(new, k.offset) if k.fqn == old else k: v for k, v in content.storage_data.items()
        }

    return index(damage)


def file(name: str, content: bytes | str) -> Damage:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def pipe(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def _set(name: str, value: Any) -> Callable[[Any], object]:
    return lambda item: setattr(item, name, value)


TORCH_DIST: dict[str, Damage] = {
    "a list for the dict of tensors": index(_set("state_dict_metadata", [1])),
    "a list for the dict of places": index(_set("storage_data", [(1, 2)])),
    "no places": index(_set("storage_data", None)),
    "a number for the index": file(METADATA, pickle.dumps(7)),
    "a string for a tensor": index(lambda m: m.state_dict_metadata.update({QKV: "x"})),
    "whole numbers for names": index(_set("state_dict_metadata", {1: BytesStorageMetadata(), 2: StorageMeta()})),
    "whole numbers for places": index(_set("storage_data", {1: 2})),
    "a number for a shape": tensors(_set("size", 7)),
    "a list for a shape": tensors(_set("size", [3, 4])),
    "a shape below zero": tensors(_set("size", torch.Size((-1, 4)))),
    "a scalar for each weight": tensors(lambda t: (_set("size", torch.Size(()))(t), t.chunks.clear())),
    "another shape for each weight": tensors(_set("size", WIDE)),
    "chunks of more dimensions": tensors(
        lambda t: _set("chunks", [ChunkStorageMetadata(torch.Size((0,) * 5), torch.Size((1,) * 5))])(t)
    ),
    "a chunk outside": tensors(
        lambda t: _set("chunks", [ChunkStorageMetadata(torch.Size(t.size), torch.Size(t.size))])(t)
    ),
    "a dict for chunks": tensors(_set("chunks", {})),
    "no chunks": tensors(_set("chunks", [])),
    "a string for a type": tensors(lambda t: _set("dtype", "torch.bfloat16")(t.properties)),
    "an offset of text": places(_set("offset", "0")),
    "an offset below zero": places(_set("offset", -5)),
    "a length without end": places(_set("length", 2**62)),
    "a length of no byte": places(_set("length", 0)),
    "another offset": places(lambda info: _set("offset", info.offset + 1)(info)),
    "a file elsewhere": places(_set("relative_path", "../../hf/model.safetensors")),
    "a file by its whole path": places(_set("relative_path", "/etc/passwd")),
    "a number for a file": places(_set("relative_path", 7)),
    "a file with a null": places(_set("relative_path", "a\0b")),
    "the folder for a file": places(_set("relative_path", ".")),
    "an extension of torch": places(_set("transform_descriptors", ["stream.zstd"])),
    "a layer out of range": renamed(QKV, QKV.replace("layers.0", "layers.99")),
    "a layer that is no number": renamed(QKV, QKV.replace("layers.0", "layers.x")),
    "a name of 5,000 digits": renamed(QKV, QKV.replace("layers.0", "layers." + "1" * 5000)),
    "a name of half a surrogate": renamed(QKV, "decoder.layers.\ud800.weight"),
    "an index of ten bytes that asks for 2 GB": file(METADATA, b"\x80\4B\xff\xff\xff\x7fabc"),
    "an index that is no pickle": file(METADATA, b"hello"),
    "an empty index": file(METADATA, b""),
    "an index of a terabyte": lambda folder: os.truncate(folder / METADATA, 2**40),
    "a pipe for the index": pipe(METADATA),
    "a pipe for a file of tensors": pipe("__0_0.distcp"),
    "a pipe for metadata.json": pipe("metadata.json"),
    "a list in metadata.json": file("metadata.json", "[]"),
    "a deep metadata.json": file("metadata.json", "[" * DEEP + "]" * DEEP),
    "a metadata.json that is no text": file("metadata.json", b"\xff\xfe"),
    "no file of tensors but zeros": lambda folder: (folder / "__0_0.distcp").write_bytes(
        bytes((folder / "__0_0.distcp").stat().st_size)
    ),
    "a tracker of 5,000 digits": file("../latest_checkpointed_iteration.txt", "1" * 5000),
    "a pipe for the tracker": pipe("../latest_checkpointed_iteration.txt"),
    "a list of files that is deep": file("files.json", "[" * DEEP),
    "a list of files elsewhere": file(
        "files.json", json.dumps({"written_by": "instep", "digest": "xxh3-128", "files": {"/dev/zero": [0, None]}})
    ),
    "a pipe for a list of files": pipe("files.json"),
}


def rank_file(change: Callable[[dict[Any, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        place = folder / "mp_rank_00" / "model_optim_rng.pt"
        content = torch.load(place, weights_only=False)
        other = change(content)
        torch.save(content if other is None else other, place)

    return damage


def _rename(content: dict[Any, Any], old: str, new: Any) -> None:
    content["model"] = {new if k == old else k: v for k, v in content["model"].items()}


def _bomb(folder: Path) -> None:
    """A tensor of 2 GB whose storage has four bytes."""
    place = folder / "mp_rank_00" / "model_optim_rng.pt"
    torch.save({"model": {"decoder.final_layernorm.weight": torch.zeros(1).expand(2**29)}}, place)


RANK = "mp_rank_00/model_optim_rng.pt"
TORCH: dict[str, Damage] = {
    "a list for the file": rank_file(lambda c: [c]),
    "a tensor for the file": rank_file(lambda c: torch.ones(3)),
    "a list for the model": rank_file(lambda c: c.update(model=[1, 2])),
    "no model": rank_file(lambda c: c.pop("model") and None),
    "whole numbers for names": rank_file(lambda c: _rename(c, QKV, 7)),
    "a name of half a surrogate": rank_file(lambda c: _rename(c, QKV, "decoder.layers.\ud800.weight")),
    "a tuple for a name": rank_file(lambda c: _rename(c, QKV, (QKV, 1))),
    "a layer out of range": rank_file(lambda c: _rename(c, QKV, QKV.replace("layers.0", "layers.99"))),
    "a layer that is no number": rank_file(lambda c: _rename(c, QKV, QKV.replace("layers.0", "layers.x"))),
    "a name that ends early": rank_file(lambda c: _rename(c, QKV, "decoder.layers.0")),
    "a name of 5,000 digits": rank_file(lambda c: _rename(c, QKV, QKV.replace("layers.0", "layers." + "1" * 5000))),
    "an expert that is no number": rank_file(
        lambda c: _rename(c, QKV, "decoder.layers.0.mlp.experts.local_experts.x.linear_fc1.weight")
    ),
    "an expert and no more": rank_file(lambda c: _rename(c, QKV, "decoder.layers.0.mlp.experts.local_experts.1")),
    "scalars for all weights": rank_file(lambda c: c.update(model={k: torch.tensor(1.0) for k in c["model"]})),
    "weights of no elements": rank_file(lambda c: c.update(model={k: torch.zeros(0, 3) for k in c["model"]})),
    "numbers for all weights": rank_file(lambda c: c.update(model=dict.fromkeys(c["model"], 1.0))),
    "a sparse weight": rank_file(lambda c: c["model"].update({QKV: torch.eye(4).to_sparse()})),
    "a list for the optimizer": rank_file(lambda c: c.update(optimizer_by_parameter=[1])),
    "a list in the optimizer": rank_file(lambda c: c.update(optimizer_by_parameter={"model": [1]})),
    "2 GB in four bytes": _bomb,
    "no archive": file(RANK, b"hello"),
    "an empty file": file(RANK, b""),
    "a pipe for the file": pipe(RANK),
    "a file that is cut off": lambda folder: os.truncate(folder / RANK, 5000),
    "ranks that do not belong together": lambda folder: _copy(folder / "mp_rank_00", folder / "mp_rank_01"),
}


def _copy(source: Path, other: Path) -> None:
    other.mkdir()
    torch.save({"model": {QKV: torch.ones(())}}, other / "model_optim_rng.pt")
    assert source.is_dir()


def _config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def _weight_map(change: Callable[[dict[str, Any]], object]) -> Damage:
    """An index of safetensors for the only file, changed."""

    def damage(folder: Path) -> None:
        names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
        other = change(names)
        content = {"weight_map": names if other is None else other}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return damage


def _all(value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda names: dict.fromkeys(names, value)


def _weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    def damage(folder: Path) -> None:
        content = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(change(content), folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def _header(header: str, size: int | None = None) -> Damage:
    raw = header.encode()
    return file("model.safetensors", struct.pack("<Q", len(raw) if size is None else size) + raw)


def _beside(folder: Path) -> None:
    """Weights that fit, in a file that is none of this folder."""
    _weight_map(_all("../other.safetensors"))(folder)
    (folder / "model.safetensors").rename(folder.parent / "other.safetensors")


HF: dict[str, Damage] = {
    "a weight beside the folder": _beside,
    "a weight by its whole path": _weight_map(_all("/etc/passwd")),
    "a weight below the folder and out of it": _weight_map(_all("a/../../other.safetensors")),
    "the folder for a weight": _weight_map(_all(".")),
    "no name for a weight": _weight_map(_all("")),
    "a name with a null": _weight_map(_all("a\0b")),
    "a number for a weight": _weight_map(_all(3)),
    "a list of weights": _weight_map(lambda names: [*names]),
    "a name of 5,000 digits": _weight_map(lambda names: names.update({"1" * 5000: "model.safetensors"})),
    "a layer of 5,000 digits": _weights(lambda w: w | {f"model.layers.{'1' * 5000}.x": torch.ones(2)}),
    "a layer out of range": _weights(lambda w: w | {"model.layers.99.x.weight": torch.ones(2)}),
    "scalars for all weights": _weights(lambda w: {name: torch.tensor(1.0) for name in w}),
    "weights of another type": _weights(lambda w: {name: t.to(torch.int64) for name, t in w.items()}),
    "a deep index": file("model.safetensors.index.json", '{"weight_map": ' + "[" * DEEP),
    "a pipe for the index": pipe("model.safetensors.index.json"),
    "a pipe for the weights": pipe("model.safetensors"),
    "a pipe for config.json": pipe("config.json"),
    "a pipe for the tokenizer": pipe("tokenizer.json"),
    "a header of ten bytes that asks for 2 GB": _header("{}", 2**31),
    "a header of a tensor without end": _header(
        '{"model.norm.weight": {"dtype": "F32", "shape": [4611686018427387904, 16], "data_offsets": [0, 16]}}'
    ),
    "a deep header": _header('{"__metadata__": ' + "[" * DEEP + "]" * DEEP + "}"),
    "a list for the header": _header("[]"),
    "a deep config.json": file("config.json", '{"a": ' + "[" * DEEP + "]" * DEEP + "}"),
    "a list for config.json": file("config.json", "[]"),
    "a number of 5,000 digits": file("config.json", '{"model_type": "qwen3", "num_hidden_layers": ' + "1" * 5000 + "}"),
    "a list for the quantization": _config(quantization_config=[1]),
    "a number for the quantization": _config(quantization_config={"quant_method": 7}),
    "a list for groups of the quantization": _config(
        quantization_config={"quant_method": "compressed-tensors", "config_groups": [1]}
    ),
    "numbers for architectures": _config(architectures=[1, 2]),
    "a number for architectures": _config(architectures=7),
    "a list for the family": _config(model_type=["qwen3"]),
    "an unknown family": _config(model_type="x" * 5000),
    "layers of text": _config(num_hidden_layers="many"),
    "layers below zero": _config(num_hidden_layers=-1),
    "layers without end": _config(num_hidden_layers=10**9),
    "no heads": _config(num_attention_heads=0),
    "a fraction of heads": _config(num_attention_heads=2.5),
    "a null for the width": _config(hidden_size=None),
    "a list for the vocabulary": _config(vocab_size=[1]),
    "a number for the text's config": _config(text_config=7),
    "a list for rotary positions": _config(rope_parameters=[1], rope_scaling=[1]),
    "a number for kinds of layers": _config(layer_types=7),
}


def all_of() -> Iterator[tuple[str, str, Damage]]:
    for kind, damages in (("torch_dist", TORCH_DIST), ("torch", TORCH), ("hf", HF)):
        for name, damage in damages.items():
            yield kind, name, damage
