"""Runs layouts of ranks in processes of their own, and compares what they computed with transformers and AdamW."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.system.ports import free_port
from tests.distributed.helpers import spawn
from tests.distributed.megatron_layouts import (
    BIAS_RATES,
    CLIP,
    CUDA,
    LAYOUTS,
    MODELS,
    ROUTER,
    make_models,
    random_model,
)
from tests.distributed.megatron_oracle import checkpoint_weights, oracle
from tests.distributed.megatron_runs import bare_faults, processes
from tests.distributed.mtp_oracle import Drafter


def compute(root: Path, names: list[str], resumes: list[tuple[str, str]]) -> dict[Any, Any]:
    """Results by layout (`NAME, "ranks"`: one dictionary per rank), and the oracle's by model."""
    models = {LAYOUTS[name][1] for name in names if "losses" not in name}
    steps = {LAYOUTS[name][1]: 5 for _, name in resumes}  # those go on after three
    make_models(root)
    results: dict[Any, Any] = {
        name: oracle(root / name, steps.get(name, 3), bias_rate=BIAS_RATES.get(name, 0.0))
        for name in MODELS
        if name in models
    }
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"  # in AMX bits depend on where factors lie in memory
    for model in {LAYOUTS[name][1] for name in names if "losses" in name}:
        results[f"{model} losses"] = oracle(
            root / model, balance=ROUTER["moe_aux_loss_coeff"], z=ROUTER["moe_z_loss_coeff"]
        )
    if "one" in names:
        results["no clip"] = oracle(root / "untied", clip=math.inf)
        if not CUDA:
            spawn(bare_faults, 1, root)
            results["bare faults"] = torch.load(root / "faults.pt", weights_only=False)
    for size in sorted({LAYOUTS[name][0] for name in names}, reverse=True):
        port = free_port()
        here = [name for name in names if LAYOUTS[name][0] == size]
        spawn(processes, size, size, port, root, here, [r for r in resumes if r[1] in here], megatron=not CUDA)
        ranks = [torch.load(root / f"results-{size}-{r}.pt", weights_only=False) for r in range(size)]
        results |= {(key, "ranks"): [r[key] for r in ranks] for key in ranks[0]}
    return results


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-3)) / tolerance


def wanted(computed: dict[Any, Any], name: str) -> dict[str, Any]:
    return computed["no clip" if "no-clip" in name else LAYOUTS[name][1] + " losses" * ("losses" in name)]  # type: ignore[no-any-return]


def same_scores(computed: dict[Any, Any], name: str) -> int:
    """Log-probs and entropy of every sample, once per data-parallel rank and the same on all of its ranks.

    Returns the number of outputs that were compared; so do the others, of weights.
    """
    ranks, want = computed[name, "ranks"], wanted(computed, name)["scores"]
    by_dp: dict[int, list] = {}
    for rank in ranks:
        dp_rank, last, _ = rank["parallel"]
        assert (rank["scores"] is None) == (not last)
        if last:
            by_dp.setdefault(dp_rank, []).append(rank["scores"])
    assert sum(rank["parallel"][2] for rank in ranks) == len(by_dp)
    for copies in by_dp.values():
        for other in copies[1:]:
            assert all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(copies[0], other, strict=True))
    got = [out for dp_rank in sorted(by_dp) for out in by_dp[dp_rank][0]]
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.log_probs, w.log_probs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(g.entropy, w.entropy, atol=1e-5, rtol=1e-5)
    return len(got)


def same_steps(computed: dict[Any, Any], name: str) -> int:
    """Losses and gradient norms of three steps, and the weights after them."""
    want = wanted(computed, name)
    for rank in computed[name, "ranks"]:
        assert rank["losses"] == pytest.approx(want["losses"][:3], rel=1e-5)
        assert rank["norms"] == pytest.approx(want["norms"][:3], rel=1e-5)
    assert min(want["norms"]) > CLIP, "the clip must act"
    got, weights = computed[name, "ranks"][0]["weights"], want["weights"][2]
    if "kept" in name:  # without --enable-mtp-training
        first = computed[name, "ranks"][0]["exported"]
        weights = weights | {key: tensor for key, tensor in first.items() if key.startswith("mtp.")}
    assert set(got) == set(weights)
    for key, tensor in weights.items():
        assert close(got[key], tensor, 1e-5) <= 1, key
    return len(got)


def same_export(computed: dict[Any, Any], name: str) -> int:
    """What is exported after Hugging Face weights were loaded is these weights, bit by bit."""
    model = random_model(MODELS[LAYOUTS[name][1]])
    want = checkpoint_weights(model) | (Drafter(model).weights() if "mtp" in name else {})
    first, *others = [rank["exported"] for rank in computed[name, "ranks"]]
    assert set(first) == set(want) and not any(others)
    assert all(torch.equal(first[key], want[key]) for key in want)
    return len(want)


def same_resume(computed: dict[Any, Any], saved: str, name: str) -> int:
    """Two more steps under layout `name`, from the checkpoint that layout `saved` wrote."""
    want = computed[LAYOUTS[name][1]]
    for rank in computed[(saved, name), "ranks"]:
        assert rank["losses"] == pytest.approx(want["losses"][3:], rel=2e-5)
        assert rank["norms"] == pytest.approx(want["norms"][3:], rel=2e-5)
    got = computed[(saved, name), "ranks"][0]["weights"]
    for key, tensor in want["weights"][4].items():
        assert close(got[key], tensor, 2e-5) <= 1, key
    return len(got)
