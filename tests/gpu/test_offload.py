"""Trainer and engine that take turns on one GPU: what each frees, and that what is computed stays the same."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch

from instep.weights.parking import Parking, give_back, host_memory
from tests.assets import make_prompts, make_tokenizer
from tests.distributed import megatron_layouts, megatron_runs
from tests.distributed.helpers import RankPool
from tests.e2e.commands import grpo_arguments, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MIB = 1 << 20
KV_CACHE = 1 << 30
LAYERS, HIDDEN = 8, 1024
COMMON = "--device cuda --precision bf16 --num-rollout 3 --lr 1e-5 --rm-type random"


def test_parked_tensors_free_the_gpu_and_come_back_as_they_were():
    device = torch.device("cuda")
    tensors = [torch.randn(4 * MIB, device=device) for _ in range(8)]  # 16 MiB each, a segment of the allocator's
    gradient = torch.ones(4 * MIB, device=device)
    freed = 9 * 16 * MIB - MIB // 4  # what the test computes meanwhile is small
    view, sums = tensors[0].view(1024, -1)[3], [t.double().sum() for t in tensors]
    parking = Parking(device, lambda: [*tensors, view], lambda: [gradient])
    for round_ in range(3):
        give_back(device)
        before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        began = time.monotonic()
        parking.leave()
        copied = [t.double().sum() for t in tensors]  # they may still be read
        parking.free()
        give_back(device)
        left = time.monotonic() - began
        assert before - torch.cuda.memory_allocated() >= freed
        assert reserved - torch.cuda.memory_reserved() >= freed - 4 * MIB, "other processes do not get it"
        began = time.monotonic()
        parking.bring()
        busy = torch.randn(2048, 2048, device=device) @ torch.randn(2048, 2048, device=device)
        parking.ready()
        assert all(t.double().sum() == s for t, s in zip(tensors, sums, strict=True)) and busy.isfinite().all()
        assert copied == sums and torch.equal(view, tensors[0].view(1024, -1)[3]) and not gradient.any()
        print(f"\nround {round_}: 128 MiB left in {left:.3f} s, came back in {time.monotonic() - began:.3f} s")
        del busy
    assert parking.num_bytes == 8 * 16 * MIB


def test_host_memory_is_pinned_until_it_is_gone():
    """CUDA refuses to pin a page that is pinned: pieces have none in common, and what is gone leaves none behind."""
    device = torch.device("cuda")
    for size in (6_000, 300_000, 64 * MIB):
        for _ in range(20):
            memory = [host_memory(size, device, "--a", "--b") for _ in range(4)]
            view = memory[0][size // 2 :]
            memory.clear()
            assert view.is_pinned() and view.numel() == size - size // 2
            view.copy_(torch.ones(len(view), dtype=torch.uint8, device=device))
            assert view.sum() == len(view)


def _megatron_rank(root: Path) -> list[tuple[object, int, float]]:
    out = []
    for offload in (False, True):
        backend, hf = megatron_runs.make_backend(root, "one", dtype=torch.bfloat16, optimizer_cpu_offload=offload)
        backend.load_hf(hf)
        losses = megatron_runs.train(backend, range(2))
        backend.offload(weights=False)
        backend.offload()
        left = torch.cuda.memory_allocated()
        backend.onload()
        losses += megatron_runs.train(backend, range(2, 4))
        moments = [m.state["exp_avg"] for m in masters(backend)]
        on_host = all(t.device.type == "cpu" and t.is_pinned() for t in moments)
        out.append((losses, left, float(on_host)))
        del backend
    return out


def masters(backend: object) -> list[object]:
    from instep.training.megatron import checkpoint

    return list(checkpoint.masters(backend.optimizer).values())  # type: ignore[attr-defined]


def test_megatron_with_its_moments_on_the_host_trains_alike(tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(megatron_layouts.MODELS["untied"]).save_pretrained(tmp_path / "untied")
    with RankPool(1, cuda=True) as pool:
        plain, offloaded = pool.run(_megatron_rank, tmp_path)[0]
    print(f"\nlosses and norms: {plain[0]} beside {offloaded[0]}; left on the GPU: {plain[1]} and {offloaded[1]} bytes")
    assert plain[2] == 0.0 and offloaded[2] == 1.0
    for ours, theirs in zip(offloaded[0], plain[0], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2)


# ---- whole runs: one starts a vLLM, the other an embedded engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A random Qwen3 of 101 M parameters with a character tokenizer, and prompts."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    root, tokenizer = tmp_path_factory.mktemp("offload"), make_tokenizer()
    vocab = tokenizer.get_vocab()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocab), hidden_size=HIDDEN, intermediate_size=3072, num_hidden_layers=LAYERS,
        num_attention_heads=16, num_key_value_heads=8, head_dim=64, max_position_embeddings=512,
        tie_word_embeddings=True, eos_token_id=vocab["<|im_end|>"], pad_token_id=vocab["<|endoftext|>"],
        bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "hf")
    tokenizer.save_pretrained(root / "hf")
    make_prompts(root / "train.jsonl", 64)
    return root


def rows(folder: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "train/loss" in row]


@pytest.fixture(scope="module", params=["hf", "megatron"])
def taken(request, tiny, tmp_path_factory) -> tuple[Path, Path, str]:
    """A run of three steps in turns, engines at sleep level 2; its folder, its rollouts and its train backend."""
    root, backend = tmp_path_factory.mktemp(f"turns-{request.param}"), request.param
    flags = f"--train-backend {backend} {COMMON} --colocate --offload --save-interval 2 "
    if backend == "hf":
        flags += "--rollout-backend vllm --vllm-enforce-eager --vllm-gpu-memory-utilization 0.05 --weight-sync ipc "
        flags += f"--vllm-kv-cache-memory-bytes {KV_CACHE} --update-weight-buffer-size {16 * MIB}"
    else:
        flags += "--rollout-backend embedded --weight-sync shm"
    kept = ["--save", str(root / "ckpt"), "--save-debug-rollout-data", str(root / "rollout_{rollout_id}.pt")]
    began = time.monotonic()
    done = run(grpo_arguments(tiny, root / "run", *flags.split(), *kept), timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(f"\n{backend}: the run took {time.monotonic() - began:.0f} s")
    return root / "run", root, backend


def test_each_side_frees_its_memory_for_the_other(taken):
    folder, _, backend = taken
    num_parameters = LAYERS * (3 * HIDDEN * 1024 + 3 * HIDDEN * 3072)
    held = 12 * num_parameters  # masters and both moments, in float32
    for row in rows(folder):
        shown = {name: f"{value / 1e9:.2f}" for name, value in row.items() if name.startswith("memory/")}
        seconds = {n: f"{row[f'turns/{n}_seconds']:.3f}" for n in ("sleep", "wake", "offload", "onload")}
        print(f"\n{backend} step {row['step']}: seconds {seconds}, GB {shown}")
        assert row["memory/train/trainer_bytes"] >= held
        for phase in ("rollout", "sync"):
            assert row[f"memory/{phase}/trainer_bytes"] < 0.1 * held
            assert row[f"memory/{phase}/trainer_reserved_bytes"] < 0.2 * held, "other processes do not get it"
    if backend == "megatron":
        return
    log = (folder / "logs/engine-0.log").read_text()
    assert "to fall asleep" in log and "Sleep mode freed" in log
    freed = [float(gb) for gb in re.findall(r"sleep freed ([0-9.]+) GiB memory in total", log)]
    print(f"{backend}: each sleep of the engine freed {freed} GiB")
    assert len(freed) >= 5  # at the start, the first sync, three steps, and for a save those of a parked trainer
    assert all(gb * 2**30 > 0.98 * (KV_CACHE + 2 * num_parameters) for gb in freed)


def test_the_same_rollouts_train_to_the_same_losses_without_turns(taken, tiny):
    folder, root, backend = taken
    flags = f"--train-backend {backend} {COMMON}"
    replayed = ["--load-debug-rollout-data", str(root / "rollout_{rollout_id}.pt")]
    done = run(grpo_arguments(tiny, root / "beside", *flags.split(), *replayed), timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    pairs = list(zip(rows(folder), rows(root / "beside"), strict=True))
    for name in ("rollout/reward_mean", "train/loss", "train/grad_norm", "train/entropy"):
        ours, theirs = ([row[name] for row in part] for part in zip(*pairs, strict=True))
        print(f"\n{backend} {name}: {ours} in turns, {theirs} beside")
        assert name == "train/loss" or any(ours)  # the advantages of a group add up to zero
        assert ours == pytest.approx(theirs, rel=2e-2, abs=2e-4), name
