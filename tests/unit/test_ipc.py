"""The protocol of the way `ipc` over CPU memory: several sessions, ranks and receivers, and all that can go wrong."""

import json
import multiprocessing
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from instep.controller import deployment
from instep.errors import SyncError
from instep.system.scratch import Scratch, memory_root
from instep.weights import ipc
from instep.weights.ipc import Ipc
from instep.weights.source import WeightSource
from instep.weights.spec import TensorSpec
from instep.weights.way import Order, expandable
from instep_engine import handles
from instep_engine.handles import Receiver, connect, listen
from instep_engine.manifest import WeightMismatch, dtype_name
from instep_engine.place import SYNC
from instep_engine.stream import Invitation, StreamBroken
from tests.bounds import allowed
from tests.distributed.helpers import RankPool

SHAPES = {"embed": (40, 64), "up": (128, 64), "norm": (64,), "scale": (), "none": (0, 4), "down": (64, 128)}


def weights(version):
    generator = torch.Generator().manual_seed(version)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return tensors | {"half": torch.randn(33, 3, generator=generator).bfloat16()}


class Source(WeightSource):
    def __init__(self, version, emits=True):
        self.tensors, self.emits = weights(version), emits
        self.specs = [TensorSpec(name, tuple(t.shape), t.dtype) for name, t in self.tensors.items()]

    def __iter__(self):
        return iter([(s, t if self.emits else None) for s, t in zip(self.specs, self.tensors.values(), strict=True)])


class Engine:
    """A receiver that keeps what it has got; it joins, as an engine does, when it is told of an invitation."""

    def __init__(self):
        self.receiver, self.held, self.names = None, {}, []

    def update(self, info, session):
        if self.receiver is None or self.receiver.name != info["invitation"]["group"]:
            invitation, deadline = Invitation(**info["invitation"]), time.monotonic() + 20
            self.receiver = Receiver(invitation, torch.device("cpu"), deadline)
            self.names.append(invitation.group)
        self.receiver.receive(session, self.load, time.monotonic() + 20)

    def load(self, tensors):
        self.held.update({name: tensor.clone() for name, tensor in tensors.items()})


