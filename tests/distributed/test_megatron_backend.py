"""The megatron backend against plain transformers + torch.optim.AdamW (see `megatron_runs.py` for what runs where)."""

from __future__ import annotations

import math
import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM

from instep.errors import CheckpointError, ConfigError
from tests.distributed.megatron_runs import (
    CLIP,
    CUDA,
    LAYOUTS,
    MODELS,
    RESUMES,
    SIZES,
    bare_faults,
    oracle,
    processes,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def computed(tmp_path_factory) -> dict:
    """Results by layout: one dictionary per rank; and the oracle's by model."""
    root = tmp_path_factory.mktemp("megatron")
    for name, config in MODELS.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p) * 0.1 + (1 if p.ndim == 1 and p.numel() in (16, 64) else 0))
        model.save_pretrained(root / name, max_shard_size="100KB" if name == "untied" else "1GB")
    results: dict = {name: oracle(root / name) for name in MODELS}
    results["no clip"] = oracle(root / "untied", clip=math.inf)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"  # in AMX bits depend on where factors lie in memory
    if not CUDA:
        mp.spawn(bare_faults, args=(root,))
        results["bare faults"] = torch.load(root / "faults.pt", weights_only=False)
    for size in SIZES:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        mp.spawn(processes, args=(size, port, root), nprocs=size)
        ranks = [torch.load(root / f"results-{size}-{r}.pt", weights_only=False) for r in range(size)]
        results |= {(key, "ranks"): [r[key] for r in ranks] for key in ranks[0]}
    return results


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-3)) / tolerance


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name][0] in SIZES])
def test_log_probs_and_entropy_are_those_of_transformers(computed, name):
    ranks, want = computed[name, "ranks"], computed[LAYOUTS[name][1]]["scores"]
    by_dp = {}
    for rank in ranks:
        dp_rank, last, _ = rank["parallel"]
        assert (rank["scores"] is None) == (not last)
        if last:
            by_dp.setdefault(dp_rank, []).append(rank["scores"])
    assert sum(rank["parallel"][2] for rank in ranks) == len(by_dp)
    for copies in by_dp.values():  # every tensor-parallel rank holds the same
        for a, b in zip(copies[0], copies[-1], strict=True):
            assert torch.equal(a.log_probs, b.log_probs)
    got = [out for dp_rank in sorted(by_dp) for out in by_dp[dp_rank][0]]
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.log_probs, w.log_probs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(g.entropy, w.entropy, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "chunked" in name and LAYOUTS[name][0] in SIZES])
def test_the_head_of_a_chunked_layout_sees_few_tokens_at_a_time(computed, name):
    """Those tests above and below are about its results."""
    for rank in computed[name, "ranks"]:
        assert max(rank["head_tokens"]) <= 4 < 4 * 4 < len(rank["head_tokens"])
    assert max(computed["one", "ranks"][0]["head_tokens"]) > 10


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name][0] in SIZES])
def test_three_steps_are_those_of_transformers_with_adamw(computed, name):
    want = computed["no clip" if "no-clip" in name else LAYOUTS[name][1]]
    for rank in computed[name, "ranks"]:
        assert rank["losses"] == pytest.approx(want["losses"][:3], rel=1e-5)
        assert rank["norms"] == pytest.approx(want["norms"][:3], rel=1e-5)
    assert min(want["norms"]) > CLIP, "the clip must act"
    got = computed[name, "ranks"][0]["weights"]
    assert set(got) == set(want["weights"][2])
    for key, tensor in want["weights"][2].items():
        assert close(got[key], tensor, 1e-5) <= 1, key


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name][0] in SIZES])
def test_export_after_load_is_bit_equal(computed, name, tmp_path_factory):
    model = LAYOUTS[name][1]
    torch.manual_seed(7)
    saved = AutoModelForCausalLM.from_config(MODELS[model], dtype=torch.float32)
    with torch.no_grad():
        for p in saved.parameters():
            p.copy_(torch.randn_like(p) * 0.1 + (1 if p.ndim == 1 and p.numel() in (16, 64) else 0))
    want = dict(saved.named_parameters())
    first, *others = [rank["exported"] for rank in computed[name, "ranks"]]
    assert set(first) == set(want) and not any(others)
    assert all(torch.equal(first[key], want[key]) for key in want)


