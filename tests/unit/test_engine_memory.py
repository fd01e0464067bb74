"""The memory of an engine: recorded from plain copies, opened by the trainer, and written into slice by slice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from instep.errors import SyncError
from instep.system.scratch import memory_root
from instep.weights.memory import attach, digests_of, marks, sample_digest
from instep.weights.single_copy import SingleCopy, Written
from instep.weights.spec import TensorSpec
from instep_engine import memory as plugin
from instep_engine.place import SYNC, process_mark

HEADS, KV, WIDTH, HEAD, INNER, VOCAB, PADDED = 4, 1, 8, 4, 12, 10, 16
SHAPES = {
    "embed.weight": (VOCAB, WIDTH),
    "q.weight": (HEADS * HEAD, WIDTH),
    "k.weight": (KV * HEAD, WIDTH),
    "v.weight": (KV * HEAD, WIDTH),
    "o.weight": (WIDTH, HEADS * HEAD),
    "gate.weight": (INNER, WIDTH),
    "up.weight": (INNER, WIDTH),
    "down.weight": (WIDTH, INNER),
    "norm.weight": (WIDTH,),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / f"{SYNC}1"
    path.mkdir(mode=0o700)
    return path


def weights(seed: int) -> dict[str, Tensor]:
    """Views of one tensor, as those are which were split from a fused one."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    flat = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed))
    return {n: part.view(SHAPES[n]) for n, part in zip(SHAPES, flat.split(sizes), strict=True)}


