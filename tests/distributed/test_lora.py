"""LoRA in both backends, on one rank and on two, against the gradients of all weights, which plain torch makes."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from instep.checkpoints.adapter import LAYOUT, Lora, read_adapter
from instep.errors import CheckpointError, ConfigError
from tests.distributed.hf_runs import VOCAB, make_batch, make_checkpoint, weights_of
from tests.distributed.lora_runs import (
    DIST_OPT,
    HF,
    LORA,
    PP2,
    TP2,
    TP2_SP,
    adapter_of,
    gradients,
    make_lora_backend,
    move,
    num_states,
    scores,
    train,
)
from tests.distributed.test_hf_backend import oracle_log_probs

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DELTA = {
    "kind": Qwen3_5TextConfig, "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hf"), tied=True)


# ---- gradients and steps ---------------------------------------------------------------------------------------------


HF_TP2 = ("hf", TP2[1])
EIGHT_BITS = ("megatron", {**DIST_OPT[1], "optimizer": "adamw_8bit"})
VIRTUAL = ("megatron", {**PP2[1], "num_virtual_stages_per_pipeline_rank": 2})


def _gradients_rank(path, kind):
    backend = make_lora_backend(path, kind=kind)
    begun = adapter_of(backend)
    move(backend)
    return gradients(backend), weights_of(backend), adapter_of(backend), num_states(backend), begun


def merged_gradients(path: Path, weights: dict[str, torch.Tensor], monkeypatch) -> dict[str, torch.Tensor]:
    """The gradients of all weights of the merged model, made sample by sample by plain transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(weights, strict=False)
    model, columns = model.double(), (batch := make_batch(0)).token_columns
    with (
        monkeypatch.context() as patch
    ):  # transformers computes norms and the delta rule in float32, which is off by 5e-5
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        log_probs, entropies = (torch.cat(x) for x in oracle_log_probs(model, batch))
        (-(columns["loss_weights"] * (columns["advantages"] * log_probs + 0.01 * entropies)).sum()).backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


ONE_KEY_HEAD = {"num_key_value_heads": 1}


