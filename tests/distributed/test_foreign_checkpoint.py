"""Checkpoints that Megatron itself has written, by any layout of ranks and under any of its names, give their weights
and their optimizer, and run no code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instep.checkpoints.convert import main as convert
from instep.checkpoints.megatron_files import RANK_FILE
from instep.checkpoints.torch_files import load_data
from instep.errors import CheckpointError
from tests.distributed.foreign import load_torch_dist, save_torch, save_torch_dist
from tests.distributed.megatron_layouts import MODELS, random_model
from tests.distributed.megatron_runs import export, make_backend, refusal, train

MEGATRON = True  # what the ranks have imported
FULL = dict(distrib_optim_sharding_type="fully_reshardable")
# name: (layout that saves, format, how)
SAVES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "stacked": ("tp2", "torch_dist", {}),
    "tied, two stages": ("pp2-tied", "torch_dist", {"non_homogeneous_layers": True}),
    "bias": ("tp2-qwen2", "torch_dist", {}),
    "experts": ("ep2", "torch_dist", {}),
    "experts, apart": ("tp2-sp-ep2", "torch_dist", {"singleton_local_shards": True}),
    "latent attention": ("ep2-deepseek", "torch_dist", {}),
    "torch": ("tp2", "torch", {}),
    "torch, latent attention": ("tp2-sp-deepseek", "torch", {}),
    "torch, stages in turns": ("pp2-virtual", "torch", {}),
    "torch, experts": ("ep2", "torch", {"grouped": True}),
    "torch, split experts": ("tp2-sp-etp2", "torch", {}),
    "torch, delta nets": ("tp2-sp-qwen3.5", "torch", {}),
}
FAST = ("stacked", "experts, apart", "latent attention", "torch, stages in turns", "torch, experts")
READS = {"untied": "dp2", "tied": "pp2-tied", "deep": "pp2-deep", "qwen2": "tp2-qwen2", "moe": "tp2-sp-etp2",
         "moe-mixed": "ep2-dist-opt", "deepseek": "pp2-deepseek", "qwen3.5": "pp2-qwen3.5"}  # fmt: skip


def save_and_load(root: Path, name: str) -> dict[str, Any]:
    """What was saved and what another layout reads, as Hugging Face tensors (on rank 0)."""
    layout, kind, how = SAVES[name]
    folder = root / name / "iter_0000007"
    backend, hf = make_backend(root, layout, with_optimizer=False)
    backend.load_hf(hf)
    saved = export(backend)
    (save_torch_dist if kind == "torch_dist" else save_torch)(folder, backend, **how)
    other, _ = make_backend(root, READS[hf.name], with_optimizer=False)
    other.load(folder, optimizer=False)
    return dict(saved=saved, read=export(other))


def optimizer_goes_on(root: Path, saves: str, loads: str, dtype: torch.dtype, how: dict[str, Any]) -> dict[str, Any]:
    """Two steps after a save with its optimizer, and the same after another layout has loaded it."""
    folder = root / f"{saves}-{loads}-{dtype}" / "iter_0000007"
    backend, hf = make_backend(root, saves, dtype=dtype)
    backend.load_hf(hf)
    train(backend, range(1))
    save_torch_dist(folder, backend, optimizer=True, **how)
    if how.get("distrib_optim_sharding_type") == "dp_reshardable":
        return dict(refused=refusal(lambda: make_backend(root, loads, dtype=dtype)[0].load(folder)))
    straight = train(backend, range(1, 3))
    other, _ = make_backend(root, loads, dtype=dtype)
    other.load(folder)
    return dict(straight=straight, resumed=train(other, range(1, 3)))


def goes_on_from_our_torch(root: Path, saves: str, loads: str, dtype: torch.dtype) -> dict[str, Any]:
    """Two steps after a save of instep's in the format `torch`, and the same after another layout's load."""
    folder = root / f"ours-{saves}-{loads}" / "iter_0000007"
    backend, hf = make_backend(root, saves, dtype=dtype, ckpt_format="torch")
    backend.load_hf(hf)
    train(backend, range(1))
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    backend.save(folder)
    dist.barrier()
    saved = export(backend)
    straight = train(backend, range(1, 3))
    if backend.parallel.dp_rank == 0:  # the ranks that write
        assert "was not written" in refusal(lambda: backend.save(root / "nowhere")).what
    else:
        backend.save(root / "nowhere")
    other, _ = make_backend(root, loads, dtype=dtype)
    other.load(folder)
    read = export(other)
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.pt"))
    place = backend.placement
    own = load_data(folder / f"mp_rank_{place.tp_rank:02d}{f'_{place.pp_rank:03d}' * (place.pp_size > 1)}" / RANK_FILE)
    assert own["iteration"] == 7 and own["checkpoint_version"] == 3.0 and "args" in own
    for i, chunk in enumerate(backend.chunks):
        chunk.load_state_dict(own[f"model{i}" if len(backend.chunks) > 1 else "model"])  # as Megatron-LM does
    return dict(saved=saved, read=read, straight=straight, resumed=train(other, range(1, 3)), files=files)


def read_by_megatron(root: Path, layout: str) -> dict[str, Any]:
    backend, hf = make_backend(root, layout, with_optimizer=False)
    load_torch_dist(root / f"{hf.name}-converted" / "release", backend)
    read = export(backend)
    backend.load_hf(hf)
    return dict(read=read, wanted=export(backend))


def on_cpu(function: Any, *args: Any) -> Any:
    from instep.training.megatron import cpu_platform

    cpu_platform.install()  # before the first import of megatron.core
    return function(*args)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, run_ranks):
    root = tmp_path_factory.mktemp("foreign")
    for name in READS:
        random_model(MODELS[name]).save_pretrained(root / name)
    for name in ("untied", "tied", "moe-mixed", "deepseek"):
        words = ["--hf-checkpoint", str(root / name), "--save", str(root / f"{name}-converted")]
        assert convert(["hf-to-megatron", *words]) == 0
    return lambda function, *args: run_ranks(on_cpu, 2, function, root, *args)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in SAVES])
def test_weights_of_any_layout_and_names_are_read_bit_by_bit(ranks, name):
    result = ranks(save_and_load, name)[0]
    assert result["read"].keys() == result["saved"].keys()
    assert all(torch.equal(result["read"][key], weight) for key, weight in result["saved"].items())


@pytest.mark.parametrize(
    ("saves", "loads", "dtype", "how"),
    [
        ("dp2-dist-opt", "tp2", torch.float32, FULL),
        pytest.param("pp2-tied", "tp2-tied", torch.float32, {}, marks=pytest.mark.slow),
        ("tp2", "dp2-dist-opt", torch.bfloat16, {}),
        pytest.param("ep2-dist-opt", "tp2-sp-ep2", torch.float32, FULL, marks=pytest.mark.slow),
    ],
)
def test_an_optimizer_of_megatron_goes_on_under_another_layout(ranks, saves, loads, dtype, how):
    result = ranks(optimizer_goes_on, saves, loads, dtype, how)[0]
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    for straight, resumed in zip(result["straight"], result["resumed"], strict=True):
        assert resumed == pytest.approx(straight, rel=bound, abs=bound)


@pytest.mark.parametrize(
    ("saves", "loads", "dtype", "files"),
    [
        ("pp2-virtual", "pp2-virtual", torch.float32, ["mp_rank_00_000", "mp_rank_00_001"]),
        pytest.param("tp2", "dp2-dist-opt", torch.bfloat16, ["mp_rank_00", "mp_rank_01"], marks=pytest.mark.slow),
        pytest.param("dp2-dist-opt", "dp2-dist-opt", torch.bfloat16, ["mp_rank_00"], marks=pytest.mark.slow),
        pytest.param(
            "pp2-tied", "tp2-tied", torch.float32, ["mp_rank_00_000", "mp_rank_00_001"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_goes_on_from_what_it_has_saved_as_torch(ranks, saves, loads, dtype, files):
    result = ranks(goes_on_from_our_torch, saves, loads, dtype)[0]
    assert result["files"] == [f"{name}/model_optim_rng.pt" for name in files]
    assert all(torch.equal(result["read"][key], weight) for key, weight in result["saved"].items())
    if saves == loads:
        assert result["resumed"] == result["straight"]
    for straight, resumed in zip(result["straight"], result["resumed"], strict=True):
        assert resumed == pytest.approx(straight, rel=2e-2 if dtype is torch.bfloat16 else 1e-5)


def test_moments_in_the_buckets_of_ranks_are_refused_by_name(ranks):
    how = dict(distrib_optim_sharding_type="dp_reshardable")
    error = ranks(optimizer_goes_on, "dp2-dist-opt", "dp2-dist-opt", torch.bfloat16, how)[0]["refused"]
    assert isinstance(error, CheckpointError) and "dp_reshardable" in error.what
    assert "--no-load-optim" in error.remedy and "--dist-ckpt-optim-fully-reshardable" in error.remedy


@pytest.mark.parametrize(
    "layout", ["tp2", pytest.param("pp2-tied", marks=pytest.mark.slow), "tp2-sp-ep2", "pp2-deepseek"]
)
def test_what_convert_writes_is_read_by_megatron_itself(ranks, layout):
    result = ranks(read_by_megatron, layout)[0]
    assert all(torch.equal(result["read"][key], weight) for key, weight in result["wanted"].items())