class Rank:
    """The parameters of one of `size` tensor-parallel ranks, loaded as vLLM's loaders do: `narrow` and `copy_`."""

    def __init__(self, folder: Path, rank: int, size: int, dtype: torch.dtype = torch.float32):
        self.rank, self.size = rank, size
        heads, inner = HEADS // size * HEAD, INNER // size  # with one KV head each rank has a copy of it
        shapes = {
            "embed": (PADDED // size, WIDTH),
            "qkv": (heads + 2 * KV * HEAD, WIDTH),
            "o": (WIDTH, heads),
            "gate_up": (2 * inner, WIDTH),
            "down": (WIDTH, inner),
            "norm": (WIDTH,),
        }
        numbers = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        self.memory, data = plugin.file_memory(folder, rank, sum(numbers.values()) * dtype.itemsize)
        parts = data.view(dtype).split(list(numbers.values()))
        self.parameters = {n: part.view(shapes[n]) for n, part in zip(numbers, parts, strict=True)}
        self.recorder = plugin.Recorder(self.parameters.values())
        self.dtype = dtype

    def load(self, weights: dict[str, Tensor]) -> None:
        with self.recorder:
            for name, weight in self.recorder.seen(weights.items()):
                self.copy(name.split(".")[0], weight)

    def copy(self, name: str, weight: Tensor) -> None:
        p, heads, inner = self.parameters, HEADS // self.size * HEAD, INNER // self.size
        if name == "embed":
            rows = PADDED // self.size
            here = weight[self.rank * rows : (self.rank + 1) * rows]
            p["embed"][: len(here)].copy_(here)
        elif name == "q":
            p["qkv"].narrow(0, 0, heads).copy_(weight.narrow(0, self.rank * heads, heads))
        elif name in "kv":
            p["qkv"].narrow(0, heads + KV * HEAD * (name == "v"), KV * HEAD).copy_(weight)
        elif name in ("gate", "up"):
            p["gate_up"].narrow(0, inner * (name == "up"), inner).copy_(weight.narrow(0, self.rank * inner, inner))
        elif name in ("o", "down"):
            each = weight.shape[1] // self.size
            p[name].copy_(weight.narrow(1, self.rank * each, each))
        else:
            p["norm"].copy_(weight)

    def publish(self, folder: Path, meet: Callable[[], object] = lambda: None) -> None:
        about = {
            "architecture": "Some",
            "dtype": str(self.dtype).removeprefix("torch."),
            "num_ranks": self.size,
        }
        plugin.write_manifest(folder, self.rank, about, [self.memory], self.recorder.slices, SHAPES, meet)


def engine(folder: Path, size: int, dtype: torch.dtype = torch.float32) -> list[Rank]:
    ranks = [Rank(folder, rank, size, dtype) for rank in range(size)]
    for rank in ranks:
        rank.load(weights(0))
        rank.publish(folder)
    return ranks


def specs(dtype: torch.dtype = torch.float32, **changed: tuple[int, ...]) -> list[TensorSpec]:
    shapes = {**SHAPES, **{f"{name}.weight": shape for name, shape in changed.items()}}
    return [TensorSpec(name, shape, dtype) for name, shape in shapes.items()]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_what_each_rank_would_have_loaded(folder, size, dtype) -> None:
    """Row slices of q, gate and up, column slices of o and down, vocabulary shards with padding, a KV head of all."""
    ranks = engine(folder, size, dtype)
    assert not any(rank.recorder.unknown for rank in ranks)
    memory = attach(folder, lock=False)
    memory.check(specs(dtype))
    new = weights(1)
    for name, weight in new.items():
        memory.write(name, weight)
    other = folder.parent / f"{SYNC}2"
    other.mkdir(mode=0o700)
    for rank in ranks:
        expected = Rank(other, rank.rank, size, dtype)
        expected.load(new)
        for name, parameter in rank.parameters.items():
            assert torch.equal(parameter, expected.parameters[name]), (rank.rank, name)
    held = [plugin.Sample(rank.recorder.slices).digests() for rank in ranks]
    for name, weight in new.items():  # what the workers must hold is told from what was to be written
        weight = weight.to(dtype)
        samples, places = memory.samples(name, weight), memory.places(name)
        for nonce, digests in zip(memory.nonces, held, strict=True):
            assert digests_of(samples)[nonce] == digests[name]
            assert torch.equal(samples[nonce], weight.reshape(-1)[places[nonce]].view(torch.uint8))
        both = "".join(digests[name] for digests in held)
        assert memory.digest(name, weight) == both != memory.digest(name, weights(2)[name].to(dtype))


def test_one_rank_gives_whole_weights_and_a_shard_does_not(folder) -> None:
    engine(folder, 1)
    memory = attach(folder, lock=False)
    original = weights(0)
    for name, shape in SHAPES.items():
        view = memory.whole(name)
        assert view is not None and tuple(view.shape) == shape and torch.equal(view, original[name])
    engine(folder, 2)
    assert attach(folder, lock=False).whole("norm.weight") is None


def test_a_shard_of_the_trainer_is_a_view_of_the_shard_of_an_engine(folder) -> None:
    """Rows of q, columns of o and down: what a rank of TP computes with in the trainer is the engine rank's."""
    ranks = engine(folder, 2)
    memory, inner = attach(folder, lock=False), INNER // 2
    assert memory.crowded and not memory.on_gpus
    for rank in range(2):
        half = HEADS * HEAD // 2
        boxes = {
            "q.weight": ((half, WIDTH), (rank * half, 0), ranks[rank].parameters["qkv"][:half]),
            "o.weight": ((WIDTH, half), (0, rank * half), ranks[rank].parameters["o"]),
            "up.weight": ((inner, WIDTH), (rank * inner, 0), ranks[rank].parameters["gate_up"][inner:]),
            "down.weight": ((WIDTH, inner), (0, rank * inner), ranks[rank].parameters["down"]),
            "k.weight": ((KV * HEAD, WIDTH), (0, 0), ranks[rank].parameters["qkv"][half : half + KV * HEAD]),
            "norm.weight": ((WIDTH,), (0,), ranks[rank].parameters["norm"]),
        }
        for name, (shape, offset, expected) in boxes.items():
            view = memory.box(name, shape, offset, rank)
            assert view is not None and tuple(view.shape) == shape, name
            view.add_(1.0)
            assert torch.equal(view, expected), name  # it is the same memory
            assert memory.box(name, SHAPES[name], offset, rank) is None or shape == SHAPES[name], name
        assert memory.box("q.weight", (half, WIDTH), ((1 - rank) * half, 0), rank) is None  # the other's rows
        assert memory.box("o.weight", (WIDTH - 1, half), (0, rank * half), rank) is None  # not all of it


def test_engines_in_one_folder_are_written_at_once_and_one_that_has_ended_is_left_out(folder) -> None:
    """As a run has several engines; each has a folder in that of the run."""
    places = [folder / f"{SYNC}{number}" for number in range(3)]
    for place in places:
        place.mkdir(mode=0o700)
    ranks = [engine(place, 1)[0] for place in places]
    before = marks(folder)
    path = places[1] / "memory-0.json"
    path.write_text(path.read_text().replace(process_mark(os.getpid()), "boot 1 2"))
    assert marks(folder) != before
    memory, new = attach(folder, lock=True), weights(1)["norm.weight"]
    assert len(memory.slices) == 2 and memory.whole("norm.weight") is None and memory.crowded
    memory.write("norm.weight", new, without=0)
    found = [torch.equal(rank.parameters["norm"], new) for rank in ranks]
    assert found == [False, False, True]
    with pytest.raises(SyncError, match="another trainer is attached"):
        attach(folder, lock=True)
    for place in (places[0], places[2]):
        path = place / "memory-0.json"
        path.write_text(path.read_text().replace(process_mark(os.getpid()), "boot 1 2"))
    memory.close()
    with pytest.raises(SyncError, match="the engine that shared it has ended"):
        attach(folder, lock=True)


def test_an_engine_that_starts_anew_is_left_out_until_all_of_its_ranks_have_written(folder) -> None:
    """The files of its former life are there meanwhile, and name memory that is gone."""
    alone, anew = (folder / f"{SYNC}{number}" for number in range(2))
    for place, size in ((alone, 1), (anew, 2)):
        place.mkdir(mode=0o700)
        engine(place, size)
    path = anew / "memory-0.json"
    path.write_text(path.read_text().replace(process_mark(os.getpid()), "boot 1 2"))
    ranks, found = [Rank(anew, rank, 2) for rank in range(2)], []
    for rank in ranks:
        rank.load(weights(0))

    def look() -> None:
        found.append(len(attach(folder, lock=False).nonces))

    ranks[0].publish(anew, lambda: (look(), ranks[1].publish(anew, look)))
    look()
    assert found == [1, 1, 3]


def test_memory_of_another_gpu_is_not_opened_and_its_engine_is_named(folder, tmp_path) -> None:
    """A GPU is known by its UUID: its number depends on what a process sees."""
    (rank,) = engine(folder, 1)
    handle = {"kind": "cuda", "uuid": "1234-5678", "bytes": rank.memory.end - rank.memory.begin}
    rank.memory = plugin.Memory(handle, rank.memory.begin, rank.memory.end)
    rank.publish(folder)
    memory = attach(folder, lock=False)
    assert memory.on_gpus and memory.slices == {}

    class Carriage:
        memory_folder = folder

        def audience(self) -> str:
            return "engine 0"

        def show(self, info) -> None:
            assert info["memory"] == list(memory.homes)

        def pause(self) -> None:
            pass

        def publish(self, folder: Path, on_event) -> None:
            on_event(Written({}, tuple(specs()), memory.homes))

    with pytest.raises(SyncError, match=r"no rank of the trainer is on the GPU of rank 0 of engine 0 on GPU 1234-5678"):
        SingleCopy().drive(Carriage())


def test_slices_that_follow_each_other_are_one_piece(folder) -> None:
    """As Phi-3's checkpoints have q, k and v in one weight, and vLLM copies it in three parts; not in another order."""
    for order in ("qkv", "qvk"):
        rank = Rank(folder, 0, 1)
        fused, p = torch.randn(rank.parameters["qkv"].shape), rank.parameters["qkv"]
        sizes = {"q": HEADS * HEAD, "k": KV * HEAD, "v": KV * HEAD}
        with rank.recorder:
            ((_, weight),) = rank.recorder.seen([("qkv.weight", fused)])
            begin = 0
            for name in "qkv":
                to = sum(sizes[n] for n in order[: order.index(name)])
                p[to : to + sizes[name]].copy_(weight[begin : begin + sizes[name]])
                begin += sizes[name]
        about = {"architecture": "Some", "dtype": "float32", "num_ranks": 1}
        about_it = (about, [rank.memory], rank.recorder.slices, {"qkv.weight": fused.shape})
        plugin.write_manifest(folder, 0, *about_it, lambda: None)
        whole = attach(folder, lock=False).whole("qkv.weight")
        assert (whole is not None and torch.equal(whole, fused)) if order == "qkv" else whole is None


def test_both_sides_have_the_same_storage(folder) -> None:
    """A write on one side is seen on the other bit for bit, in both directions, without a call."""
    (rank,) = engine(folder, 1)
    view = attach(folder, lock=False).whole("k.weight")
    assert view is not None
    view.view(torch.int32).fill_(0x7F812345)  # a NaN with a payload, whose bits an arithmetic would not keep
    inside = rank.parameters["qkv"][HEADS * HEAD : HEADS * HEAD + KV * HEAD]
    assert inside.view(torch.int32).eq(0x7F812345).all()
    inside.view(torch.int32)[1, 2] = 7
    assert view.view(torch.int32)[1, 2] == 7 and view.view(torch.int32).eq(7).sum() == 1


@pytest.mark.parametrize(
    "dtype,changed,what",
    [
        (torch.bfloat16, {}, "embed.weight is bfloat16 in the trainer and float32 in engine 0"),
        (torch.float32, {"gate": (13, WIDTH)}, "gate.weight is (13, 8) in the trainer and (12, 8) in engine 0"),
        (torch.float32, {"extra": (3,)}, "the trainer has extra.weight, engine 0 has not"),
    ],
)
def test_another_model_or_dtype_is_named(folder, dtype, changed, what) -> None:
    engine(folder, 1)
    with pytest.raises(SyncError) as caught:
        attach(folder, lock=False).check(specs(dtype, **changed))
    assert what in caught.value.what and "--weight-sync shm" in caught.value.remedy


def test_of_several_engines_the_one_that_differs_is_named(folder) -> None:
    """Also where what lies in its memory cannot be opened, or has another trainer."""
    places = [folder / f"{SYNC}{number}" for number in range(2)]
    for place, dtype in zip(places, (torch.float32, torch.float16), strict=True):
        place.mkdir(mode=0o700)
        engine(place, 2, dtype)
    with pytest.raises(SyncError, match="embed.weight is float32 in the trainer and float16 in engine 1") as caught:
        attach(folder, lock=False).check(specs())
    assert caught.value.where == f"the memory of engine 1 (Some, float16), {places[1]}"
    held = attach(places[1], lock=True)
    with pytest.raises(SyncError, match="another trainer is attached to the weights of engine 1"):
        attach(folder, lock=True)
    held.close()
    (places[1] / "memory-1.json").write_text("{}")
    with pytest.raises(SyncError, match="the memory in which engine 1 shares its weights cannot be opened") as caught:
        attach(folder, lock=True)
    assert caught.value.where == str(places[1])


def test_a_second_trainer_is_refused_until_the_first_is_gone(folder) -> None:
    engine(folder, 1)
    first = attach(folder, lock=True)
    with pytest.raises(SyncError, match="another trainer is attached"):
        attach(folder, lock=True)
    attach(folder, lock=False)  # another rank of the first one
    first.close()
    attach(folder, lock=True).close()


def test_the_lock_of_a_trainer_ends_with_it_however_it_ends(folder) -> None:
    engine(folder, 1)
    code = "import sys, time; from pathlib import Path; from instep.weights.memory import attach; "
    code += f"held = attach(Path({str(folder)!r}), lock=True); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "held\n"
        with pytest.raises(SyncError, match="another trainer is attached"):
            attach(folder, lock=True)
        trainer.kill()
    attach(folder, lock=True).close()


def test_a_weight_that_is_loaded_in_another_way_is_noticed(folder) -> None:
    rank = Rank(folder, 0, 1)
    rank.copy = lambda name, weight: rank.parameters["norm"].copy_(weight + 1) if name == "norm" else None
    rank.load(weights(0))
    assert rank.recorder.unknown == [(8,)]


@pytest.mark.parametrize("change", ["outside", "cut", "foreign"])
def test_a_manifest_that_lies_opens_nothing(folder, change) -> None:
    engine(folder, 1)
    path = folder / "memory-0.json"
    manifest = json.loads(path.read_text())
    if change == "outside":
        manifest["tensors"]["q.weight"]["slices"][0]["offset"] = manifest["memories"][0]["bytes"] - 8
    elif change == "foreign":
        secret = folder.parent / "secret"
        secret.write_bytes(b"0" * manifest["memories"][0]["bytes"])
        manifest["memories"][0]["path"] = str(secret)
    path.write_text(json.dumps(manifest) if change != "cut" else "{")
    with pytest.raises(SyncError, match="cannot be opened"):
        attach(folder, lock=False)


def test_without_room_an_engine_says_so_and_leaves_nothing() -> None:
    free = os.statvfs(memory_root())
    too_much = 2 * free.f_blocks * free.f_frsize
    with pytest.raises(plugin.CannotShare, match="do not fit into .*--shm-size.*--weight-sync shm"):
        plugin.file_memory(memory_root(), 0, too_much)
    assert not [path for path in memory_root().glob("memory-0-*.bin") if path.stat().st_size == too_much]


def test_the_sample_of_both_sides_is_one() -> None:
    for shape in ((3,), (5000,), (100, 70), (1, 9000), (6, 5, 4), ()):
        tensor = torch.randn(shape).to(torch.bfloat16)
        whole = plugin.Slice(tensor, 0, tensor.stride())
        assert sample_digest(tensor) == plugin.Sample({"": [whole]}).digests()[""]


def test_no_engine_shares_anything(folder) -> None:
    with pytest.raises(SyncError, match="cannot be opened"):
        attach(folder, lock=False)
