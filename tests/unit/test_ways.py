"""Each way of the weights, without engines: what its sender announces and what its driver delivers."""

import errno
import os
import threading
import time
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from instep.engines.embedded.protocol import HttpError
from instep.engines.embedded.shared import SharedWeights
from instep.engines.embedded.weights import LiveWeights
from instep.engines.kind import kind_of
from instep.errors import EngineError, SyncError
from instep.weights.lora_ipc import LoraIpc
from instep.weights.single_copy import SingleCopy, Written
from instep.weights.spec import TensorSpec
from instep.weights.way import (
    GOLDEN,
    OF_ADAPTERS,
    ON_ONE_HOST,
    RESTART,
    SINGLE_COPY,
    WAYS,
    Order,
    auto_way,
    golden,
    way_named,
    way_of_adapters,
)
from instep_engine.checksums import ROW_BYTES, checksum, checksums, raw_bytes, rows_of
from instep_engine.manifest import WeightMismatch
from instep_engine.place import SYNC
from instep_engine.stream import Invitation, views_of
from tests.bounds import allowed
from tests.carriage import TENSORS, Carriage, Source, receive_buckets

NAMES = sorted({*WAYS, *OF_ADAPTERS, *map(golden, WAYS)} - {SINGLE_COPY})  # which samples


@pytest.mark.parametrize("name", NAMES)
def test_what_is_delivered_is_what_was_announced(tmp_path, name):
    carriage = Carriage(name, tmp_path)
    sent = way_named(name).drive(carriage)
    assert sent.digests == {tensor: way_named(name).digest(t) for tensor, t in TENSORS.items()}
    assert sum(record.nbytes for record in sent.tensors) == 5 * 24
    parts = {"nccl": {"gather", "meet", "send", "load"}, "ipc": {"gather", "send", "load"}}
    assert set(sent.seconds) == parts.get(name.removeprefix("lora_"), set())
    assert carriage.loaded.keys() == TENSORS.keys()
    assert all(torch.equal(carriage.loaded[name], t) for name, t in TENSORS.items())
    assert not list(tmp_path.rglob("*.bin"))  # nothing is left of it
    assert (carriage.started_on is not None) == (name == RESTART)


@pytest.mark.parametrize("shares", [True, False])
def test_single_copy_writes_into_no_memory_but_the_engines_own(tmp_path, shares):
    """An engine says so before the first write, and the next session asks nothing where both are the same."""
    carriage = Carriage(SINGLE_COPY, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    other = SharedWeights(model, tmp_path / "hf", carriage.memory_folder)
    engine = other if shares else LiveWeights(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), tmp_path / "hf")
    engine.start("3", "nonce")
    calls, way = [], SingleCopy()

    def show(info):
        calls.append("show")
        try:
            engine.update(info)
        except HttpError as error:
            raise EngineError(f"engine 0 refused it: {error}", where="its address") from error

    carriage.show, carriage.pause = show, lambda: calls.append("pause")
    carriage.publish = lambda folder, emit: calls.append("publish") or emit(Written({}, (Source.specs[0],), {"": ""}))
    for _ in range(2):
        with pytest.raises(SyncError, match="no rank of the trainer" if shares else "nothing was written") as caught:
            way.drive(carriage)
        assert shares or all(w in str(caught.value) for w in ("--vllm-config-path", "--rollout-external-engine-addrs"))
    assert calls == (["show", *["pause", "publish"] * 2] if shares else ["show"] * 2)
    assert not engine.failure


def test_an_engine_without_room_for_its_weights_says_what_helps(tmp_path, monkeypatch):
    """Where another process has taken it since the run compared."""
    carriage = Carriage(SINGLE_COPY, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match="GB of weights do not fit into .*: No space left") as caught:
        SharedWeights(model, tmp_path / "hf", carriage.memory_folder)
    assert "--shm-size" in caught.value.remedy and not list(carriage.memory_folder.iterdir())
    for name in ("embedded", "vllm"):
        assert kind_of(name).start_remedy(f"cannot serve: {caught.value}") == caught.value.remedy
        assert "shm" not in kind_of(name).start_remedy("another fault")


