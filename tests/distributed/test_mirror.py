"""Single copy: what a trainer of any layout writes into the memory of engines is its weights, whatever their layout.

The engines are their memory alone, in the slices that vLLM has: rows of q, k, v, gate and up, columns of o and down,
key heads that several ranks hold, rows of a vocabulary that is filled up to a multiple of 64.
"""

import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from instep.training.hf import mirror
from instep.training.hf.backend import HfBackend
from instep.weights.memory import attach, digests_of
from instep.weights.parking import shard
from instep_engine import memory as plugin
from instep_engine.place import SYNC
from tests.distributed.hf_runs import ARGS, make_checkpoint, oracle_training, train, weights_of

HEAD = 8
SPOILT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[tuple[float, float]], dict[str, torch.Tensor]]:
    """A checkpoint, and the steps and weights of plain transformers that begin with it."""
    path = make_checkpoint(tmp_path_factory.mktemp("trained"), tied=False, vocab_size=72)
    return path, *oracle_training(path)


def slice_of(name: str, shape: torch.Size, rank: int, size: int) -> tuple[int, int, int]:
    """Dimension, begin and length of the slice of a weight that a rank of an engine holds."""
    layer = name.split(".")[-2]
    if layer in ("embed_tokens", "lm_head"):
        rows = -(-shape[0] // 64) * 64 // size
        begin = min(rank * rows, shape[0])
        return 0, begin, min(begin + rows, shape[0]) - begin
    if layer in ("k_proj", "v_proj"):
        return 0, rank * shape[0] // size // HEAD * HEAD, max(shape[0] // size, HEAD)
    if layer in ("o_proj", "down_proj"):
        return 1, rank * shape[1] // size, shape[1] // size
    size = size if layer in ("q_proj", "gate_proj", "up_proj") else 1
    return 0, rank % size * shape[0] // size, shape[0] // size


class Worker:
    """The memory of one rank of an engine, and its slices by the names of the weights."""

    def __init__(self, folder: Path, rank: int, size: int, weights: dict[str, torch.Tensor]):
        self.places = {name: slice_of(name, w.shape, rank, size) for name, w in weights.items()}
        shapes = {name: w.narrow(*self.places[name]).shape for name, w in weights.items()}
        (dtype,) = {w.dtype for w in weights.values()}
        numbers = [shape.numel() for shape in shapes.values()]
        memory, data = plugin.file_memory(folder, rank, sum(numbers) * dtype.itemsize)
        flat = data.view(dtype).split(numbers)
        self.slices = {name: part.view(shapes[name]) for name, part in zip(weights, flat, strict=True)}
        recorder = self.recorder = plugin.Recorder(self.slices.values())
        with recorder:
            for name, weight in recorder.seen(weights.items()):
                self.slices[name].copy_(weight.narrow(*self.places[name]))
        about = {"architecture": "Some", "num_ranks": size}
        about["dtype"] = str(dtype).removeprefix("torch.")
        whole = {n: w.shape for n, w in weights.items()}
        plugin.write_manifest(folder, rank, about, [memory], recorder.slices, whole, lambda: None)
        self.nonce = json.loads((folder / f"memory-{rank}.json").read_text())["nonce"]

    def other_than(self, weights: dict[str, torch.Tensor]) -> list[str]:
        """The names of the weights of which it holds something else."""
        held = self.slices.items()
        return [name for name, part in held if not torch.equal(part, weights[name].narrow(*self.places[name]))]


def make(path, tp, dtype, way="single-copy"):
    args = SimpleNamespace(**{**vars(ARGS), "tensor_model_parallel_size": tp, "weight_sync": way})
    config = AutoConfig.from_pretrained(path)
    backend = HfBackend(args, hf_config=config, device=torch.device("cpu"), dtype=dtype)
    backend.load_hf(path)
    return backend


def _rank(path, tp, dtype, folder, apart):
    backend = make(path, tp, dtype)
    memory = attach(folder, lock=False)
    if apart:  # as on GPUs: a rank opens the memory of the worker on its own
        mine = list(memory.slices)[backend.parallel.rank : backend.parallel.rank + 1]
        memory.on_gpus, memory.crowded, memory.slices = True, False, {nonce: memory.slices[nonce] for nonce in mine}
        memory.wait = lambda: None  # there is no GPU
    source = backend.weight_source()
    source.write_into(memory)
    steps = train(backend, range(2))
    source.write_into(memory)
    steps += train(backend, range(2, 3))
    told = {nonce: digests_of(found) for nonce, found in source.write_into(memory).items()}
    unwritten = source.unwritten(memory)
    dist.barrier()
    held = [part.view for worker in memory.slices.values() for part in worker[SPOILT]]
    old = [view.clone() for view in held]
    dist.barrier()
    for view in held:
        view[-1, -1] = 9.0
    dist.barrier()
    spoilt = source.unwritten(memory)
    dist.barrier()
    for view in held:
        view.fill_(9.0)
    dist.barrier()
    still = {nonce: digests_of(found) for nonce, found in backend._mirror._sampler.samples().items()}
    dist.barrier()
    for view, before in zip(held, old, strict=True):
        view.copy_(before)
    return steps, weights_of(backend), told, unwritten, spoilt, still


@pytest.mark.parametrize(
    "dtype, ranks, tp, engines, engine_tp, apart",
    [
        pytest.param(torch.float32, 4, 2, 2, 2, False, marks=pytest.mark.slow),
        (torch.bfloat16, 2, 1, 1, 2, False),
        (torch.bfloat16, 2, 1, 1, 1, True),  # a rank beside the engine's
        (torch.bfloat16, 4, 2, 2, 2, True),
        (torch.bfloat16, 4, 4, 1, 4, False),  # two ranks share a key head
        # Another TP than the engine's: nothing is a view that is cut.
        pytest.param(torch.bfloat16, 4, 2, 1, 1, False, marks=pytest.mark.slow),
        (torch.float32, 2, 2, 1, 4, False),
        (torch.bfloat16, 4, 2, 1, 1, True),  # three ranks beside the engine's
    ],
)
def test_engines_hold_the_weights(run_ranks, trained, tmp_path, dtype, ranks, tp, engines, engine_tp, apart):
    """To the last bit, of masters that have made the steps of plain transformers."""
    path, expected_steps, expected = trained
    blank = {name: torch.zeros(w.shape, dtype=dtype) for name, w in expected.items()}
    workers = []
    for number in range(engines):
        place = tmp_path / f"{SYNC}{number}"
        place.mkdir(mode=0o700)
        workers += [Worker(place, rank, engine_tp, blank) for rank in range(engine_tp)]
    results = run_ranks(_rank, ranks, path, tp, dtype, tmp_path, apart)
    steps, weights, *_ = results[0]
    assert [worker.other_than(weights) for worker in workers] == [[]] * len(workers)
    rtol, atol = (1e-5, 1e-6) if dtype is torch.float32 else (0.1, 0.02)
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected_steps), rtol=rtol, atol=atol)
    for name, weight in expected.items():
        assert (weights[name].float() - weight).norm() <= max(rtol / 5, 1e-5) * weight.norm(), name
    held = {worker.nonce: plugin.Sample(worker.recorder.slices).digests() for worker in workers}
    assert [result[3] for result in results] == [[]] * ranks
    assert {name for result in results for name in result[4]} == {SPOILT}
    for rank, (_, _, told, _, _, still) in enumerate(results):  # the sample of the masters, which no rank has whole
        opened = list(held)[rank : rank + 1] if apart else list(held)
        assert told == still == {nonce: held[nonce] for nonce in opened}, rank


