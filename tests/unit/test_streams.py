"""Streams of weights over NCCL's way, with gloo on a CPU: groups, buckets, and what ends them."""

import contextlib
import threading
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from instep.errors import SyncError
from instep.system.ports import users_listening
from instep.weights import nccl
from instep.weights.way import way_named
from instep_engine import stream
from instep_engine.manifest import WeightMismatch
from instep_engine.stream import Group, Invitation, StreamBroken, abort, bytes_of, open_store, receive, send_bucket
from tests.bounds import allowed
from tests.carriage import TENSORS, Carriage


class Received:
    """A receiver of streams, as an engine has it."""

    def __init__(self, tmp_path):
        self.carriage, self.streams, self.group = Carriage("nccl", tmp_path), [], None
        self.carriage.deliver = self.deliver
        self.load = lambda tensors: None
        self.session = {"version": "3", "nonce": "nonce"}

    def deliver(self, info, failed):
        self.streams.append(invitation := Invitation(**info["invitation"]))
        arrived = False
        try:
            if self.group is None or self.group.name != invitation.group:
                self.group = Group(open_store(invitation.store, 30.0), invitation, torch.device("cpu"), 30.0)
            receive(self.group, self.session, self.load, time.monotonic() + 30)
            arrived = True
        finally:
            if not arrived:
                failed()


def test_a_group_serves_many_sessions(tmp_path):
    receiver = Received(tmp_path)
    sent = [way_named("nccl").drive(receiver.carriage) for _ in range(3)]
    assert sent[0] == sent[2] and len({i.group for i in receiver.streams}) == 1


def test_a_refused_bucket_ends_nothing_but_its_session(tmp_path):
    receiver, names = Received(tmp_path), []

    def refuse(tensors):
        names.extend(tensors)
        raise ValueError("not this one")

    receiver.load = refuse
    with pytest.raises(ValueError, match="not this one"):
        way_named("nccl").drive(receiver.carriage)
    assert names == list(TENSORS)[:1]  # a bucket is one row here; nothing is loaded after it
    receiver.session = {"version": "3", "nonce": "another"}
    with pytest.raises(WeightMismatch, match="a bucket of .*'nonce': 'nonce'"):
        way_named("nccl").drive(receiver.carriage)
    receiver.load, receiver.session = (lambda tensors: None), {"version": "3", "nonce": "nonce"}
    assert len(way_named("nccl").drive(receiver.carriage).tensors) == len(TENSORS)


@pytest.mark.parametrize("side", [nccl, stream])
def test_sender_and_receiver_hold_two_buckets_at_most(tmp_path, monkeypatch, side):
    receiver, buckets, most = Received(tmp_path), [], []

    def counted(bucket, device):
        def held():
            return sum(array() is not None for array in buckets)

        until = time.monotonic() + 5  # gloo's thread lets go of a bucket a moment after it has said so
        while held() > 1 and time.monotonic() < until:
            time.sleep(0.01)
        array = np.empty(bytes_of(bucket) + 8 * len(bucket), np.uint8)
        buckets.append(weakref.ref(array))
        most.append(held())
        memory = torch.from_numpy(array)
        return memory, memory[: bytes_of(bucket)], memory[bytes_of(bucket) :].view(torch.int64)

    monkeypatch.setattr(side, "new_bucket", counted)
    way_named("nccl").drive(receiver.carriage)
    assert most == [1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    "peer, words",
    [("dies", "NCCL did not connect"), ("fails", "not all have joined: no route"), ("aborts", "was ended")],
)
def test_a_set_up_of_nccl_that_does_not_end_is_bounded(tmp_path, monkeypatch, peer, words):
    """The members have come; NCCL itself waits without a bound."""
    ended, invitation = threading.Event(), Invitation(f"file:{tmp_path / 'store'}", "group", 2)
    store = open_store(invitation.store, 30.0)
    dist.PrefixStore("group", store).set("all", "1")

    class Backend:
        def eager_connect_single_device(self, device):
            if peer == "fails":
                raise RuntimeError("no route")
            if peer == "aborts":
                abort(invitation, 30.0)
            ended.wait()

    monkeypatch.setattr(stream, "_nccl", lambda *args: Backend())
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(stream, "CONNECT_SECONDS", 0.5 if peer == "dies" else 30.0)
    began = time.monotonic()
    with pytest.raises(StreamBroken, match=words):
        Group(store, invitation, torch.device("cuda", 0), 30.0, rank=0)
    ended.set()
    assert time.monotonic() - began < allowed(10)


def test_bytes_that_change_on_their_way_are_refused(tmp_path, monkeypatch):
    receiver = Received(tmp_path)

    def torn(group, memory):
        memory[5] ^= 1
        return send_bucket(group, memory)

    monkeypatch.setattr(nccl, "send_bucket", torn)
    with pytest.raises(WeightMismatch, match="do not have the checksum") as refusal:
        way_named("nccl").drive(receiver.carriage)
    assert refusal.value.tensor == "layer.0.weight"


def test_a_receiver_that_does_not_come_ends_the_stream(tmp_path):
    """The sender raises the receiver's error at once, not after its deadline of 30 s."""
    receiver = Received(tmp_path)
    way_named("nccl").drive(receiver.carriage)  # the group is open

    def fail(info, failed):
        failed()
        raise SyncError("the engine is gone")

    receiver.carriage.deliver = fail
    started = time.monotonic()
    with pytest.raises(SyncError, match="the engine is gone"):
        way_named("nccl").drive(receiver.carriage)
    assert time.monotonic() - started < allowed(10)
    receiver.carriage.deliver = receiver.deliver
    assert len(way_named("nccl").drive(receiver.carriage).tensors) == len(TENSORS)
    assert receiver.streams[0].group != receiver.streams[-1].group


def test_the_members_of_a_stream_meet_at_one_address_of_the_host():
    """A TCPStore by itself would listen on all of them."""
    store, place = nccl._store_at("127.0.0.2", timedelta(seconds=20))
    port = int(place.rpartition(":")[2])
    assert users_listening(port, "127.0.0.2") and not users_listening(port, "127.0.0.1")
    open_store(place, 20.0).set("name", "value")
    assert store.get("name") == b"value"