@pytest.mark.parametrize("spoilt", [None, "model.layers.1.mlp.up_proj.weight"])
def test_single_copy_delivers_digests_of_what_the_engine_holds(tmp_path, spoilt):
    carriage = Carriage(SINGLE_COPY, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    engine = SharedWeights(model, tmp_path / "hf", carriage.memory_folder)
    engine.start("3", "nonce")
    new = {name: torch.randn_like(tensor) for name, tensor in engine.shared.items()}
    told = []

    class Trainer(Source):
        specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in new.items()]

        def __iter__(self):
            return zip(self.specs, new.values(), strict=True)

    def deliver(info):
        told.append(info)
        if spoilt:
            engine.shared[spoilt].data[0, 0] += 1
        engine.update(info)

    way, carriage.deliver, carriage.show = SingleCopy(), deliver, engine.update
    order = Order("3", "nonce", carriage.memory_folder, 50, tmp_path / "hf")
    carriage.publish = lambda folder, emit: way.send(Trainer(), order, emit)
    if spoilt:
        with pytest.raises(HttpError, match=f"{spoilt} is not what the trainer has written"):
            way.drive(carriage)
        assert spoilt in engine.failure
        return
    sent = way.drive(carriage)
    assert engine.finish("3") == "3" and not engine.failure
    held = model.state_dict()
    assert all(torch.equal(held[name], t) for name, t in new.items()) and len(new) > 20
    assert sum(record.nbytes for record in sent.tensors) == 0 and sent.digests.keys() == new.keys()
    assert set(sent.seconds) == {"write", "sample"} and min(sent.seconds.values()) > 0
    assert len(str(told[0])) < 100 * len(new)  # digests and nothing else


def test_the_golden_way_reaches_every_host():
    assert GOLDEN in WAYS and GOLDEN not in ON_ONE_HOST and ON_ONE_HOST <= set(WAYS)
    assert {golden(way) for way in WAYS} == {GOLDEN, RESTART, "lora_disk"} and not {*map(golden, WAYS)} & ON_ONE_HOST


def test_an_engine_that_takes_no_bucket_ends_the_sync_at_its_deadline(tmp_path, monkeypatch):
    carriage, freed, asked = Carriage("shm", tmp_path), threading.Event(), []

    def seconds_left():
        asked.append(1)
        if len(asked) > 1:
            raise SyncError("the weight sync did not end within its time")
        return 0.1

    monkeypatch.setattr(carriage, "deliver", lambda info: freed.wait(30))
    monkeypatch.setattr(carriage, "seconds_left", seconds_left)
    try:
        with pytest.raises(SyncError, match="did not end within its time"):
            way_named("shm").drive(carriage)
    finally:
        freed.set()


@pytest.mark.parametrize("name", ["nccl", "ipc"])
def test_a_sender_does_not_wait_for_engines_that_are_not_asked(tmp_path, monkeypatch, name):
    """Such as those of which one does not pause."""
    carriage, began = Carriage(name, tmp_path), time.monotonic()

    def refuse(info, failed=None):
        raise SyncError("engine 0 does not pause")

    monkeypatch.setattr(carriage, "deliver", refuse)
    monkeypatch.setattr(carriage, "seconds_left", lambda: 30.0)
    with pytest.raises(SyncError, match="does not pause"):
        way_named(name).drive(carriage)
    assert time.monotonic() - began < allowed(15)


def test_after_a_refusal_nothing_more_is_delivered(tmp_path, monkeypatch):
    """It would be refused, too, or meet the session that comes next."""
    carriage, delivered = Carriage("shm", tmp_path), []

    def refuse(info):
        delivered.append(info)
        raise SyncError("embed came twice")

    monkeypatch.setattr(carriage, "deliver", refuse)
    monkeypatch.setattr(carriage, "seconds_left", lambda: 20.0)
    with pytest.raises(SyncError, match="came twice"):
        way_named("shm").drive(carriage)
    assert len(delivered) == 1 and not list(carriage.memory_folder.iterdir())


