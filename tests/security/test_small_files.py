"""What the store of a weight group holds is read as data."""

from __future__ import annotations

import ctypes
import pickle

import pytest

from instep_neighbours.trl.receiver import _id_or_text


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
