"""What --async-save writes while training goes on is what a save writes while it waits, bit for bit."""

from __future__ import annotations

import hashlib
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoConfig, AutoModelForCausalLM

from instep.checkpoints.save_markers import remove_notes, tell_written, wait_written
from instep.errors import CheckpointError
from instep.training import saving
from instep.training.hf.backend import HfBackend
from instep.weights import parking
from instep.weights.parking import HostCopies, shard
from tests.distributed import megatron_layouts, megatron_runs
from tests.distributed.helpers import RankPool
from tests.distributed.hf_runs import ARGS, train

CPU = torch.device("cpu")


def _same_files(save: Any, root: Path) -> dict[str, Any]:
    """Save one state at once, and twice in the background, the second time after training; compare the first two.

    Args:
        save: a backend of either kind with its functions: `backend`, `train(steps)`, `weights()`.
    """
    backend, gate, place = save.backend, threading.Event(), save.backend.parallel
    write = saving._Snapshot.write
    saving._Snapshot.write = lambda self: gate.wait(60) and write(self)  # held until training has gone on
    save.train(range(1))
    folders = [root / name for name in ("at-once", "background", "later")]
    if place.rank == 0:
        for folder in folders:
            folder.mkdir()
    dist.barrier()
    backend.save(folders[0])
    assert backend.saver.finish(folders[0], place.rank, place.world_size, 60).keys() == {f"__{place.rank}_0.distcp"}
    backend.saver = saving.Saver(place.device, in_background=True)
    before = save.weights()
    for folder in folders[1:]:
        backend.save(folder)
        assert backend.saver.finish(folder, place.rank, place.world_size, 60) == {}
        save.train(range(1, 2))
        assert not (folder / f"__{place.rank}_0.distcp").exists() and not (folder / ".metadata").exists()
        gate.set()
        news = wait_written(folder, range(place.world_size), time.monotonic() + 60)
        gate.clear()
        digest = news[place.rank]["digests"][f"__{place.rank}_0.distcp"]
        assert len(digest) == 32
        dist.barrier()
        if place.rank == 0:
            remove_notes(folder)
    after = save.weights()
    saving._Snapshot.write = write
    dist.barrier()
    changed = [not torch.equal(before[name], after[name]) for name in before]
    return {"files": [_digests(folder) for folder in folders], "changed": changed, "index": _index(folders)}


def _digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def _index(folders: list[Path]) -> list[Any]:
    """The contents of `.metadata`, without the path and the random identity of a save."""
    found = [FileSystemReader(folder).read_metadata() for folder in folders]
    return [(repr(i.state_dict_metadata), repr(sorted(i.storage_data.items(), key=repr))) for i in found]


OTHERS = {".metadata"}  # it names the folder, and has an identity


def differing(ranks: list[dict[str, Any]], num_ranks: int) -> set[str]:
    """The files of a save in the background that differ from those of a save at once."""
    differ = set[str]()
    for rank in ranks:
        at_once, background, later = rank["files"]
        assert at_once.keys() == background.keys() >= {f"__{r}_0.distcp" for r in range(num_ranks)} | {".metadata"}
        differ |= {name for name in at_once if at_once[name] != background[name]}
        assert rank["index"][0] == rank["index"][1]
        assert any(later[name] != at_once[name] for name in later if name.endswith(".distcp"))
        assert any(rank["changed"])
    return differ


def hf_rank(path: Path, root: Path, dtype: torch.dtype) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else CPU
    backend = HfBackend(ARGS, hf_config=AutoConfig.from_pretrained(path), device=device, dtype=dtype)
    backend.load_hf(path)

    def weights() -> dict[str, torch.Tensor]:
        return {name: shard(p).detach().clone() for name, p in backend.policy.named_parameters()}

    return _same_files(SimpleNamespace(backend=backend, train=partial(train, backend), weights=weights), root)


def test_hf_writes_the_same_in_the_background(run_ranks, tied_checkpoint, tmp_path):
    assert differing(run_ranks(hf_rank, 2, tied_checkpoint, tmp_path, torch.bfloat16), 2) == OTHERS