def test_a_bucket_whose_offsets_lie_is_refused_by_name():
    """The checksums are those of its bytes in their order, which would be loaded under each other's names."""
    data = torch.arange(4 * ROW_BYTES // 4, dtype=torch.float32).view(torch.uint8)
    sums = checksums(data, [2, 2])
    for offsets, name in (([0, 2], None), ([2, 0], "a"), ([0, 1], "b"), ([0, 3], "b")):
        about = {"shape": (ROW_BYTES // 2,), "dtype": "float32", "nbytes": 2 * ROW_BYTES}
        tensors = [
            {"name": n, "offset": o * ROW_BYTES, "digest": s, **about}
            for n, o, s in zip("ab", offsets, sums, strict=True)
        ]
        header = {"version": "1", "nonce": "n", "tensors": tensors}
        if name is None:
            assert set(views_of(header, {"version": "1"}, data).tensors) == {"a", "b"}
            with pytest.raises(WeightMismatch, match="but its tensors take"):
                views_of(header, {"version": "1"}, data[: 3 * ROW_BYTES])
            continue
        with pytest.raises(WeightMismatch, match=f"{name} is at") as refused:
            views_of(header, {"version": "1"}, data)
        assert refused.value.tensor == name


def test_views_of_a_bucket_are_made_again_only_where_it_is_another_and_its_bytes_are_always_compared():
    def header(data, names):
        tensors = [
            {"name": n, "shape": [ROW_BYTES // 4], "dtype": "float32", "offset": i * ROW_BYTES, "nbytes": ROW_BYTES}
            for i, n in enumerate(names)
        ]
        sums = checksums(data, [1] * len(names))
        told = [{**t, "digest": s} for t, s in zip(tensors, sums, strict=True)]
        return {"version": "1", "tensors": told}

    session, data = {"version": "1"}, torch.arange(ROW_BYTES // 2, dtype=torch.float32).view(torch.uint8)
    before = views_of(header(data, "ab"), session, data)
    data.view(torch.float32)[:] += 1
    again = views_of(header(data, "ab"), session, data, before)
    assert again.tensors is before.tensors and again.tensors["b"][0] == ROW_BYTES // 4 + 1
    for names, memory in (("ba", data), ("ab", data.clone())):
        other = views_of(header(memory, names), session, memory, before)
        assert list(other.tensors) == list(names)
        assert other.tensors[names[0]].data_ptr() == memory.data_ptr() and other.tensors is not before.tensors
    told = header(data, "ab")
    data[ROW_BYTES + 5] ^= 1
    with pytest.raises(WeightMismatch, match="b: the bytes received do not have the checksum"):
        views_of(told, session, data, before)
    with pytest.raises(WeightMismatch, match="in a session of"):
        views_of(told, {"version": "2"}, data, before)


@pytest.mark.parametrize("name", NAMES)
def test_a_digest_tells_every_byte(name):
    digest = way_named(name).digest
    weight = torch.zeros(5000)
    digests = {digest(weight)}
    for place in (0, 17, 4999):
        changed = weight.clone()
        changed[place] = 1e-30
        digests.add(digest(changed))
    assert len(digests) == 4


def test_auto_stays_in_memory_on_one_host_alone():
    assert auto_way(one_host=True)[0] == "shm" and auto_way(one_host=False)[0] == GOLDEN
    assert auto_way(True, "shared")[0] == "ipc" and auto_way(False, "shared")[0] == GOLDEN
    assert auto_way(True, "apart")[0] == auto_way(False, "apart")[0] == "nccl"
    assert set(WAYS) == {"nccl", "ipc", "shm", "single-copy", "disk", "restart", "lora"}


def test_adapters_stay_on_the_gpus_where_auto_does():
    for one_host, sharing in ((True, "shared"), (False, "shared"), (True, "apart"), (True, None), (False, None)):
        elsewhere = "lora" if one_host else "lora_disk"
        expected = "lora_ipc" if auto_way(one_host, sharing)[0] == "ipc" else elsewhere
        assert way_of_adapters(one_host, sharing)[0] == expected
    assert golden("lora_ipc") == golden("lora") == "lora_disk"


def test_the_buckets_are_as_large_as_the_adapter(tmp_path):
    """However large those of all weights would be."""
    way, told = LoraIpc(), []
    (folder := tmp_path / f"{SYNC}1").mkdir(mode=0o700)
    order = Order("3", "nonce", folder, 1 << 40, folder, 30.0, "engine", 1)

    def emit(event):
        if isinstance(event, Invitation):
            info = {"invitation": asdict(event)}
            threading.Thread(target=receive_buckets, args=(info, told.append), daemon=True).start()

    way.send(Source(), order, emit)
    assert way._kept.num_bytes == len(TENSORS) * ROW_BYTES and set(told[0]) == set(TENSORS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_tells_order_and_signs(dtype):
    weight = torch.randn(96, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    others = [weight, weight.T.contiguous(), weight.flip(0), weight.flip(1), -weight, weight.roll(1)]
    for i, j in ((0, 1), (0, 1024), (0, 4096), (5, 9000)):  # of one word, row and tensor
        signs, swapped = weight.clone().view(-1), weight.clone().view(-1)
        signs[[i, j]] *= -1
        swapped[[i, j]] = swapped[[j, i]]
        others += [signs, swapped]
    assert len({checksum(t) for t in others}) == len(others)


def test_checksums_of_a_bucket_are_those_of_its_tensors():
    """Three tensors: of a part of a row, of more rows than are multiplied at once, of one byte."""
    tensors = [torch.randn(300), torch.randn(5000, 1024), torch.tensor([7], dtype=torch.uint8)]
    rows = [rows_of(t.nbytes) for t in tensors]
    bucket = torch.zeros(sum(rows) * ROW_BYTES, dtype=torch.uint8)
    for start, tensor in zip(torch.tensor([0, *rows]).cumsum(0).tolist(), tensors, strict=False):
        bucket[start * ROW_BYTES :][: tensor.nbytes] = raw_bytes(tensor)
    assert checksums(bucket, rows) == [checksum(t) for t in tensors]


def test_a_trainer_that_does_not_fit_leaves_the_memory_to_the_next(tmp_path):
    carriage = Carriage(SINGLE_COPY, tmp_path)
    SharedWeights(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), tmp_path / "hf", carriage.memory_folder)
    order = Order("3", "nonce", carriage.memory_folder, 50, tmp_path / "hf")
    for _ in range(2):
        with pytest.raises(SyncError, match="has layer.0.weight, engine 0 has not"):
            SingleCopy().send(Source(), order, print)
