"""What goes wrong with weights on their way: files and messages that are changed between the trainer and an engine.

Each function gets the `update_info` of the control call that is about to be made, and returns the one that is made.
`kept` holds what an earlier session sent (`keep`).
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from instep_engine.manifest import tensor_bytes, tensor_digest

Info = dict[str, Any]
Change = Callable[[Info, Path], Info]
UP = "model.layers.1.mlp.up_proj.weight"


def file_of(info: Info) -> Path:
    """The file that holds the bytes of a bucket, a checkpoint or an adapter."""
    if "path" not in info:
        return Path(info["manifest"]["path"])
    return next(Path(info["path"]).glob("*.safetensors"))


def _of_before(info: Info, kept: Path) -> tuple[Path, Path]:
    """Bytes and message of an earlier session: of a folder or of a bucket, as a first session may send both."""
    kind = "folder" if "path" in info else "bucket"
    return kept / f"{kind}.bytes", kept / f"{kind}.json"


def keep(info: Info, kept: Path) -> Info:
    """Keep what is sent, for a later session; it goes on unchanged."""
    if "manifest" in info:
        data, message = _of_before(info, kept)
        shutil.copy(file_of(info), data)
        message.write_text(json.dumps(info))
    return info


def _offset(info: Info) -> tuple[int, int]:
    """Where the bytes of a weight of the second layer lie in the file, and how many."""
    name = next(t["name"] for t in info["manifest"]["tensors"] if "layers.1.mlp.up_proj" in t["name"])
    if "path" not in info:
        record = next(t for t in info["manifest"]["tensors"] if t["name"] == name)
        return record["offset"], record["nbytes"]
    with file_of(info).open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
    return 8 + length + begin, end - begin


def flipped_bit(info: Info, kept: Path) -> Info:
    with file_of(info).open("r+b") as file:
        file.seek(_offset(info)[0])
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return info


def half_written(info: Info, kept: Path) -> Info:
    """The second half of a tensor has the bytes that the session before has sent."""
    start, size = _offset(info)
    old = _of_before(info, kept)[0].read_bytes()
    with file_of(info).open("r+b") as file:
        file.seek(start + size // 2)
        file.write(old[start + size // 2 : start + size])
    return info


def cut_off(info: Info, kept: Path) -> Info:
    path = file_of(info)
    os.truncate(path, path.stat().st_size * 3 // 4)
    return info


def old_bytes(info: Info, kept: Path) -> Info:
    shutil.copy(_of_before(info, kept)[0], file_of(info))
    return info


def old_message(info: Info, kept: Path) -> Info:
    """The message of the session before, over the bytes of this one."""
    old = json.loads(_of_before(info, kept)[1].read_text())
    old["manifest"]["path"] = info["manifest"]["path"]
    return old | ({"path": info["path"]} if "path" in info else {})


def removed(info: Info, kept: Path) -> Info:
    file_of(info).unlink()
    return info


def link(info: Info, kept: Path) -> Info:
    path = file_of(info)
    path.rename(kept / "elsewhere")
    path.symlink_to(kept / "elsewhere")
    return info


def second_name(info: Info, kept: Path) -> Info:
    """The file has another name, too, by which somebody may change it."""
    os.link(file_of(info), file_of(info).parent.parent / "second.bin")
    return info


def foreign_folder(info: Info, kept: Path) -> Info:
    """The same bytes in a folder that is no run's."""
    folder = kept / "mine"
    if "path" in info:
        shutil.copytree(info["path"], folder)
        return {**info, "path": str(folder)}
    folder.mkdir()
    shutil.copy(file_of(info), folder / "b.bin")
    return {**info, "manifest": {**info["manifest"], "path": str(folder / "b.bin")}}


def open_folder(info: Info, kept: Path) -> Info:
    """All users may write into the folder."""
    folder = Path(info["path"]).parent if "path" in info else file_of(info).parent
    folder.chmod(0o777)
    return info


