"""bf16 ranks of `hf` that compute with a model of their own: on one rank it gives the bits of FSDP2."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig

from instep.training.backend import LossOutput
from instep.training.hf import backend as hf
from instep.training.hf.mirror import Mirror
from instep.training.hf.own_copy import has_room
from instep.training.hf.shards import local
from tests.distributed.hf_runs import ARGS, LRS, loss_fn, make_batch, micro_batches, train, weights_of
from tests.distributed.lora_runs import gradients, make_lora_backend, move
from tests.distributed.test_selection import FREEZE


def value_loss(batch, outputs) -> LossOutput:
    return LossOutput((batch.token_columns["loss_weights"] * (outputs.values - 1).square()).sum())


def make(path, copies: bool, role: str = "actor", **kw) -> hf.HfBackend:
    hf.has_room = lambda *_: copies
    try:
        config = AutoConfig.from_pretrained(path)
        made = hf.HfBackend(
            SimpleNamespace(**{**vars(ARGS), **kw}), hf_config=config, device=torch.device("cpu"), dtype=torch.bfloat16,
            role=role, selection=FREEZE if role == "selected" else None,
        )  # fmt: skip
    finally:
        hf.has_room = has_room
    assert any(isinstance(m, FSDPModule) for m in made._compute.modules()) != copies
    if copies:  # as FSDP2 casts parameters and no buffers
        buffers = dict(made.policy.named_buffers())
        assert buffers and all(buffer is buffers[n] for n, buffer in made._compute.named_buffers())
        assert {p.dtype for p in made._compute.parameters()} == {torch.bfloat16}
    return made


def _rank(path, folder, role):
    """Two steps, the first of which was begun early; scores and weights in between; what the other kind makes of it."""
    results, writes, gathered = [], [], Mirror._gathered
    Mirror._gathered = lambda self, cut: writes.append(1) or gathered(self, cut)
    critic, score = role == "critic", make_batch(7)
    loss = value_loss if critic else loss_fn
    name = "values" if critic else "log_probs"
    try:
        for copies in (False, True):
            backend, found = make(path, copies, role), []
            backend.load_hf(path)
            place = folder / f"{role}-{copies}"
            for step in range(2):
                parts = micro_batches(make_batch(step), 0, 1) + micro_batches(make_batch(step + 10), 0, 1)
                if step == 0:
                    backend.forward_backward(parts[1:], loss)
                    backend.scale_gradients(0)  # a group has gone
                    found += backend.forward_backward(parts[:3], loss)
                    backend.scale_gradients(0.5)
                    parts = parts[3:]
                found += [r.loss for r in backend.forward_backward(parts, loss)]
                found += [backend.optimizer_step(LRS[step]).grad_norm]
                found += [getattr(backend.forward_only([score])[0], name), weights_of(backend)]
            place.mkdir()
            backend.save(place)
            results.append([r.loss if isinstance(r, LossOutput) else r for r in found])
        for copies in (False, True):
            backend = make(path, copies, role)
            backend.load(folder / f"{role}-{not copies}")
            results.append([getattr(backend.forward_only([score])[0], name), weights_of(backend)])
    finally:
        Mirror._gathered = gathered
    return results, len(writes)


@pytest.mark.parametrize("role", ["actor", "selected", "critic"])
def test_the_bits_are_those_of_fsdp(run_ranks, tied_checkpoint, tmp_path, role):
    (sharded, copied, *resumed), num_writes = run_ranks(_rank, 1, tied_checkpoint, tmp_path, role)[0]
    assert len(sharded) == 4 + 4 + 6 and str(sharded) != str(sharded[:7])
    torch.testing.assert_close(copied, sharded, rtol=0, atol=0)
    torch.testing.assert_close(resumed, [sharded[-2:]] * 2, rtol=0, atol=0)
    assert num_writes == 3 + 1, "before the first pass, and once a step; and once by the one that has loaded"


def _one_of_several(path, folder, role, optimizer):
    """Steps of each kind with scores between them, and the weights; what each kind loads of the other's save."""
    rank, size = dist.get_rank(), dist.get_world_size()
    kept, trained, loaded = [], [], []
    loss, name = (value_loss, "values") if role == "critic" else (loss_fn, "log_probs")
    for copies in (False, True):
        backend, steps = make(path, copies, role, optimizer=optimizer), []
        backend.load_hf(path)
        for step in range(2):
            parts = micro_batches(make_batch(step), rank, size)
            if step:
                backend.forward_backward(parts, loss)
                backend.scale_gradients(0)  # a group has gone
            backend.forward_backward(parts[:1], loss)
            backend.scale_gradients(0.5)
            backend.forward_backward(parts[1:], loss)
            kept.append(sum(local(p).nbytes for p in backend.policy.parameters()))
            norm = torch.tensor(backend.optimizer_step(LRS[step]).grad_norm)
            backend.offload()
            backend.onload()
            steps += [norm, getattr(backend.forward_only([make_batch(7)])[0], name)]
        trained.append((steps, weights_of(backend)))
        backend.save(folder / str(copies))
    for copies in (False, True):
        backend = make(path, copies, role, optimizer=optimizer)
        backend.load(folder / str(not copies))
        loaded.append(weights_of(backend))
    return trained, loaded, kept


