"""The `hf` backend on one rank and on two (FSDP2) against plain transformers and torch, written independently here."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config

from instep.training.hf.backend import HfBackend
from tests.distributed.helpers import RankPool
from tests.distributed.hf_runs import (
    ARGS,
    VOCAB,
    loss_fn,
    make_backend,
    make_batch,
    micro_batches,
    oracle_log_probs,
    oracle_training,
    train,
    weights_of,
)

# --- tests --------------------------------------------------------------------------------------------------------


def _log_probs_rank(path):
    backend = make_backend(path)
    batch = make_batch(0)
    return backend.forward_only(micro_batches(batch, 0, 1), entropy=True), backend.forward_only([batch])[0].log_probs


def test_log_probs_equal_unpacked_transformers(run_ranks, checkpoint):
    outputs, whole = run_ranks(_log_probs_rank, 1, checkpoint)[0]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        log_probs, entropies = (torch.cat(x) for x in oracle_log_probs(model, make_batch(0)))
    assert log_probs.std() > 0.5
    torch.testing.assert_close(torch.cat([o.log_probs for o in outputs]), log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([o.entropy for o in outputs]), entropies, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole, log_probs, rtol=1e-5, atol=1e-5)


def _chunked_rank(path):
    from instep.training.hf import model

    results = []
    whole = model._LOGIT_ELEMENTS
    for elements in (VOCAB * 7, whole):
        model._LOGIT_ELEMENTS = elements
        backend = make_backend(path, recompute_granularity="full" if elements < whole else None)
        loss = backend.forward_backward([make_batch(0)], loss_fn)[0].loss
        results.append((loss, [p.grad.clone() for p in backend.policy.parameters()]))
    return results


def test_chunks_of_logits_and_recomputation_change_nothing(run_ranks, tied_checkpoint):
    (chunked_loss, chunked_grads), (loss, grads) = run_ranks(_chunked_rank, 1, tied_checkpoint)[0]
    torch.testing.assert_close(chunked_loss, loss, rtol=1e-6, atol=1e-6)
    for grad, chunked in zip(grads, chunked_grads, strict=True):
        torch.testing.assert_close(chunked, grad, rtol=1e-4, atol=1e-6)


def _train_rank(path, recompute):
    backend = make_backend(path, recompute_granularity=recompute)
    return train(backend, range(3)), weights_of(backend)


@pytest.mark.parametrize(
    "world_size, recompute", [(1, None), (2, None), pytest.param(2, "full", marks=pytest.mark.slow)]
)
def test_three_steps_equal_plain_transformers_and_adamw(run_ranks, checkpoint, world_size, recompute):
    expected_steps, expected = oracle_training(checkpoint)
    assert expected_steps[0][1] > ARGS.clip_grad, "the test is to clip"
    results = run_ranks(_train_rank, world_size, checkpoint, recompute)
    for steps, _ in results:
        torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected_steps), rtol=1e-5, atol=0)
    weights = results[0][1]
    assert weights.keys() == expected.keys() and all(w is None for _, w in results[1:])
    for name, weight in expected.items():
        assert (weights[name] - weight).norm() <= 1e-5 * weight.norm(), name


def _skip_rank(path):
    backend = make_backend(path)
    before = weights_of(backend)
    batch = make_batch(0)
    batch.token_columns["loss_weights"][0] = torch.inf if backend.parallel.rank == 0 else 1.0
    backend.forward_backward([batch], loss_fn)
    result = backend.optimizer_step(1e-3)
    return result.skipped, before, weights_of(backend), train(backend, range(1))


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(run_ranks, tied_checkpoint):
    results = run_ranks(_skip_rank, 2, tied_checkpoint)
    assert all(skipped for skipped, *_ in results)
    _, before, after, next_step = results[0]
    assert all(torch.equal(before[name], after[name]) for name in before)
    torch.testing.assert_close(
        torch.tensor(next_step), torch.tensor(oracle_training(tied_checkpoint)[0][:1]), rtol=1e-5, atol=0
    )


def _save_rank(path, folder):
    backend = make_backend(path)
    train(backend, range(1))
    if backend.parallel.rank == 0:
        folder.mkdir()
    dist.barrier()
    backend.save(folder)
    return train(backend, range(1, 2)), weights_of(backend)


def _load_rank(path, folder):
    backend = make_backend(path, load=False)
    backend.load(folder)
    return train(backend, range(1, 2)), weights_of(backend)


@pytest.mark.parametrize("saved_by, loaded_by", [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_a_saved_run_goes_on_as_if_never_stopped(run_ranks, tied_checkpoint, tmp_path, saved_by, loaded_by):
    steps, weights = run_ranks(_save_rank, saved_by, tied_checkpoint, tmp_path / "save")[0]
    loaded_steps, loaded = run_ranks(_load_rank, loaded_by, tied_checkpoint, tmp_path / "save")[0]
    if saved_by == loaded_by:
        assert loaded_steps == steps and all(torch.equal(loaded[name], weights[name]) for name in weights)
    torch.testing.assert_close(torch.tensor(loaded_steps), torch.tensor(steps), rtol=1e-5, atol=0)
    for name, weight in weights.items():
        assert (loaded[name] - weight).norm() <= 1e-5 * weight.norm(), name


def _bf16_rank(path):
    args, config = ARGS, AutoConfig.from_pretrained(path)
    backend = HfBackend(args, hf_config=config, device=torch.device("cpu"), dtype=torch.bfloat16)
    backend.load_hf(path)
    log_probs = backend.forward_only([make_batch(0)])[0].log_probs
    close = []
    for temperature in (0.7, 0.69921875):  # the same in bfloat16
        batch = make_batch(0)
        batch.sample_columns["temperature"] = torch.full((batch.num_samples,), temperature)
        close.append(backend.forward_only([batch])[0].log_probs)
    assert not torch.equal(*close)
    steps = train(backend, range(3))
    return log_probs, steps, {p.dtype for p in backend.policy.parameters()}, weights_of(backend)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bfloat16_computes_in_bf16_over_fp32_masters(run_ranks, tied_checkpoint, world_size):
    log_probs, steps, stored, weights = run_ranks(_bf16_rank, world_size, tied_checkpoint)[0]
    model = AutoModelForCausalLM.from_pretrained(tied_checkpoint, dtype=torch.float32)
    with torch.no_grad():
        exact = torch.cat(oracle_log_probs(model, make_batch(0))[0])
    assert 1e-4 < (log_probs - exact).abs().mean() < 0.05 and log_probs.dtype is torch.float32
    torch.testing.assert_close(
        torch.tensor(steps), torch.tensor(oracle_training(tied_checkpoint)[0]), rtol=0.1, atol=0.02
    )
    assert stored == {torch.float32} and {w.dtype for w in weights.values()} == {torch.bfloat16}


def _remark_rank(configs):
    remarks = []
    for config in configs:
        backend = HfBackend(ARGS, hf_config=config, device=torch.device("cpu"), dtype=torch.float32)
        for p in backend.policy.parameters():
            torch.nn.init.normal_(p, std=0.3)
        remarks.append(backend.remark())
    return remarks


def test_what_cannot_be_run_packed_is_padded_and_said_so(run_ranks):
    from transformers import CohereConfig, LlamaConfig, MambaConfig, Qwen2Config, Qwen3Config

    small = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    configs = [kind(**small, num_key_value_heads=2) for kind in (Qwen3Config, Qwen2Config, LlamaConfig)]
    configs += [CohereConfig(**small, logit_scale=0.25), Gemma2Config(**small, num_key_value_heads=2, head_dim=8)]
    configs += [MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)]
    remarks = run_ranks(_remark_rank, 1, configs)[0]
    assert remarks[:4] == [""] * 4
    assert remarks[4:] == [
        "Gemma2ForCausalLM is trained padded, which is slower: its attention caps scores (softcap 50.0)",
        "MambaForCausalLM is trained padded, which is slower: a segment's hidden states depend on other segments",
    ]


def _cuda_rank(path, folder):
    device = torch.device("cuda", torch.cuda.current_device())
    config = AutoConfig.from_pretrained(path)
    backend = HfBackend(ARGS, hf_config=config, device=device, dtype=torch.bfloat16)
    backend.load_hf(path)
    log_probs = backend.forward_only([make_batch(0)])[0].log_probs
    steps = train(backend, range(1))
    before = torch.cuda.memory_allocated()
    backend.offload()
    while_off = torch.cuda.memory_allocated()
    backend.onload()
    if backend.parallel.rank == 0:
        folder.mkdir()
    dist.barrier()
    backend.save(folder)
    steps += train(backend, range(1, 3))
    again = HfBackend(ARGS, hf_config=config, device=device, dtype=torch.bfloat16)
    again.load(folder)
    held = 3 * 4 * sum(p.numel() for p in backend.policy.parameters()) / backend.parallel.world_size
    return log_probs, steps, train(again, range(1, 3)), before - while_off, held


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2])
def test_on_gpus_in_bfloat16(tied_checkpoint, tmp_path, world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    with RankPool(world_size, cuda=True) as pool:
        log_probs, steps, loaded_steps, freed, held = pool.run(_cuda_rank, tied_checkpoint, tmp_path / "save")[0]
    model = AutoModelForCausalLM.from_pretrained(tied_checkpoint, dtype=torch.float32)
    with torch.no_grad():
        exact = torch.cat(oracle_log_probs(model, make_batch(0))[0])
    assert 1e-4 < (log_probs - exact).abs().mean() < 0.05
    expected = torch.tensor(oracle_training(tied_checkpoint)[0])
    torch.testing.assert_close(torch.tensor(steps), expected, rtol=0.1, atol=0.02)
    torch.testing.assert_close(torch.tensor(loaded_steps), torch.tensor(steps[1:]), rtol=1e-3, atol=1e-4)
    assert freed >= 0.95 * held  # masters and both moments
