"""Adapters of experts, shared experts and latent attention (megatron) against the gradients of all weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from instep.checkpoints.adapter import Lora
from instep.errors import ConfigError
from instep.models.checkpoint_names import CheckpointNames
from tests.distributed.hf_runs import make_batch, oracle_log_probs, weights_of
from tests.distributed.lora_runs import HF, LORA, Kind, adapter_of, gradients, make_lora_backend, move, scores, train
from tests.distributed.megatron_layouts import MODELS, random_model

MEGATRON = True  # what the ranks have imported
MIXED = Lora(4, 12, ("q_proj", "down_proj", "experts"))
EXPERTS = Lora(4, 12, ("o_proj", "v_proj", "experts"))
LATENT = Lora(4, 12, ("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "up_proj", "o_proj", "experts"))
ONE: dict[str, Any] = {}
GROUPED = {"moe_grouped_gemm": True}
ACT = {"recompute_granularity": "selective", "megatron_overrides": {"recompute_modules": ["moe_act"]}}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EP2 = {"expert_model_parallel_size": 2}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ETP1 = {"expert_tensor_parallel_size": 1}
ETP2 = {"expert_tensor_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("moe", "moe-mixed", "deepseek", "qwen3-next", "qwen3.5", "qwen3.5-moe"):
        random_model(MODELS[name]).save_pretrained(root / name)
    return root


def _rank(path: Path, lora: Lora, kind: Kind) -> tuple[Any, ...]:
    backend = make_lora_backend(path, lora, kind=kind)
    move(backend)
    found = gradients(backend), weights_of(backend), adapter_of(backend), scores(backend, make_batch(0))
    backend.scale_gradients(0.0)
    return *found, train(backend, range(3)), adapter_of(backend)


def of_merged(path: Path, weights: dict[str, torch.Tensor], folder: Path) -> tuple[torch.Tensor, dict[str, Any]]:
    """The log-probs of the merged model, and the gradients of all its weights by the names of a checkpoint."""
    folder.mkdir()
    shutil.copy(path / "config.json", folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    batch = make_batch(0)
    log_probs, entropies = (torch.cat(x) for x in oracle_log_probs(model, batch))
    columns = batch.token_columns
    (-(columns["loss_weights"] * (columns["advantages"] * log_probs + 0.01 * entropies)).sum()).backward()
    names, grads = CheckpointNames(model), {n: p.grad for n, p in model.named_parameters()}
    trained = [group for group in names.groups if group.model[0] in grads]
    found = {
        name: gradient
        for group in trained
        for name, gradient in zip(group.checkpoint, names.to_checkpoint(group, grads), strict=True)
    }
    return log_probs.detach(), found


@pytest.mark.parametrize(
    "model, lora, size, changes",
    [
        ("moe-mixed", MIXED, 1, ONE),
        ("moe-mixed", MIXED, 1, {**GROUPED, **ACT}),
        ("moe-mixed", MIXED, 2, {**GROUPED, **EP2, "use_distributed_optimizer": True}),
        ("moe", EXPERTS, 2, {**SP, **ETP2}),
        ("moe", EXPERTS, 2, {**SP, **ETP2, **GROUPED, **FULL}),
        ("moe", EXPERTS, 2, ETP2),
        ("moe", EXPERTS, 2, {**SP, **ETP1, **EP2, **GROUPED}),
        ("moe", EXPERTS, 2, {**SP, **ETP1}),
        ("moe-mixed", MIXED, 2, PP2),
        ("deepseek", LATENT, 1, GROUPED),
        ("deepseek", LATENT, 2, {**SP, **ETP1, **EP2}),
        pytest.param("deepseek", LATENT, 4, {**SP, **ETP2, **EP2}, marks=pytest.mark.slow),
        pytest.param("moe", EXPERTS, 4, {**SP, **ETP2, "use_distributed_optimizer": True}, marks=pytest.mark.slow),
        pytest.param("moe", EXPERTS, 2, {"context_parallel_size": 2, **EP2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(
    run_ranks: Any, models: Path, tmp_path: Path, model: str, lora: Lora, size: int, changes: dict[str, Any]
):
    path = models / model
    found, weights, adapter, log_probs, steps, trained = run_ranks(_rank, size, path, lora, ("megatron", changes))[0]
    expected_log_probs, full = of_merged(path, weights, tmp_path / "merged")
    if log_probs is not None:
        torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-5, atol=1e-5)
    assert sum(".experts." in name for name in found) > len(found) // 2
    if not changes.get("use_distributed_optimizer"):
        for name, gradient in found.items():
            layer, x = name.removesuffix(".weight").rsplit(".lora_", 1)
            a, b = (adapter[f"base_model.model.{layer}.lora_{y}.weight"] for y in "AB")
            expected = b.T @ full[f"{layer}.weight"] if x == "A" else full[f"{layer}.weight"] @ a.T
            torch.testing.assert_close(gradient, LORA.scaling * expected, rtol=1e-4, atol=2e-6)
            assert (gradient - LORA.scaling * expected).norm() <= 1e-5 * max(1e-2, (3 * expected).norm()), name
    one = run_ranks(_rank, 1, path, lora, ("megatron", ONE))[0]
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(one[4]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trained, one[5], rtol=1e-4, atol=2e-5)


def _begun(path: Path, lora: Lora | None, kind: Kind) -> Any:
    backend = make_lora_backend(path, lora, kind=kind)
    return None if lora is None else adapter_of(backend)


@pytest.mark.parametrize("model", ["moe-mixed", "deepseek", "qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_without_targets_both_backends_have_the_same_adapter(run_ranks: Any, models: Path, model: str):
    ours, of_hf = (run_ranks(_begun, 1, models / model, LORA, kind)[0] for kind in (("megatron", {}), HF))
    assert list(ours) == list(of_hf) and all(torch.equal(ours[name], of_hf[name]) for name in ours)
    assert not any(".experts." in name or "kv_b_proj" in name for name in ours)


def _refused(path: Path, lora: Lora, kind: Kind) -> str:
    with pytest.raises(ConfigError) as error:
        make_lora_backend(path, lora, kind=kind)
    return str(error.value)


@pytest.mark.parametrize(
    "kind, target, words",
    [
        (HF, "experts", "no linear layer 'experts'"),
        (("megatron", {}), "experts", "no experts"),
        (("megatron", {}), "c_attn", "no linear layer 'c_attn'"),
        (
            ("megatron", PP2),
            "layers.1.mlp.up_proj",
            "pipeline stage 0, or one of its virtual stages, has no layer with an adapter",
        ),
    ],
)
def test_what_has_no_adapter_is_refused_by_name(run_ranks: Any, tmp_path: Path, kind: Kind, target: str, words: str):
    random_model(MODELS["tied"]).save_pretrained(tmp_path)
    size = kind[1].get("pipeline_model_parallel_size", 1)
    messages = run_ranks(_refused, size, tmp_path, Lora(4, 12, (target,)), kind)
    assert all(words in message and "--lora-target-modules" in message for message in messages), messages