class Carriage:
    """Sessions with a trainer and engines in this process."""

    disk_folder = None

    def __init__(self, way, folder, engines, bucket_bytes=40_000):
        self.memory_folder, self.way, self.engines, self.size = folder / f"{SYNC}1", way, engines, bucket_bytes
        self.memory_folder.mkdir(mode=0o700, exist_ok=True)
        self.version = 0

    def receivers(self):
        return str(len(self.engines)), len(self.engines)

    def publish(self, folder, on_event, audience="", num_receivers=0):
        order = Order(str(self.version), "nonce", folder, self.size, folder, 20.0, audience, num_receivers)
        self.way.send(Source(self.version), order, on_event)

    def deliver(self, info, failed=None):
        session, errors = {"version": str(self.version), "nonce": "nonce"}, []

        def update(engine):
            try:
                engine.update(info, session)
            except Exception as error:  # noqa: BLE001 - handed to the test
                errors.append(error)
                failed()

        threads = [threading.Thread(target=update, args=(engine,)) for engine in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(25)
        if errors:
            raise errors[0]

    def seconds_left(self):
        return 20.0

    def sync(self):
        self.version += 1
        return self.way.drive(self)


def holds(engine, version):
    return all(torch.equal(engine.held[name], tensor) for name, tensor in weights(version).items())


def test_sessions_share_lines_and_buckets_until_the_audience_changes(tmp_path):
    engines = [Engine(), Engine()]
    carriage = Carriage(Ipc(), tmp_path, engines)
    for version in (1, 2, 3):
        sent = carriage.sync()
        assert all(holds(engine, version) for engine in engines)
        assert sent.digests == {name: Ipc.digest(tensor) for name, tensor in weights(version).items()}
    assert len(engines[0].names) == 1 and not list(tmp_path.rglob("*.bin")) + list(tmp_path.rglob("*.sock"))
    carriage.engines = engines[:1]
    carriage.sync()
    assert holds(engines[0], 4) and len(engines[0].names) == 2 and holds(engines[1], 3)


@pytest.mark.parametrize("fault", ["torn", "swapped", "stale", "transposed", "twice", "version", "shape"])
def test_a_planted_fault_is_refused_by_name_and_the_next_session_succeeds(tmp_path, monkeypatch, fault):
    engine = Engine()
    carriage = Carriage(Ipc(), tmp_path, [engine])
    carriage.sync()
    tell, names = ipc._Stream._tell, {"version": "embed", "shape": "up", "twice": "up"}

    def spoilt(self, message):
        for t in message.get("tensors", ()):
            data = self._data[message["slot"]][t["offset"] : t["offset"] + t["nbytes"]]
            if t["name"] == "up":
                weight = data.view(torch.float32).view(128, 64)
                if fault == "torn":
                    data[100:] = weights(1)["up"].view(-1).view(torch.uint8)[100:]
                elif fault == "stale":
                    weight.copy_(weights(1)["up"])
                elif fault == "swapped":
                    weight[[0, 1]] = weight[[1, 0]]
                elif fault == "transposed":
                    weight.copy_(weight.T.reshape(128, 64))
                elif fault == "shape":
                    t["shape"] = [64, 127]
            if t["name"] == "norm" and fault == "twice":
                t["name"] = "up"
        tell(self, {**message, "version": "0"} if fault == "version" and "tensors" in message else message)

    monkeypatch.setattr(ipc._Stream, "_tell", spoilt)
    began = time.monotonic()
    with pytest.raises(WeightMismatch) as refusal:
        carriage.sync()
    assert refusal.value.tensor == names.get(fault, "up") and time.monotonic() - began < allowed(10)
    assert torch.equal(engine.held["up"], weights(1)["up"])  # nothing of it was loaded
    monkeypatch.undo()
    carriage.sync()
    assert holds(engine, 3) and len(engine.names) == 2


def test_an_engine_that_does_not_come_ends_the_session_for_all(tmp_path):
    engines = [Engine(), Engine()]
    carriage = Carriage(Ipc(), tmp_path, engines)
    carriage.sync()
    come = engines[1].update
    engines[1].update = lambda info, session: (_ for _ in ()).throw(SyncError("the engine is gone"))
    began = time.monotonic()
    with pytest.raises((SyncError, StreamBroken), match="the engine is gone|a peer is gone"):
        carriage.sync()
    assert time.monotonic() - began < allowed(10)
    engines[1].update = come
    carriage.sync()
    assert all(holds(engine, 3) for engine in engines)


def joining(path, *keys):
    """Lines of workers that have joined who listens at `path`, by the keys of their devices."""
    lines = [connect(path) for _ in keys]
    for line, key in zip(lines, keys, strict=True):
        line.send({"device": key}, time.monotonic() + 5)
    return lines


def test_who_has_joined_hears_at_once_that_others_do_not_come(tmp_path):
    path = tmp_path / f"{SYNC}1" / "a.sock"
    path.parent.mkdir(mode=0o700)

    def look():
        raise StreamBroken("it was ended because another peer has failed")

    with listen(path) as listener:
        (line,) = joining(path, "cpu")
        with pytest.raises(StreamBroken, match="another peer has failed") as kept:  # and with it, all that it refers to
            ipc._joined(listener, 2, look, time.monotonic() + 20)
        with pytest.raises(StreamBroken, match="closed its line"):
            line.receive(time.monotonic() + 5)
        del kept
        other, ours = joining(path, "GPU-7", "cpu")
        opened = ipc._Open("all", Invitation(f"unix:{path}", "a", 3), 0)
        reason = ipc._direct(listener, ["cpu"], [path], opened, lambda: None, time.monotonic() + 20)
        assert "no rank of the trainer is on a worker's GPU (GPU-7)" in reason
        assert other.receive(time.monotonic() + 5) == {"refused": reason}
        with pytest.raises(StreamBroken, match="closed its line"):
            ours.receive(time.monotonic() + 5)


def test_a_worker_on_another_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(handles, "device_key", lambda device: "GPU-7")
    with pytest.raises((SyncError, StreamBroken), match=r"no rank of the trainer is on a worker's GPU \(GPU-7\)"):
        Carriage(Ipc(), tmp_path, [Engine()]).sync()


def test_memory_that_cannot_be_exported_is_refused_with_a_remedy(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True")
    with pytest.raises(SyncError, match="remove expandable_segments from PYTORCH_CUDA_ALLOC_CONF"):
        ipc._refuse_expandable(torch.device("cuda"))
    ipc._refuse_expandable(torch.device("cpu"))
    assert expandable() == "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert expandable() is None


def test_without_room_for_its_buckets_a_session_says_so_and_the_next_one_succeeds(monkeypatch):
    engine, free = Engine(), os.statvfs(memory_root())
    with Scratch(f"{SYNC}test-", memory_root()) as folder:
        carriage = Carriage(Ipc(), folder, [engine])
        with monkeypatch.context() as patch:
            patch.setattr(ipc, "bytes_of", lambda bucket: 2 * free.f_blocks * free.f_frsize)
            with pytest.raises(SyncError, match="two buckets of .* MB do not fit into shared memory: ") as caught:
                carriage.sync()
        assert all(word in caught.value.remedy for word in ("--shm-size", "--update-weight-buffer-size"))
        assert not list(folder.rglob("*.bin"))
        carriage.sync()
        assert holds(engine, 2)


@pytest.mark.parametrize(
    "named, allocator, way",
    [
        ("lora", "", "lora_ipc"),
        ("lora", "expandable_segments:True", "lora"),
        ("auto", "", "ipc"),
        ("auto", "expandable_segments:True", "shm"),
    ],
)
def test_a_run_says_how_its_weights_travel(monkeypatch, named, allocator, way):
    """No process can open memory in an expandable segment of another: no way is taken that would fail by it."""
    lines, args = [], SimpleNamespace(weight_sync=named)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    monkeypatch.setattr(deployment, "gpu_sharing", lambda args: "shared")
    log = SimpleNamespace(progress=SimpleNamespace(line=lines.append))
    run, cluster = SimpleNamespace(_args=args, _log=log), SimpleNamespace(one_host=True)
    assert deployment.Deployment._chosen_way(run, cluster) == way
    assert f"{'adapters' if named == 'lora' else 'weights'} travel by {way} (--weight-sync {named}: " in lines[0]
    assert ("expandable_segments in PYTORCH_CUDA_ALLOC_CONF" in lines[0]) == bool(allocator)


def trainer_that_dies(folder, where):
    """Sends one version, and ends in the middle of the next."""
    carriage = Carriage(Ipc(), Path(folder), [])
    tell = ipc._Stream._tell

    def die(self, message):
        tell(self, message)
        if self.order.version == "2" and "tensors" in message:
            os._exit(1)

    ipc._Stream._tell = die

    def on_event(event):
        if isinstance(event, Invitation):
            Path(where).write_text(json.dumps(asdict(event)))

    for carriage.version in (1, 2):
        carriage.publish(carriage.memory_folder, on_event, "all", 1)


def awaited(path):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return {"invitation": json.loads(text)}
        time.sleep(0.01)
    raise AssertionError(f"no {path}")


def test_a_trainer_that_dies_ends_the_wait_of_its_engines(tmp_path):
    engine, where = Engine(), tmp_path / "invitation"
    trainer = multiprocessing.get_context("spawn").Process(target=trainer_that_dies, args=(str(tmp_path), str(where)))
    trainer.start()
    try:
        info = awaited(where)
        engine.update(info, {"version": "1", "nonce": "nonce"})
        assert holds(engine, 1)
        began = time.monotonic()
        with pytest.raises(StreamBroken, match="a peer is gone"):
            engine.update(info, {"version": "2", "nonce": "nonce"})
        assert time.monotonic() - began < allowed(5)
    finally:
        trainer.kill()
        trainer.join(5)


def two_ranks_send(folder, num_receivers):
    """A rank on each of two GPUs, if one believes the names; returns the names of what it has emitted."""
    rank, told = dist.get_rank(), []
    ipc.device_key = lambda device: f"GPU-{rank}"
    way = Ipc()

    def on_event(event):
        if isinstance(event, Invitation):
            (Path(folder) / "invitation").write_text(json.dumps(asdict(event)))
        told.append(type(event).__name__)

    for version in (1, 2):
        memory = Path(folder) / f"{SYNC}1"
        order = Order(str(version), "nonce", memory, 40_000, memory, 20.0, "all", num_receivers)
        way.send(Source(version, emits=rank == 0), order, on_event)
    return told, len(way._kept.lines)


@pytest.mark.parametrize("gpus", [[0, 1, 1], [1], [0]])
def test_each_rank_serves_the_workers_on_its_own_gpu(tmp_path, monkeypatch, gpus):
    engines, here = [Engine() for _ in gpus], threading.local()
    (tmp_path / f"{SYNC}1").mkdir(mode=0o700)
    monkeypatch.setattr(handles, "device_key", lambda device: f"GPU-{here.gpu}")
    errors = []

    def take_part(engine, gpu):
        here.gpu = gpu
        try:
            for version in ("1", "2"):
                engine.update(awaited(tmp_path / "invitation"), {"version": version, "nonce": "nonce"})
        except Exception as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    threads = [threading.Thread(target=take_part, args=pair) for pair in zip(engines, gpus, strict=True)]
    for thread in threads:
        thread.start()
    pool = RankPool(2, timeout=60)
    try:
        first, second = pool.run(two_ranks_send, str(tmp_path), len(gpus))
    finally:
        pool.close()
        for thread in threads:
            thread.join(20)
    assert not errors and all(holds(engine, 2) for engine in engines)
    assert (first[1], second[1]) == (gpus.count(0), gpus.count(1))
    assert "Broken" not in first[0] and "Invitation" in first[0] and not second[0]
    assert {dtype_name(t.dtype) for t in engines[0].held.values()} == {"float32", "bfloat16"}
