"""LoRA against peft itself: log-probs and gradients, and the adapters that the two write. Run by `make test-peers`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.distributed.helpers import RankPool
from tests.distributed.hf_runs import make_batch, make_checkpoint
from tests.distributed.lora_runs import HF, TP2_SP, Kind, gradients, make_lora_backend, move, scores
from tests.distributed.test_hf_backend import oracle_log_probs
from tests.oracles import peers

pytestmark = pytest.mark.peers


def _export_rank(path: Path, folder: Path, kind: Kind):
    backend = make_lora_backend(path, kind=kind)
    move(backend)
    backend.export_adapter(folder)
    dist.barrier()
    log_probs = scores(backend, make_batch(0))
    return gradients(backend), log_probs


@pytest.mark.parametrize("world_size, kind", [(1, HF), (2, HF), (2, TP2_SP)], ids=str)
def test_peft_loads_the_adapter_and_has_its_log_probs_and_gradients(tmp_path, world_size, kind):
    peft = peers.load("peft")
    path = make_checkpoint(tmp_path / "hf", tied=True)
    with RankPool(world_size) as pool:
        found, log_probs = pool.run(_export_rank, path, tmp_path / "adapter", kind)[0]
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    batch, columns = make_batch(0), make_batch(0).token_columns
    theirs, entropies = (torch.cat(x) for x in oracle_log_probs(model, batch))
    torch.testing.assert_close(log_probs, theirs.detach(), rtol=1e-5, atol=1e-5)
    (-(columns["loss_weights"] * (columns["advantages"] * theirs + 0.01 * entropies)).sum()).backward()
    grads = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert grads.keys() == {f"base_model.model.{name}" for name in found} and len(grads) == 28
    most = 1e-6 if kind == HF else 5e-6  # Megatron's layers round in another order
    for name, gradient in found.items():
        expected = grads[f"base_model.model.{name}"]
        assert (gradient - expected).norm() <= most * max(1.0, float(expected.norm())), name
    model.save_pretrained(tmp_path / "theirs")
    ours, written = (json.loads((tmp_path / d / "adapter_config.json").read_text()) for d in ("adapter", "theirs"))
    assert all(written[name] == value for name, value in ours.items() if name != "target_modules")
    assert sorted(written["target_modules"]) == ours["target_modules"]