@pytest.mark.parametrize(
    "world_size, kind, settings",
    [
        (1, HF, {}),
        (2, HF, {}),
        (2, HF, DELTA),
        pytest.param(2, HF_TP2, {}, marks=pytest.mark.slow),
        (2, HF_TP2, ONE_KEY_HEAD),
        (1, ("megatron", {}), {}),
        (2, TP2, {}),
        (2, TP2_SP, {}),
        (2, PP2, {}),
        (2, VIRTUAL, {"num_hidden_layers": 4}),
        pytest.param(2, ("megatron", {}), {}, marks=pytest.mark.slow),
        pytest.param(4, ("megatron", {**TP2_SP[1], **VIRTUAL[1]}), {"num_hidden_layers": 4}, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(
    run_ranks, tmp_path, monkeypatch, world_size, kind, settings
):
    checkpoint = make_checkpoint(tmp_path, tied=True, **settings)
    found, weights, adapter, num, begun = run_ranks(_gradients_rank, world_size, checkpoint, kind)[0]
    full = merged_gradients(checkpoint, weights, monkeypatch)
    num_linear = settings.get("num_hidden_layers", 2) * len(LINEAR) + (settings is DELTA)  # linear attention has 8
    stages = kind[1].get("pipeline_model_parallel_size", 1)
    assert len(found) == 2 * num_linear == num * stages  # states of A and B, no others
    for name, gradient in found.items():
        layer, x = name.removesuffix(".weight").rsplit(".lora_", 1)
        a, b = (adapter[f"base_model.model.{layer}.lora_{y}.weight"] for y in "AB")
        expected = b.T @ full[f"{layer}.weight"] if x == "A" else full[f"{layer}.weight"] @ a.T
        tolerance = 2e-5 if settings is DELTA else 1e-5  # exponentials of sums
        assert (gradient - LORA.scaling * expected).norm() <= tolerance * (LORA.scaling * expected).norm(), name
    if kind != HF:
        of_hf = run_ranks(_gradients_rank, 1, checkpoint, HF)[0][-1]
        assert list(of_hf) == list(begun) and all(torch.equal(begun[name], of_hf[name]) for name in begun)


def _trained_rank(path, dtype, kind):
    backend = make_lora_backend(path, dtype=dtype, kind=kind)
    modules = backend.chunks if kind[0] == "megatron" else [backend.policy.model]
    frozen = [p.dtype for module in modules for p in module.parameters() if not p.requires_grad]
    begun = scores(backend, make_batch(0))
    steps = train(backend, range(3))
    return begun, steps, _base(backend), frozen, adapter_of(backend)


def _base(backend):
    from instep.training.hf.weights import named_weights

    if not hasattr(backend, "adapter"):
        base = {name: weight.detach() for name, weight in named_weights(backend.policy.model).items()}
        return {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in base.items()}
    adapter, backend.adapter = backend.adapter, None
    base = weights_of(backend)
    backend.adapter = adapter
    return base


@pytest.mark.parametrize("kind", [HF, DIST_OPT, TP2_SP], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapter_moves_and_the_base_is_kept_in_the_computing_dtype(run_ranks, checkpoint, dtype, kind):
    begun, steps, base, frozen, adapter = run_ranks(_trained_rank, 2, checkpoint, dtype, kind)[0]
    original = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).state_dict()
    assert set(frozen) == {dtype} and len(frozen) == (len(base) if kind == HF else 2 + 2 * 8)
    assert all(torch.equal(weight, original[name]) for name, weight in base.items())
    assert all(t.norm() > 1e-3 for t in adapter.values()), "every B has left 0"
    losses = [loss for loss, _ in steps]
    assert len(set(losses)) == 3
    alone = run_ranks(_trained_rank, 1, checkpoint, dtype, HF)[0]
    if dtype is torch.bfloat16:
        torch.testing.assert_close(torch.tensor(steps), torch.tensor(alone[1]), rtol=0.05, atol=0.01)
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        with torch.no_grad():
            expected = torch.cat(oracle_log_probs(model, make_batch(0))[0])
        torch.testing.assert_close(begun, expected, rtol=1e-5, atol=1e-5)  # the policy begins as the base
        torch.testing.assert_close(torch.tensor(alone[1]), torch.tensor(steps), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(adapter, alone[-1], rtol=1e-4, atol=1e-5)


# ---- the reference ---------------------------------------------------------------------------------------------------


def _reference_rank(path, folder, kind):
    batch = make_batch(0)
    backend = make_lora_backend(path, kind=kind)
    base = scores(backend, batch)
    move(backend)
    reference = backend.earlier(path)
    before = scores(reference, batch)
    former = scores(backend, batch)
    backend.export_adapter(folder)
    dist.barrier()
    reference.load_hf(folder)  # as --ref-update-interval does
    train(backend, range(2))
    resumed = backend.earlier(folder)
    trained = scores(backend, batch)
    kept = [scores(r, batch) for r in (reference, resumed)]
    return base, before, former, trained, kept, scores(backend, batch), backend.earlier(folder / "x")


@pytest.mark.parametrize("world_size, kind", [(1, HF), (2, HF), (2, TP2_SP), (2, PP2), (2, DIST_OPT)], ids=str)
def test_the_reference_is_the_model_with_another_adapter_or_none(run_ranks, checkpoint, tmp_path, world_size, kind):
    base, before, former, trained, kept, again, other = run_ranks(
        _reference_rank, world_size, checkpoint, tmp_path / "adapter", kind
    )[-1]
    assert torch.equal(base, before) and not torch.equal(base, former) and not torch.equal(former, trained)
    assert all(torch.equal(log_probs, former) for log_probs in kept)
    assert torch.equal(again, trained), "scoring by the reference leaves the policy as it was"
    assert other is None


# ---- checkpoints and exports -----------------------------------------------------------------------------------------


def save_rank(path, folder, kind):
    backend = make_lora_backend(path, kind=kind)
    train(backend, range(1))
    if backend.parallel.rank == 0:
        folder.mkdir()
    dist.barrier()
    backend.save(folder)
    saved = adapter_of(backend)
    return train(backend, range(1, 2)), adapter_of(backend), weights_of(backend), saved


def load_rank(path, folder, kind):
    backend = make_lora_backend(path, kind=kind)
    backend.load(folder)
    loaded = adapter_of(backend)
    return train(backend, range(1, 2)), adapter_of(backend), weights_of(backend), loaded


@pytest.mark.parametrize(
    "saved_by, loaded_by",
    [
        ((2, HF), (2, HF)),
        ((2, HF), (1, HF)),
        ((2, TP2_SP), (2, TP2_SP)),
        ((2, DIST_OPT), (2, DIST_OPT)),
        ((2, PP2), (1, HF)),
        ((2, DIST_OPT), (2, TP2)),
        ((2, HF), (2, DIST_OPT)),
        ((2, EIGHT_BITS), (2, TP2_SP)),
    ],
    ids=str,
)
def test_a_saved_run_goes_on_as_if_never_stopped(run_ranks, checkpoint, tmp_path, saved_by, loaded_by):
    (size, kind), (new_size, new_kind) = saved_by, loaded_by
    steps, adapter, merged, saved = run_ranks(save_rank, size, checkpoint, tmp_path / "save", kind)[0]
    loaded_steps, loaded, loaded_merged, begun = run_ranks(
        load_rank, new_size, checkpoint, tmp_path / "save", new_kind
    )[0]
    assert all(torch.equal(begun[name], saved[name]) for name in saved)
    if saved_by == loaded_by:
        assert loaded_steps == steps and all(torch.equal(loaded[name], adapter[name]) for name in adapter)
        assert all(torch.equal(loaded_merged[name], merged[name]) for name in merged)
    torch.testing.assert_close(torch.tensor(loaded_steps), torch.tensor(steps), rtol=1e-5, atol=1e-6)
    held = FileSystemReader(tmp_path / "save").read_metadata().state_dict_metadata
    assert len(held) == 4 * len(adapter) and all(".lora_" in name for name in held), "A, B, and Adam's three; no base"


def _refusals_rank(path, folder, full, other, kind):
    make = functools.partial(make_lora_backend, kind=kind)
    out = []
    for lora in (Lora(8, 12, None), Lora(4, 4, None), Lora(4, 12, ("q_proj", "v_proj"))):
        with pytest.raises(CheckpointError) as error:
            make(path, lora).load(folder)
        out.append(str(error.value))
    attempts = (
        lambda: make(other).load(folder),
        lambda: make(path, None).load(folder),
        lambda: make(path).load(full),
        lambda: make(path, load=False).load(folder, optimizer=False),
        lambda: make(path, Lora(4, 12, ("q_proj", "wq"))),
    )
    for attempt in attempts:
        with pytest.raises((CheckpointError, ConfigError)) as error:
            attempt()
        out.append(str(error.value))
    base = make(path, load=False)
    base.load(full, optimizer=False)  # a checkpoint of all weights is a base
    return out, scores(base, make_batch(0)), base.earlier(full) is not None


def _full_rank(path, folder, kind):
    backend = make_lora_backend(path, None, kind=kind)
    folder.mkdir()
    backend.save(folder)
    return scores(backend, make_batch(0))


@pytest.mark.parametrize("kind", [HF, ("megatron", {}), ("megatron", {"ckpt_format": "torch"})], ids=str)
def test_what_does_not_belong_together_is_refused_by_name(run_ranks, checkpoint, tmp_path, kind):
    run_ranks(save_rank, 1, checkpoint, tmp_path / "save", kind)
    expected = run_ranks(_full_rank, 1, checkpoint, tmp_path / "full", kind)[0]
    other = make_checkpoint(tmp_path / "other", tied=True)
    model = AutoModelForCausalLM.from_pretrained(other)
    model.model.norm.weight.data[3] += 1e-3
    model.save_pretrained(other)
    places = (checkpoint, tmp_path / "save", tmp_path / "full", other)
    found, base, is_base = run_ranks(_refusals_rank, 1, *places, kind)[0]
    for message, words in zip(
        found,
        (
            ("rank 4 there, 8 here", "--lora-rank"),
            ("alpha 12 there, 4 here", "--lora-alpha"),
            ("modules 14 there, 4 here", "--lora-target-modules"),
            ("another base", str(checkpoint), "--hf-checkpoint"),
            ("only a LoRA adapter of", "--save-hf"),
            ("no adapter", "--ref-load"),
            ("only a LoRA adapter", "--save-hf"),
            ("no linear layer", "'wq'", "q_proj", "--lora-target-modules"),
        ),
        strict=True,
    ):
        assert all(word in message for word in words), message
    assert torch.equal(base, expected) and is_base


def _export_rank(path, folder, kind):
    backend = make_lora_backend(path, Lora(4, 12, ("q_proj", "down_proj")), kind=kind)
    move(backend)
    backend.export_adapter(folder)
    dist.barrier()
    return weights_of(backend), scores(backend, make_batch(0)), len(adapter_of(backend)) // 2


@pytest.mark.parametrize("world_size, kind", [(1, HF), (2, HF), (2, TP2), (2, TP2_SP)], ids=str)
def test_merged_weights_and_the_exported_adapter_compute_what_the_policy_computes(
    run_ranks, checkpoint, tmp_path, world_size, kind
):
    weights, log_probs, num = run_ranks(_export_rank, world_size, checkpoint, tmp_path / "adapter", kind)[0]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    base = {name: w.clone() for name, w in model.state_dict().items()}
    assert num == 4 and not model.load_state_dict(weights, strict=False).unexpected_keys

    def computed():
        with torch.no_grad():
            return torch.cat(oracle_log_probs(model, make_batch(0))[0])

    torch.testing.assert_close(computed(), log_probs, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 12, ["q_proj", "down_proj"])
    tensors = read_adapter(tmp_path / "adapter")
    assert {t.dtype for t in tensors.values()} == {torch.float32} and len(tensors) == 2 * num
    model.load_state_dict(base)
    with torch.no_grad():
        for name, a in ((n, t) for n, t in tensors.items() if n.endswith(".lora_A.weight")):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            model.get_submodule(layer).weight += config["lora_alpha"] / config["r"] * b @ a
    torch.testing.assert_close(computed(), log_probs, rtol=1e-5, atol=1e-5)
    assert model.get_output_embeddings().weight.shape[0] == VOCAB
    assert not (tmp_path / "adapter" / LAYOUT).exists()


def again_rank(path, folder, again, kind):
    """Score with the adapter in `folder`, and export it again."""
    backend = make_lora_backend(path, kind=kind)
    if not folder.exists():
        move(backend)
        backend.export_adapter(folder)
        return scores(backend, make_batch(0))
    reference = backend.earlier(folder)
    with reference._swapped():
        backend.export_adapter(again)
    return scores(reference, make_batch(0))


@pytest.mark.parametrize("size, kind, new_size, new_kind", [(1, HF, 2, TP2_SP), (2, PP2, 1, HF)], ids=str)
def test_a_folder_of_one_backend_is_the_same_in_the_other(
    run_ranks, checkpoint, tmp_path, size, kind, new_size, new_kind
):
    places = checkpoint, tmp_path / "adapter", tmp_path / "again"
    log_probs, same = (run_ranks(again_rank, n, *places, k)[-1] for n, k in ((size, kind), (new_size, new_kind)))
    torch.testing.assert_close(same, log_probs, rtol=1e-5, atol=1e-5)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "adapter" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def _mlp_gradients_rank(path, kind):
    backend = make_lora_backend(path, replace(LORA, targets=("down_proj",)), kind=kind)
    move(backend)
    return gradients(backend)


def test_an_adapter_of_recomputed_mlps_has_the_gradients_of_kept_ones(run_ranks, checkpoint):
    """The embedding is frozen, and a re-entrant checkpoint needs an input with a gradient."""
    again = {"recompute_granularity": "selective", "megatron_overrides": {"recompute_modules": ["mlp"]}}
    kept, computed = (run_ranks(_mlp_gradients_rank, 1, checkpoint, ("megatron", flags))[0] for flags in ({}, again))
    assert all(gradient.norm() > 0 for gradient in kept.values())
    assert kept.keys() == computed.keys() and all(torch.equal(kept[name], computed[name]) for name in kept)