def _first_write_rank(path, folder):
    backend = make(path, 2, torch.bfloat16)
    memory = attach(folder, lock=False)
    memory.on_gpus, memory.crowded, memory.wait = True, False, lambda: None
    nonce = list(memory.slices)[backend.parallel.rank]
    memory.slices = {nonce: memory.slices[nonce]}
    named = backend._compute.model.named_parameters()
    before = {name: weakref.ref(shard(p)) for name, p in named if isinstance(p, DTensor)}
    held = []
    mirror.give_back = lambda device: held.extend(name for name, tensor in before.items() if tensor() is not None)
    backend.weight_source().write_into(memory)
    return len(before), held


def test_what_the_parameters_were_is_given_back(run_ranks, trained, tmp_path):
    """To the GPU, when the first session makes them views of the engine's memory."""
    path, _, weights = trained
    blank = {name: torch.zeros(w.shape, dtype=torch.bfloat16) for name, w in weights.items()}
    place = tmp_path / f"{SYNC}0"
    place.mkdir(mode=0o700)
    for rank in range(2):
        Worker(place, rank, 2, blank)
    for number, held in run_ranks(_first_write_rank, 2, path, tmp_path):
        assert number > 10 and held == ["model.embed_tokens.weight", "lm_head.weight"]  # an engine cuts them otherwise


def _both_ways_rank(path):
    return [train(make(path, 1, torch.bfloat16, way), range(1))[0] for way in ("single-copy", "shm")]


def test_gradients_are_added_up_as_fsdp_does(run_ranks, tied_checkpoint):
    """In float32, over micro-batches and over ranks; what bfloat16 would make of it differs by more."""
    one, other = run_ranks(_both_ways_rank, 2, tied_checkpoint)[0]
    assert one == pytest.approx(other, rel=1e-6)