@pytest.mark.parametrize(
    "size, role, optimizer",
    [(2, "actor", "adam"), (2, "selected", "adam"), (2, "critic", "adam"), (3, "actor", "adamw_8bit")],
)
def test_several_ranks_with_a_copy_each_train_like_fsdp(run_ranks, tied_checkpoint, tmp_path, size, role, optimizer):
    """They share masters and moments, and sum gradients once a step."""
    ranks = run_ranks(_one_of_several, size, tied_checkpoint, tmp_path, role, optimizer)
    (sharded, copied), loaded, _ = ranks[0]
    assert all(steps[0] > 0.01 and steps[2] > 0.01 for steps, _ in (sharded, copied))
    torch.testing.assert_close(copied, sharded, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loaded, [copied[1], sharded[1]], rtol=0, atol=0)
    total = sum(p.nbytes for p in load_file(tied_checkpoint / "model.safetensors").values())
    for (_, other), _, kept in ranks:
        torch.testing.assert_close(other[0], copied[0], rtol=0, atol=0)
        assert max(kept) < 0.8 * total


def _lora_rank(path):
    out = []
    for dtype in (torch.float32, torch.bfloat16):
        backend = make_lora_backend(path, dtype=dtype)
        assert not any(isinstance(m, FSDPModule) for m in backend.policy.modules())
        move(backend)
        out.append(gradients(backend))
        backend.scale_gradients(0)
        out.append(train(backend, range(3)))
    return out


def test_one_rank_of_an_adapter_is_not_sharded_and_has_float32_gradients(run_ranks, tied_checkpoint):
    exact, exact_steps, found, steps = run_ranks(_lora_rank, 1, tied_checkpoint)[0]
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(exact_steps), rtol=0.1, atol=0.02)
    assert {g.dtype for g in found.values()} == {torch.float32} and any(
        g.bfloat16().float().ne(g).any() for g in found.values()
    )
    for name, gradient in found.items():
        assert (exact[name] - gradient).norm() <= 0.1 * gradient.norm(), name


def test_a_copy_is_made_where_a_third_of_the_gpu_is_left():
    """12 bytes a parameter with moments in 8 bits, 18 with float32, 10 with moments on the host."""
    for optimizer, offload, most in (("adamw_8bit", False, 4.7), ("adam", False, 3.1), ("adam", True, 5.7)):
        args = SimpleNamespace(
            device="cuda", optimizer=optimizer, optimizer_cpu_offload=offload, colocate=True, offload_train=True
        )

        def largest(world_size, args=args):
            sizes = (n * 0.05e9 for n in range(1, 200))
            return max(n for n in sizes if has_room(args, n, 80 * 2**30, world_size))

        assert largest(1) == pytest.approx(most * 1e9, abs=0.1e9)
        assert largest(2) == pytest.approx(most * 0.5e9, abs=0.1e9)
        args.offload_train = False  # engines stay beside it
        assert largest(1) == largest(2) == pytest.approx(most * 0.5e9, abs=0.1e9)
        args.device = "cpu"
        assert has_room(args, 1e12, math.inf, 1) and not has_room(args, 1, math.inf, 2)
