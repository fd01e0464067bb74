"""Tensors that give their memory away and get it back, in both train backends, change no bit of what is computed."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from instep.training.hf.backend import HfBackend
from instep.weights.parking import Parking, local_tensors
from tests.distributed import megatron_layouts, megatron_runs
from tests.distributed.helpers import RankPool
from tests.distributed.hf_runs import ARGS, make_backend, make_batch, train, weights_of

CPU = torch.device("cpu")


def held(*parkings: Parking) -> int:
    """Bytes that the tensors of these have now."""
    found = {t.untyped_storage()._cdata: t.untyped_storage() for p in parkings for t in (*p._find(), *p._drop())}
    return sum(storage.nbytes() for storage in found.values())


def test_views_come_back_with_their_storage_and_the_host_memory_is_used_again():
    weight = torch.nn.Parameter(torch.randn(50, 7))
    view, other, gradient = weight.detach().view(-1)[3:9], torch.randn(100), torch.ones(9)
    want = [t.detach().clone() for t in (weight, view, other)]
    parking = Parking(CPU, lambda: [weight, view, other], lambda: [gradient])
    for round_ in range(2):
        parking.leave()
        assert torch.equal(weight, want[0]) and not gradient.untyped_storage().nbytes()
        parking.free()
        assert held(parking) == 0 and parking.num_bytes == 1536 + 512
        place = parking._pool.data_ptr()
        parking.bring()
        parking.ready()
        assert all(map(torch.equal, (weight, view, other), want)) and not gradient.any()
        weight.detach()[0, 4] = want[1][1] = want[0][0, 4] = 7.0 + round_  # seen through the view
        assert torch.equal(view, want[1]) and parking._pool.data_ptr() == place


def test_what_has_only_begun_to_leave_stays():
    tensor, gradient = torch.randn(9), torch.ones(3)
    want, parking = tensor.clone(), Parking(CPU, lambda: [tensor], lambda: [gradient])
    parking.leave()
    parking.bring()
    assert torch.equal(tensor, want) and not gradient.any() and gradient.numel() == 3
    parking.bring()  # nothing is away
    assert torch.equal(tensor, want)


def _parked_rank(path, folder, dtype):
    """Two steps, with all memory given away after each, beside two steps without."""
    results = []
    for parks in (False, True):
        backend = HfBackend(ARGS, hf_config=AutoConfig.from_pretrained(path), device=CPU, dtype=dtype)
        backend.load_hf(path)
        steps, sizes = [], []
        for step in range(2):
            steps += train(backend, range(step, step + 1))
            if parks:
                before = held(backend._weights, backend._states)
                backend.offload(weights=False)
                scores = backend.forward_only([make_batch(5)])[0].log_probs  # of a sync's probe
                backend.offload()
                sizes.append((before, held(backend._weights, backend._states)))
                backend.onload(optimizer=False)
                assert held(backend._weights) and not held(backend._states)
                assert torch.equal(backend.forward_only([make_batch(5)])[0].log_probs, scores)
                backend.offload()
                backend.onload()
        place = folder / f"{dtype}-{parks}"
        if backend.parallel.rank == 0:
            place.mkdir(parents=True)
        torch.distributed.barrier()
        backend.save(place)
        results.append((steps, weights_of(backend), sizes))
        resumed = HfBackend(ARGS, hf_config=AutoConfig.from_pretrained(path), device=CPU, dtype=dtype)
        resumed.load(folder / f"{dtype}-{not parks}" if parks else place)
        results[-1] += (train(resumed, range(1)),)
    return results


@pytest.mark.parametrize(
    "world_size, dtype",
    [
        (1, torch.float32),
        (1, torch.bfloat16),
        pytest.param(2, torch.float32, marks=pytest.mark.slow),
        (2, torch.bfloat16),
    ],
)
def test_hf_trains_and_resumes_with_the_same_bits(run_ranks, tied_checkpoint, tmp_path, world_size, dtype):
    for plain, parked in run_ranks(_parked_rank, world_size, tied_checkpoint, tmp_path, dtype):
        assert plain[0] == parked[0] and plain[3] == parked[3]
        for before, away in parked[2]:
            assert before >= 3 * 4 * 5000 / world_size and away == 0
        for name, weight in (plain[1] or {}).items():
            assert torch.equal(parked[1][name], weight), name


def test_a_frozen_model_parks_too(run_ranks, tied_checkpoint):
    assert run_ranks(_frozen_rank, 1, tied_checkpoint) == [(True, 0, True)]


def _frozen_rank(path):
    backend = make_backend(path)
    scores = backend.forward_only([make_batch(0)])[0].log_probs
    backend.optimizer = None
    backend.offload()
    away = sum(t.untyped_storage().nbytes() for t in local_tensors(backend.policy))
    backend.onload()
    again = backend.forward_only([make_batch(0)])[0].log_probs
    return bool(len(scores)), away, torch.equal(scores, again)


def _megatron_rank(root, runs):
    from instep.training.megatron import cpu_platform

    cpu_platform.install()  # before anything imports Megatron
    return [_megatron_run(root, *run) for run in runs]


def _megatron_run(root, layout, dtype):
    results = []
    for parks in (False, True):
        backend, hf = megatron_runs.make_backend(root, layout, dtype=dtype)
        backend.load_hf(hf)
        losses, sizes = [], []
        for step in range(2):
            losses.append(megatron_runs.train(backend, range(step, step + 1)))
            if parks:
                before = held(backend._weights, backend._states)
                backend.offload(weights=False)
                exported = megatron_runs.export(backend)  # what a sync sends
                backend.offload()
                sizes.append((before, held(backend._weights, backend._states)))
                backend.onload(optimizer=False)
                again = megatron_runs.export(backend)
                assert all(torch.equal(again[name], t) for name, t in exported.items())
                backend.onload()
        results.append((losses, megatron_runs.export(backend), sizes))
    return results


@pytest.mark.parametrize(
    "runs",
    [
        [("one", torch.float32), ("one", torch.bfloat16)],
        pytest.param(
            [("dp2-dist-opt", torch.bfloat16), ("dp2", torch.float32), ("tp2-tied", torch.bfloat16)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one", "two"],
)
def test_megatron_trains_with_the_same_bits(tmp_path, runs):
    torch.manual_seed(0)
    for model in {megatron_layouts.LAYOUTS[layout][1] for layout, _ in runs}:
        AutoModelForCausalLM.from_config(megatron_layouts.MODELS[model]).save_pretrained(tmp_path / model)
    with RankPool(megatron_layouts.LAYOUTS[runs[0][0]][0], megatron=True) as pool:
        for rank in pool.run(_megatron_rank, tmp_path, runs):
            for plain, parked in rank:
                assert plain[0] == parked[0]
                assert all(torch.equal(parked[1][name], weight) for name, weight in plain[1].items())
                assert all(before > 4 * 20_000 and away == 0 for before, away in parked[2])


def _pieces_rank(root):
    from instep.training.megatron import cpu_platform

    cpu_platform.install()
    from instep.training.megatron.moments import keep_moments_in_pieces

    results = []
    for layout in ("one", "dp2-dist-opt"):
        runs = []
        for pieces in (False, True):
            backend, hf = megatron_runs.make_backend(root, layout, dtype=torch.bfloat16)
            if pieces:
                # On the host there is no other memory.
                keep_moments_in_pieces(backend.optimizer, eight_bits=False, offload=False)
            backend.load_hf(hf)
            losses = megatron_runs.train(backend, range(2))
            place = root / f"{layout}-{pieces}"
            place.mkdir(exist_ok=True)
            backend.save(place)
            runs.append((losses, backend))
        runs[1][1].load(root / f"{layout}-False")  # the plain one's checkpoint, and the other way round
        runs[0][1].load(root / f"{layout}-True")
        results.append([(losses, megatron_runs.train(b, range(2, 4)), megatron_runs.export(b)) for losses, b in runs])
    return results


def test_megatron_with_moments_in_pieces_is_the_same_optimizer(tmp_path):
    """What `--optimizer-cpu-offload` puts into Megatron's optimizer on GPUs."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(megatron_layouts.MODELS["untied"]).save_pretrained(tmp_path / "untied")
    with RankPool(1, megatron=True) as pool:
        for plain, pieces in pool.run(_pieces_rank, tmp_path)[0]:
            for ours, theirs in zip((*pieces[0], *pieces[1]), (*plain[0], *plain[1]), strict=True):
                assert ours == pytest.approx(theirs, rel=2e-3)
            assert all((pieces[2][n] - w).abs().max() <= 0.01 * w.abs().max() for n, w in plain[2].items())