def megatron_rank(root: Path, layouts: list[tuple[str, torch.dtype]]) -> list[dict[str, Any]]:
    from instep.training.megatron import cpu_platform

    if not torch.cuda.is_available():
        cpu_platform.install()  # before anything imports Megatron
    found = []
    for layout, dtype in layouts:
        backend, hf = megatron_runs.make_backend(root, layout, dtype=dtype)
        backend.load_hf(hf)

        def weights(backend: Any = backend) -> dict[str, torch.Tensor]:
            return {n: p.detach().clone() for c in backend.chunks for n, p in c.named_parameters()}

        steps = partial(megatron_runs.train, backend)
        place = root / f"{layout}-{dtype}"
        if backend.parallel.rank == 0:
            place.mkdir()
        dist.barrier()
        found.append(_same_files(SimpleNamespace(backend=backend, train=steps, weights=weights), place))
    return found


def test_megatron_writes_the_same_in_the_background(tmp_path):
    """Tensor and data parallelism, masters, and the distributed optimizer."""
    layouts = [("tp2-tied", torch.bfloat16), ("dp2-dist-opt", torch.float32)]
    for model in {megatron_layouts.LAYOUTS[layout][1] for layout, _ in layouts}:
        AutoModelForCausalLM.from_config(megatron_layouts.MODELS[model]).save_pretrained(tmp_path / model)
    with RankPool(2, megatron=True) as pool:
        ranks = pool.run(megatron_rank, tmp_path, layouts)
    for layout in zip(*ranks, strict=True):
        assert differing(list(layout), 2) == OTHERS


def _failing_rank(path: Path, root: Path) -> str:
    """The second rank's disk is full; the first waits for it."""
    backend = HfBackend(ARGS, hf_config=AutoConfig.from_pretrained(path), device=CPU, dtype=torch.float32)
    backend.load_hf(path)
    backend.saver, place = saving.Saver(CPU, in_background=True), backend.parallel
    backend.save(root)
    if place.rank == 1:

        def full(self: Any) -> Any:
            raise OSError(28, "No space left on device")

        saving._Snapshot.write = full
    backend.saver.finish(root, place.rank, place.world_size, 60)
    try:
        wait_written(root, range(2), time.monotonic() + 60)
    except CheckpointError as error:
        return error.what
    return ""


def test_a_rank_that_cannot_write_is_an_error_of_all(run_ranks, tied_checkpoint, tmp_path):
    for what in run_ranks(_failing_rank, 2, tied_checkpoint, tmp_path):
        assert "OSError: [Errno 28] No space left on device" in what and "rank" in what


def test_waiting_has_a_bound_and_ends_with_the_run(tmp_path):
    tell_written(tmp_path, 0, digests={})
    with pytest.raises(CheckpointError, match=r"ranks \[1\] .* longer than --train-timeout"):
        wait_written(tmp_path, range(2), time.monotonic() + 0.1)
    ended = threading.Event()
    ended.set()
    with pytest.raises(CheckpointError, match=r"ranks \[1\] .*the run has ended"):
        wait_written(tmp_path, range(2), time.monotonic() + 60, ended)
    (tmp_path / ".written_1.json").touch()  # of a full disk
    with pytest.raises(CheckpointError, match="not even an error"):
        wait_written(tmp_path, range(2), time.monotonic() + 60)
    remove_notes(tmp_path)
    assert not list(tmp_path.iterdir())


def test_copies_keep_strides_and_their_memory(monkeypatch):
    monkeypatch.setattr(parking, "BLOCK_BYTES", 2048)
    copies = HostCopies(CPU, "--async-save", "none")
    tensors = [torch.randn(8, 9).t(), torch.tensor(3.0), torch.empty(0, 4), torch.randn(40, 40), torch.ones(7).short()]
    for _ in range(2):
        copies.clear()
        made = [copies.copy(t) for t in tensors]
        copies.wait()
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(made, tensors, strict=True))
        places = [t.untyped_storage().data_ptr() for t in made]
        assert len(copies._blocks) == 3 and len(set(places)) == 3
    tensors[0][0, 0] = 7.0
    assert made[0][0, 0] != 7.0