def _edited(info: Info, part: str, **values: Any) -> Info:
    records = [{**t, **values} if part in t["name"] else t for t in info["manifest"]["tensors"]]
    return {**info, "manifest": {**info["manifest"], "tensors": records}}


def lying_shape(info: Info, kept: Path) -> Info:
    shape = next(t["shape"] for t in info["manifest"]["tensors"] if "layers.1.mlp.up_proj" in t["name"])
    return _edited(info, "layers.1.mlp.up_proj", shape=list(reversed(shape)))


def lying_dtype(info: Info, kept: Path) -> Info:
    return _edited(info, "layers.1.mlp.up_proj", dtype="int32")


def lying_offset(info: Info, kept: Path) -> Info:
    return _edited(info, "layers.1.mlp.up_proj", offset=1 << 40)


def lying_digest(info: Info, kept: Path) -> Info:
    return _edited(info, "layers.1.mlp.up_proj", digest="0" * 32)


def _names(info: Info) -> list[str]:
    return [
        next(t["name"] for t in info["manifest"]["tensors"] if f"layers.0.self_attn.{x}_proj" in t["name"])
        for x in "kv"
    ]


def exchanged_names(info: Info, kept: Path) -> Info:
    k, v = _names(info)
    other = {k: v, v: k}
    records = [{**t, "name": other.get(t["name"], t["name"])} for t in info["manifest"]["tensors"]]
    return {**info, "manifest": {**info["manifest"], "tensors": records}}


def exchanged_in_file(info: Info, kept: Path) -> Info:
    """The header of the file of safetensors lies: k is called v, and v k."""
    tensors, (k, v) = load_file(file_of(info)), _names(info)
    tensors[k], tensors[v] = tensors[v], tensors[k]
    save_file(tensors, file_of(info), metadata={"format": "pt"})
    return info


def one_more_in_file(info: Info, kept: Path) -> Info:
    tensors = load_file(file_of(info))
    save_file({**tensors, "model.layers.9.mlp.up_proj.weight": tensors[UP].clone()}, file_of(info))
    return info


def one_less_in_file(info: Info, kept: Path) -> Info:
    tensors = load_file(file_of(info))
    save_file({name: t for name, t in tensors.items() if name != UP}, file_of(info))
    return info


def other_dtype_in_file(info: Info, kept: Path) -> Info:
    tensors = load_file(file_of(info))
    save_file({**tensors, UP: tensors[UP].to(torch.bfloat16)}, file_of(info))
    return info


def dropped_record(info: Info, kept: Path) -> Info:
    records = [t for t in info["manifest"]["tensors"] if "layers.1.mlp.up_proj" not in t["name"]]
    return {**info, "manifest": {**info["manifest"], "tensors": records}}


def forged(info: Info, kept: Path) -> Info:
    """A tensor is doubled, and its digest is right: only the probe can tell."""
    record = next(t for t in info["manifest"]["tensors"] if "layers.1.mlp.up_proj" in t["name"])
    place, path = slice(record["offset"], record["offset"] + record["nbytes"]), file_of(info)
    data = bytearray(path.read_bytes())
    tensor = 2 * torch.frombuffer(data[place], dtype=getattr(torch, record["dtype"]))
    data[place] = tensor_bytes(tensor)
    path.write_bytes(data)
    return _edited(info, "layers.1.mlp.up_proj", digest=tensor_digest(tensor))


def _configured(info: Info, field: str, factor: int) -> Info:
    """With another configuration of the adapter, which is in the manifest of a bucket, or in an invitation."""
    where = "manifest" if "manifest" in info else "invitation"
    if not (config := info[where]["config"]):  # of the golden path, whose folder has it
        return info
    return {**info, where: {**info[where], "config": {**config, field: factor * config[field]}}}


def other_alpha(info: Info, kept: Path) -> Info:
    return _configured(info, "lora_alpha", 3)


def other_rank(info: Info, kept: Path) -> Info:
    return _configured(info, "r", 2)