@pytest.mark.parametrize(("saved", "name"), [pair for pair in RESUMES if 2 in SIZES])
def test_a_checkpoint_goes_on_under_another_layout(computed, saved, name):
    want = computed[LAYOUTS[name][1]]
    for rank in computed[(saved, name), "ranks"]:
        assert rank["losses"] == pytest.approx(want["losses"][3:], rel=2e-5)
        assert rank["norms"] == pytest.approx(want["norms"][3:], rel=2e-5)
    got = computed[(saved, name), "ranks"][0]["weights"]
    for key, tensor in want["weights"][4].items():
        assert close(got[key], tensor, 2e-5) <= 1, key


def test_edges(computed):
    (edges,) = computed["edges", "ranks"]
    want = computed["untied"]
    assert edges["skipped"] and edges["unchanged"]
    for losses, norms in (edges["then_trains"], edges["beside"]):
        assert losses == pytest.approx(want["losses"][:1], rel=1e-5)
        assert norms == pytest.approx(want["norms"][:1], rel=1e-5)
    assert isinstance(edges["refused_upstream"], ConfigError) and "without an optimizer" in edges["untrained"].what
    assert edges["type_outside"] == "torch.FloatTensor", "the platform's lie must stay inside its scope"
    assert "twice" in str(edges["twice"])
    for key in ("no_checkpoint", "no_folder", "wrong_model", "wrong_checkpoint"):
        assert isinstance(edges[key], CheckpointError) and edges[key].where, key
    assert (
        isinstance(edges["unknown_override"], ConfigError) and "layernorm_epsilon" in edges["unknown_override"].remedy
    )
    assert "lm_head.weight" in edges["wrong_checkpoint"].what
    for got, expected in zip(edges["reference"], want["scores"], strict=True):
        torch.testing.assert_close(got.log_probs, expected.log_probs, atol=1e-5, rtol=1e-5)
        assert got.entropy is None


def test_bfloat16_trains_on_float32_masters_and_resumes(computed):
    (got,) = computed["bf16", "ranks"]
    want = computed["untied"]
    assert got["losses"] == pytest.approx(want["losses"][:3], rel=2e-2, abs=2e-2)
    assert got["norms"] == pytest.approx(want["norms"][:3], rel=5e-2)
    (losses, norms), weights = got["straight"]
    assert got["resumed"][0] == (pytest.approx(losses, rel=1e-6), pytest.approx(norms, rel=1e-6))
    for key, tensor in got["resumed"][1].items():
        assert tensor.dtype is torch.bfloat16 and torch.equal(tensor, weights[key]), key


@pytest.mark.skipif(CUDA, reason="the stand-ins are for machines without CUDA")
def test_what_the_patches_mend_is_still_broken_upstream(computed):
    """A failure here means: Megatron-Core has changed, and a patch (or a way around) can go."""
    bare, (faults,) = computed["bare faults"], computed["faults", "ranks"]
    assert bare["te_general_gemm"] is False and bare["te_general_gemm fixed"] is None
    assert "sequence parallel not supported" in bare["norm"]
    assert "CUDA" in bare["device"] or "NVIDIA driver" in bare["device"]
    assert isinstance(bare["late"], ConfigError) and "before cpu_platform.install" in bare["late"].what
    assert "CUDA" in faults["schedule"], faults["schedule"]
    assert "torch.cuda.FloatTensor" in faults["optimizer"] or "CUDA" in faults["optimizer"], faults["optimizer"]
    assert faults["dist_opt_state"].startswith(("AssertionError", "KeyError")), faults["dist_opt_state"]


@pytest.mark.skipif(CUDA, reason="the stand-ins are for machines without CUDA")
def test_patches_refuse_other_versions(monkeypatch):
    import importlib.metadata

    from instep.training.megatron import cpu_platform, upstream_fixes

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for patch, call in (("cpu_platform", cpu_platform.install), ("te_general_gemm", upstream_fixes.apply)):
        with pytest.raises(ConfigError, match="0.17.1") as error:
            call()
        assert patch in error.value.what and "0.16." in error.value.what
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="with CUDA"):
        cpu_platform.install()
