"""What a sender of weights needs in place of a run: a source of a few tensors, and an engine's end."""

import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec
from instep.weights.way import Order, way_named
from instep_engine.bucket import read_bucket
from instep_engine.handles import Receiver
from instep_engine.manifest import BucketManifest
from instep_engine.place import SYNC
from instep_engine.stream import Group, Invitation, open_store, receive
from tests.assets import make_checkpoint

TENSORS = {f"layer.{i}.weight": torch.arange(6.0).view(2, 3) + i for i in range(5)}


class Source(WeightSource):
    emits, config = True, {"r": 2, "lora_alpha": 4}
    specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in TENSORS.items()]

    def __iter__(self):
        return zip(self.specs, TENSORS.values(), strict=True)


class Carriage:
    """A weight sync from this process to an engine that reads the tensors it is asked to load."""

    version, disk_folder, started_on = "3", None, None

    def __init__(self, way, folder):
        self.memory_folder, self._way, self._checkpoint = folder / f"{SYNC}1", way, make_checkpoint(folder / "hf")
        self.memory_folder.mkdir(mode=0o700)
        self.loaded = {}

    def audience(self):
        return str(self.memory_folder)

    def receivers(self):
        return self.audience(), 1

    def publish(self, folder, on_event, audience="", num_receivers=0):
        # Two tensors of 24 bytes do not fill a bucket.
        order = Order("3", "nonce", folder, 50, self._checkpoint, 30.0, audience, num_receivers)
        way_named(self._way).send(Source(), order, on_event)

    def pause(self):
        pass

    def deliver(self, info, failed=None):
        assert info["backend"] == self._way
        if self._way == "nccl":
            receive_stream(info, lambda tensors: self.loaded.update(tensors))
            return
        if self._way == "lora_ipc":
            assert info["invitation"]["config"] == {"r": 2, "lora_alpha": 4, "num_tensors": len(TENSORS)}
        if self._way in ("ipc", "lora_ipc"):
            receive_buckets(info, lambda tensors: self.loaded.update({n: t.clone() for n, t in tensors.items()}))
            return
        manifest = BucketManifest.from_json(info["manifest"])
        whole = {"r": 2, "lora_alpha": 4, "num_tensors": len(TENSORS)}
        assert info["manifest"]["config"] == (whole if self._way == "lora" else {})
        assert (manifest.version, manifest.nonce) == ("3", "nonce")
        if "path" in info:
            assert manifest.path == info["path"] == (self.started_on or manifest.path)
            assert Path(manifest.path).name == "v3"
            name = "adapter_model" if "lora" in self._way else "model"
            self.loaded |= load_file(Path(info["path"]) / f"{name}.safetensors")
        else:
            self.loaded |= {name: t.clone() for name, t in read_bucket(manifest).items()}

    def start_anew(self, checkpoint):
        self.started_on = str(checkpoint)
        return ["http://engine"]

    def seconds_left(self):
        return 30.0


def receive_stream(info, load, session=None):
    invitation = Invitation(**info["invitation"])
    group = Group(open_store(invitation.store, 30.0), invitation, torch.device("cpu"), 30.0)
    try:
        receive(group, session or {"version": "3", "nonce": "nonce"}, load, time.monotonic() + 30)
    finally:
        group.close()


def receive_buckets(info, load, session=None):
    receiver = Receiver(Invitation(**info["invitation"]), torch.device("cpu"), time.monotonic() + 30)
    try:
        receiver.receive(session or {"version": "3", "nonce": "nonce"}, load, time.monotonic() + 30)
    finally:
        receiver.close()
