"""LoRA in the `hf` backend, on one rank and on two, against the gradients of all weights, which plain torch makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from instep.checkpoints.adapter import LAYOUT, Lora, read_adapter
from instep.errors import CheckpointError, ConfigError
from instep.training.hf.lora import adapted
from tests.distributed.helpers import RankPool
from tests.distributed.hf_runs import VOCAB, make_backend, make_batch, make_checkpoint, train, weights_of
from tests.distributed.lora_runs import LORA, adapter_of, gradients, make_lora_backend, move
from tests.distributed.test_hf_backend import oracle_log_probs

Run = Callable[..., list[Any]]
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DELTA = {
    "kind": Qwen3_5TextConfig, "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def run_ranks() -> Iterator[Run]:
    pools = {size: RankPool(size) for size in (1, 2)}
    yield lambda fn, size, *args: pools[size].run(fn, *args)
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hf"), tied=True)


# ---- gradients and steps ---------------------------------------------------------------------------------------------


def _gradients_rank(path, tp):
    backend = make_lora_backend(path, tensor_model_parallel_size=tp)
    move(backend)
    return gradients(backend), weights_of(backend), adapter_of(backend), sum(1 for _ in backend.optimizer.state)


def merged_gradients(path: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of all weights of the merged model, made sample by sample by plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(weights, strict=False)
    batch = make_batch(0)
    log_probs, entropies = (torch.cat(x) for x in oracle_log_probs(model, batch))
    columns = batch.token_columns
    (-(columns["loss_weights"] * (columns["advantages"] * log_probs + 0.01 * entropies)).sum()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


ONE_KEY_HEAD = {"num_key_value_heads": 1}


@pytest.mark.parametrize(
    "world_size, tp, settings",
    [(1, 1, {}), (2, 1, {}), pytest.param(2, 2, {}, marks=pytest.mark.slow), (2, 2, ONE_KEY_HEAD), (2, 1, DELTA)],
)
def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(run_ranks, tmp_path, world_size, tp, settings):
    checkpoint = make_checkpoint(tmp_path, tied=True, **settings)
    found, weights, adapter, num_states = run_ranks(_gradients_rank, world_size, checkpoint, tp)[0]
    full = merged_gradients(checkpoint, weights)
    num_linear = 2 * len(LINEAR) + (settings is DELTA)  # its linear attention has one more
    assert len(found) == 2 * num_linear == num_states  # an optimizer state for A and B of each layer, no other
    for name, gradient in found.items():
        layer, x = name.removesuffix(".weight").rsplit(".lora_", 1)
        a, b = (adapter[f"base_model.model.{layer}.lora_{y}.weight"] for y in "AB")
        expected = b.T @ full[f"{layer}.weight"] if x == "A" else full[f"{layer}.weight"] @ a.T
        tolerance = 2e-5 if settings is DELTA else 1e-5  # exponentials of sums: also transformers itself is off by 1e-5
        assert (gradient - LORA.scaling * expected).norm() <= tolerance * (LORA.scaling * expected).norm(), name


def _trained_rank(path, dtype):
    backend = make_lora_backend(path, dtype=dtype)
    frozen = {n: p.dtype for n, p in backend.policy.model.named_parameters() if not p.requires_grad}
    begun = backend.forward_only([make_batch(0)])[0].log_probs
    steps = train(backend, range(3))
    base = {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in _base(backend).items()}
    return begun, steps, base, frozen, adapter_of(backend)


def _base(backend):
    from instep.training.hf.weights import named_weights

    return {name: weight.detach() for name, weight in named_weights(backend.policy.model).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapter_moves_and_the_base_is_kept_in_the_computing_dtype(run_ranks, checkpoint, dtype):
    begun, steps, base, frozen, adapter = run_ranks(_trained_rank, 2, checkpoint, dtype)[0]
    original = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).state_dict()
    assert set(frozen.values()) == {dtype} and len(frozen) == len(base)
    assert all(torch.equal(weight, original[name]) for name, weight in base.items())
    assert all(t.norm() > 1e-3 for t in adapter.values()), "every B has left 0"
    losses = [loss for loss, _ in steps]
    assert len(set(losses)) == 3
    if dtype is torch.float32:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        with torch.no_grad():
            expected = torch.cat(oracle_log_probs(model, make_batch(0))[0])
        torch.testing.assert_close(begun, expected, rtol=1e-5, atol=1e-5)  # the policy begins as the base
        alone = run_ranks(_trained_rank, 1, checkpoint, dtype)[0]
        torch.testing.assert_close(torch.tensor(alone[1]), torch.tensor(steps), rtol=1e-5, atol=1e-6)


# ---- the reference ---------------------------------------------------------------------------------------------------


def _reference_rank(path, folder):
    batch = make_batch(0)
    backend = make_lora_backend(path)
    base = backend.forward_only([batch])[0].log_probs
    move(backend)
    reference = backend.earlier(path)
    before = reference.forward_only([batch])[0].log_probs
    former = backend.forward_only([batch])[0].log_probs
    backend.export_adapter(folder)
    dist.barrier()
    reference.load_hf(folder)  # as --ref-update-interval does
    train(backend, range(2))
    resumed = backend.earlier(folder)
    trained = backend.forward_only([batch])[0].log_probs
    kept = [r.forward_only([batch])[0].log_probs for r in (reference, resumed)]
    return (
        base,
        before,
        former,
        trained,
        kept,
        backend.forward_only([batch])[0].log_probs,
        backend.earlier(folder / "x"),
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_reference_is_the_model_with_another_adapter_or_none(run_ranks, checkpoint, tmp_path, world_size):
    base, before, former, trained, kept, again, other = run_ranks(
        _reference_rank, world_size, checkpoint, tmp_path / "adapter"
    )[0]
    assert torch.equal(base, before) and not torch.equal(base, former) and not torch.equal(former, trained)
    assert all(torch.equal(log_probs, former) for log_probs in kept)
    assert torch.equal(again, trained), "scoring by the reference leaves the policy as it was"
    assert other is None


# ---- checkpoints and exports -----------------------------------------------------------------------------------------


def _save_rank(path, folder):
    backend = make_lora_backend(path)
    train(backend, range(1))
    if backend.parallel.rank == 0:
        folder.mkdir()
    dist.barrier()
    backend.save(folder)
    return train(backend, range(1, 2)), adapter_of(backend), weights_of(backend)


def _load_rank(path, folder):
    backend = make_lora_backend(path)
    backend.load(folder)
    return train(backend, range(1, 2)), adapter_of(backend), weights_of(backend)


@pytest.mark.parametrize("saved_by, loaded_by", [(2, 2), (2, 1)])
def test_a_saved_run_goes_on_as_if_never_stopped(run_ranks, checkpoint, tmp_path, saved_by, loaded_by):
    steps, adapter, merged = run_ranks(_save_rank, saved_by, checkpoint, tmp_path / "save")[0]
    loaded_steps, loaded, loaded_merged = run_ranks(_load_rank, loaded_by, checkpoint, tmp_path / "save")[0]
    if saved_by == loaded_by:
        assert loaded_steps == steps and all(torch.equal(loaded[name], adapter[name]) for name in adapter)
        assert all(torch.equal(loaded_merged[name], merged[name]) for name in merged)
    torch.testing.assert_close(torch.tensor(loaded_steps), torch.tensor(steps), rtol=1e-5, atol=1e-6)
    held = FileSystemReader(tmp_path / "save").read_metadata().state_dict_metadata
    assert len(held) == 4 * len(adapter) and all(".lora_" in name for name in held), "A, B, and Adam's three; no base"


def _refusals_rank(path, folder, full, other):
    out = []
    for lora in (Lora(8, 12, None), Lora(4, 4, None), Lora(4, 12, ("q_proj", "v_proj"))):
        with pytest.raises(CheckpointError) as error:
            make_lora_backend(path, lora).load(folder)
        out.append(str(error.value))
    attempts = (
        lambda: make_lora_backend(other).load(folder),
        lambda: make_backend(path).load(folder),
        lambda: make_lora_backend(path).load(full),
        lambda: make_lora_backend(path, load=False).load(folder, optimizer=False),
        lambda: make_lora_backend(path, Lora(4, 12, ("q_proj", "wq"))),
    )
    for attempt in attempts:
        with pytest.raises((CheckpointError, ConfigError)) as error:
            attempt()
        out.append(str(error.value))
    base = make_lora_backend(path, load=False)
    base.load(full, optimizer=False)  # a checkpoint of all weights is a base
    return out, base.forward_only([make_batch(0)])[0].log_probs


def _full_rank(path, folder):
    backend = make_backend(path)
    folder.mkdir()
    backend.save(folder)
    return backend.forward_only([make_batch(0)])[0].log_probs


def test_what_does_not_belong_together_is_refused_by_name(run_ranks, checkpoint, tmp_path):
    run_ranks(_save_rank, 1, checkpoint, tmp_path / "save")
    expected = run_ranks(_full_rank, 1, checkpoint, tmp_path / "full")[0]
    other = make_checkpoint(tmp_path / "other", tied=True)
    model = AutoModelForCausalLM.from_pretrained(other)
    model.model.norm.weight.data[3] += 1e-3
    model.save_pretrained(other)
    places = (checkpoint, tmp_path / "save", tmp_path / "full", other)
    found, base = run_ranks(_refusals_rank, 1, *places)[0]
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
    assert torch.equal(base, expected)


def _export_rank(path, folder):
    backend = make_lora_backend(path, Lora(4, 12, ("q_proj", "down_proj")))
    move(backend)
    backend.export_adapter(folder)
    dist.barrier()
    return weights_of(backend), backend.forward_only([make_batch(0)])[0].log_probs, len(adapted(backend.policy.model))


@pytest.mark.parametrize("world_size", [1, 2])
def test_merged_weights_and_the_exported_adapter_compute_what_the_policy_computes(
    run_ranks, checkpoint, tmp_path, world_size
):
    weights, log_probs, num = run_ranks(_export_rank, world_size, checkpoint, tmp_path / "adapter")[0]
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
