"""Adapters of gated delta nets, gated attention and gated shared experts (megatron) against those of `hf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from instep.checkpoints.adapter import Lora
from tests.distributed.hf_runs import make_batch
from tests.distributed.lora_runs import HF, LORA, Kind, adapter_of, gradients, make_lora_backend, move, scores, train
from tests.distributed.megatron_layouts import MODELS, random_model
from tests.distributed.test_lora import again_rank, load_rank, save_rank
from tests.distributed.test_lora_experts import of_merged

MEGATRON = True  # what the ranks have imported
ONE: dict[str, Any] = {}
GROUPED = {"moe_grouped_gemm": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SHARED = {"recompute_granularity": "selective", "megatron_overrides": {"recompute_modules": ["shared_experts"]}}
TP2 = {"tensor_model_parallel_size": 2}
SP = {**TP2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
CP2 = {"context_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VIRTUAL = {**PP2, "num_virtual_stages_per_pipeline_rank": 2}
DIST_OPT = {"use_distributed_optimizer": True}
SOME = Lora(4, 12, ("in_proj_z", "in_proj_b", "k_proj", "up_proj"))  # of a fused projection
EXPERTS = Lora(4, 12, ("in_proj_ba", "q_proj", "shared_expert_gate", "experts"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("qwen3-next", "qwen3.5", "qwen3.5-moe"):
        random_model(MODELS[name]).save_pretrained(root / name)
    return root


def _rank(path: Path, lora: Lora, kind: Kind) -> tuple[Any, ...]:
    backend = make_lora_backend(path, lora, kind=kind)
    move(backend)
    moved = {spec.name: weight for spec, weight in backend.weight_source()}, adapter_of(backend)
    log_probs, found = scores(backend, make_batch(0)), gradients(backend)
    if kind == HF:
        backend.optimizer.zero_grad()
    else:
        backend.scale_gradients(0.0)
    return found, log_probs, train(backend, range(3)), adapter_of(backend), moved


def off(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a gradient."""
    assert list(found) == list(expected)
    return max(float((found[name] - wanted).norm() / wanted.norm()) for name, wanted in expected.items())


@pytest.mark.parametrize(
    "model, lora, size, changes",
    [
        ("qwen3-next", LORA, 2, {**SP, **EP2, **GROUPED}),
        ("qwen3-next", LORA, 2, {**VIRTUAL, **FULL}),
        ("qwen3.5", LORA, 2, CP2),
        ("qwen3.5-moe", LORA, 2, {**SP, **DIST_OPT}),
        ("qwen3.5", SOME, 2, TP2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("qwen3.5", LORA, 1, ONE),
                ("qwen3-next", LORA, 1, {**GROUPED, **SHARED}),
                ("qwen3.5-moe", LORA, 2, {**SP, **EP2}),
                ("qwen3.5-moe", LORA, 2, {**PP2, **GROUPED}),
                ("qwen3.5", LORA, 2, TP2),
                ("qwen3.5", LORA, 4, {**SP, **VIRTUAL}),
                ("qwen3.5-moe", LORA, 4, {**SP, **CP2, **EP2}),
            ]
        ),
    ],
    ids=str,
)
def test_log_probs_gradients_and_steps_are_those_of_hf(
    run_ranks: Any, models: Path, model: str, lora: Lora, size: int, changes: dict[str, Any]
):
    found, log_probs, steps, trained, moved = run_ranks(_rank, size, models / model, lora, ("megatron", changes))[0]
    of_hf, expected, steps_of_hf, trained_by_hf, moved_by_hf = run_ranks(_rank, 1, models / model, lora, HF)[0]
    if log_probs is not None:
        torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=2e-5)
    if "use_distributed_optimizer" not in changes:
        assert off(found, of_hf) < 1e-5
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(steps_of_hf), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trained, trained_by_hf, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(moved, moved_by_hf, rtol=1e-6, atol=1e-6)  # merged weights, and the adapter


@pytest.mark.parametrize("size, changes", [(1, GROUPED), (2, {**SP, **EP2})], ids=str)
def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(
    run_ranks: Any, models: Path, tmp_path: Path, size: int, changes: dict[str, Any]
):
    """Also of routed experts, which have no adapter with `hf`."""
    path = models / "qwen3-next"
    found, log_probs, *_, (weights, adapter) = run_ranks(_rank, size, path, EXPERTS, ("megatron", changes))[0]
    expected_log_probs, full = of_merged(path, weights, tmp_path / "merged")
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-5, atol=2e-5)
    expected = {}
    for name in found:
        layer, x = name.removesuffix(".weight").rsplit(".lora_", 1)
        a, b = (adapter[f"base_model.model.{layer}.lora_{y}.weight"] for y in "AB")
        gradient = full[f"{layer}.weight"]
        expected[name] = EXPERTS.scaling * (b.T @ gradient if x == "A" else gradient @ a.T)
    assert sum(".experts." in name for name in found) > len(found) // 2
    assert off(found, expected) < 1e-5


OF_EXPERTS: Kind = ("megatron", {**SP, **EP2})


@pytest.mark.parametrize(
    "size, kind, new_size, new_kind",
    [
        (2, OF_EXPERTS, 1, HF),
        pytest.param(2, HF, 2, ("megatron", VIRTUAL), marks=pytest.mark.slow),
        pytest.param(2, ("megatron", CP2 | DIST_OPT), 2, OF_EXPERTS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_one_backend_writes_goes_on_in_the_other(
    run_ranks: Any, models: Path, tmp_path: Path, size: int, kind: Kind, new_size: int, new_kind: Kind
):
    path, folders = models / "qwen3.5-moe", (tmp_path / "adapter", tmp_path / "again")
    steps, *_, saved = run_ranks(save_rank, size, path, tmp_path / "save", kind)[0]
    loaded_steps, *_, begun = run_ranks(load_rank, new_size, path, tmp_path / "save", new_kind)[0]
    assert all(torch.equal(begun[name], saved[name]) for name in saved)
    torch.testing.assert_close(torch.tensor(loaded_steps), torch.tensor(steps), rtol=1e-5, atol=1e-6)
    ranks = ((size, kind), (new_size, new_kind))
    log_probs, same = (run_ranks(again_rank, n, path, *folders, of_rank)[-1] for n, of_rank in ranks)
    torch.testing.assert_close(same, log_probs, rtol=1e-5, atol=2e-5)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        first, second = ((folder / name).read_bytes() for folder in folders)
        assert first == second
