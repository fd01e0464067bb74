"""A small file that names the same things often takes no more than its size; what a store holds is read as data."""

from __future__ import annotations

import ctypes
import io
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from instep.checkpoints import inert, torch_files
from instep.checkpoints.inert import NoData
from instep.checkpoints.plain import METADATA, read_index
from instep.checkpoints.torch_files import TensorFiles, load_data
from instep.errors import CheckpointError
from instep_neighbours.trl.receiver import _id_or_text


def test_a_pickle_has_no_more_opcodes_than_its_reader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inert, "MAX_STEPS", 1000)
    dicts = b"\x80\x02(" + b"}" * 2000 + b"t."
    with pytest.raises(NoData, match="more than 1,000 opcodes"):
        inert.read(dicts, inert.Name)


def test_tensors_that_share_their_chunks_are_not_made_of_each(tmp_path: Path) -> None:
    """3,000 tensors of 3,000 chunks each, in 100 kB."""
    size = torch.Size((4,))
    shared = TensorStorageMetadata(
        TensorProperties(torch.float32), size, [ChunkStorageMetadata(torch.Size((0,)), size)] * 3000
    )
    content = pickle.dumps(Metadata({f"w{i}": shared for i in range(3000)}, storage_data={}))
    assert len(content) < 100_000
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match="more chunks than it has places"):
        read_index(tmp_path)


def saved(path: Path, pickled: bytes) -> Path:
    """An archive as of torch.save, with one storage of four float32."""
    with zipfile.ZipFile(path, "w") as file:
        for name, data in {"data.pkl": pickled, "byteorder": b"little", "data/0": bytes(16)}.items():
            file.writestr(f"archive/{name}", data)
    return path


def test_a_text_that_is_made_bytes_often_is_made_once(tmp_path: Path) -> None:
    text = b"x" * 10**6
    first = b"c_codecs\nencode\nq\0X" + len(text).to_bytes(4, "little") + text + b"q\1X\6\0\0\0latin1\x86q\2"
    pickled = b"\x80\2}X\1\0\0\0a(" + first + b"h\0h\2R" * 1000 + b"ts."
    values = load_data(saved(tmp_path / "a.pt", pickled))["a"][2:]
    assert values[0] == text and len(values) == 1000
    assert len(set(map(id, values))) == 1  # not a thousand times a megabyte


def test_an_archive_has_a_bounded_number_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_files, "MAX_TENSORS", 100)
    out = io.BytesIO()
    torch.save({"a": [torch.arange(4.0)[:i] for i in range(1, 4)] * 30}, out)  # the same tensors are made once
    (tmp_path / "honest.pt").write_bytes(out.getvalue())
    assert len(load_data(tmp_path / "honest.pt")["a"]) == 90
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" + b"0X\3\0\0\0cpuK\4tQ"
    args = b"(" + storage + b"K\0K\4\x85K\1\x85\x89Ntq\1"
    first = b"\x80\2}X\1\0\0\0a(ctorch._utils\n_rebuild_tensor_v2\nq\0" + args
    path = saved(tmp_path / "few.pt", first + b"h\0h\1R" * 99 + b"ts.")
    assert len(load_data(path)["a"]) == 2 + 99
    path = saved(tmp_path / "many.pt", first + b"h\0h\1R" * 101 + b"ts.")
    with pytest.raises(CheckpointError, match="more than 100 tensors"):
        load_data(path)


def test_a_tensor_that_an_index_names_again_and_again_is_small_to_read(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save(torch.arange(3.0), out)
    (tmp_path / "a.distcp").write_bytes(out.getvalue())
    assert TensorFiles(tmp_path).read("a.distcp", 0, len(out.getvalue())).tolist() == [0, 1, 2]
    with zipfile.ZipFile(out, "a") as archive:
        for number in range(2500):  # 0.03 s for each place of it
            archive.writestr(f"archive/{number}", b"")
    (tmp_path / "a.distcp").write_bytes(out.getvalue())
    with pytest.raises(ValueError, match="its list of records has more than 131,072 bytes"):
        TensorFiles(tmp_path).read("a.distcp", 0, len(out.getvalue()))
    path = saved(tmp_path / "b.distcp", b"\x80\2" + b"K\0" + b"0K\0" * 50_000 + b".")
    with pytest.raises(ValueError, match="it has 150,005 bytes, more than 131,072"):
        TensorFiles(tmp_path).read(path.name, 0, path.stat().st_size)


class Id(ctypes.Structure):
    """As vLLM's `ncclUniqueId`."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def test_what_the_store_of_a_weight_group_holds_changes_no_class() -> None:
    sent = Id()
    sent.internal[:] = range(-64, 64)
    got = _id_or_text(pickle.dumps(sent), Id)
    assert type(got) is Id and bytes(got) == bytes(sent)
    assert _id_or_text(pickle.dumps("barrier_1"), Id) == "barrier_1"
    before = dict(vars(Id))
    named = f"c{Id.__module__}\nId\n".encode()
    unpickle = b"c_ctypes\n_unpickle\n"
    for content in (
        named + b"N}X\4\0\0\0evilK\1s\x86b.",  # Id.evil = 1
        named + b".",
        unpickle + b".",
        unpickle + unpickle + b"(})t\x86R.",
        unpickle + named + b"}C\1x\x86\x86R.",  # an id of one byte
        unpickle + named + b"}X\4\0\0\0evilK\1sC\x80" + bytes(128) + b"\x86\x86R.",
        b"cos\nsystem\n(X\4\0\0\0truetR.",
        unpickle + b"cos\nsystem\n}C\x80" + bytes(128) + b"\x86\x86R.",  # an id of another class
        b"K\1.",
        b"",
    ):
        with pytest.raises(RuntimeError, match="the group's store holds something else"):
            _id_or_text(b"\x80\4" + content, Id)
    assert dict(vars(Id)) == before
