"""Each way of the weights, without engines: what its sender announces and what its driver delivers."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from instep.errors import SyncError
from instep.weights.manifest import BucketManifest, tensor_digest
from instep.weights.place import SYNC
from instep.weights.shm import read_bucket
from instep.weights.source import TensorSpec
from instep.weights.way import GOLDEN, LATER, ON_ONE_HOST, WAYS, Order, auto_way, way_named
from tests.assets import make_checkpoint

TENSORS = {f"layer.{i}.weight": torch.arange(6.0).view(2, 3) + i for i in range(5)}


class Source:
    emits = True
    specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in TENSORS.items()]

    def __iter__(self):
        return zip(self.specs, TENSORS.values(), strict=True)


class Carriage:
    """A session with a trainer in this process and an engine that reads what it is told to load."""

    disk_folder = None

    def __init__(self, way, folder):
        self.memory_folder, self._way, self._checkpoint = folder / f"{SYNC}1", way, make_checkpoint(folder / "hf")
        self.memory_folder.mkdir(mode=0o700)
        self.loaded = {}

    def publish(self, folder, on_event):
        order = Order("3", "nonce", folder, 50, self._checkpoint)  # two tensors of 24 bytes do not fill a bucket
        way_named(self._way).send(Source(), order, on_event)

    def deliver(self, info):
        assert info["backend"] == self._way
        if self._way == "shm":
            manifest = BucketManifest.from_json(info["manifest"])
            assert (manifest.version, manifest.nonce) == ("3", "nonce")
            self.loaded |= {name: t.clone() for name, t in read_bucket(manifest).items()}
        else:
            self.loaded |= load_file(Path(info["path"]) / "model.safetensors")

    def seconds_left(self):
        return 30.0


@pytest.mark.parametrize("name", WAYS)
def test_what_is_delivered_is_what_was_announced(tmp_path, name):
    carriage = Carriage(name, tmp_path)
    sent = way_named(name).drive(carriage)
    assert sent.digests == {name: tensor_digest(t) for name, t in TENSORS.items()}
    assert sum(record.nbytes for record in sent.tensors) == 5 * 24
    assert carriage.loaded.keys() == TENSORS.keys()
    assert all(torch.equal(carriage.loaded[name], t) for name, t in TENSORS.items())
    assert not list(tmp_path.rglob("*.bin"))  # nothing is left of it


def test_the_golden_way_reaches_every_host():
    assert GOLDEN in WAYS and GOLDEN not in ON_ONE_HOST and ON_ONE_HOST <= set(WAYS)


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


def test_a_digest_tells_every_byte():
    weight = torch.zeros(5000)
    digests = {tensor_digest(weight)}
    for place in (0, 17, 4999):
        changed = weight.clone()
        changed[place] = 1e-30
        digests.add(tensor_digest(changed))
    assert len(digests) == 4


def test_auto_stays_in_memory_on_one_host_alone():
    assert auto_way(one_host=True)[0] == "shm" and auto_way(one_host=False)[0] == GOLDEN
    assert {*WAYS, *LATER} == {"nccl", "ipc", "shm", "single-copy", "disk", "restart", "lora"}
