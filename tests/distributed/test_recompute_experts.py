"""`--recompute-modules moe_act`: the activation of grouped experts is computed again instead of kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.megatron_layouts import MODELS, random_model
from tests.distributed.megatron_runs import make_backend, micro_batches, weighted_loss

MEGATRON = True  # what the ranks have imported


def gradients(root: Path, layout: str) -> tuple[list[str], dict[str, torch.Tensor], int]:
    from instep.training.megatron import cpu_platform

    cpu_platform.install()  # before the first import of megatron.core
    from instep.training.megatron import experts

    calls, activated = 0, experts._activated

    def counted(*args: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return activated(*args)

    experts._activated = counted
    backend, hf = make_backend(root, layout)
    backend.load_hf(hf)
    backend.forward_backward(micro_batches(0), weighted_loss)
    found = {name: p.main_grad.clone() for chunk in backend.chunks for name, p in chunk.named_parameters()}
    return list(backend.chunks[0].config.recompute_modules), found, calls


@pytest.mark.filterwarnings("ignore")
def test_the_activation_is_computed_twice_and_gradients_are_the_same(run_ranks: Any, tmp_path: Path):
    random_model(MODELS["moe-mixed"]).save_pretrained(tmp_path / "moe-mixed")
    kept, again = (run_ranks(gradients, 1, tmp_path, f"one-moe-grouped{end}")[0] for end in ("", "-act"))
    assert again[0] == ["moe_act"] != kept[0]
    assert again[2] == 2 * kept[2] > 0
    assert again[1].keys() == kept[1].keys() and any(g.any() for g in kept[1].values())
    assert all(torch.equal(again[1][name], grad) for name, grad in kept[1].items())
