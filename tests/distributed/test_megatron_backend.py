"""The megatron backend against plain transformers + torch.optim.AdamW (see `megatron_runs.py` for what runs where)."""

from __future__ import annotations

import pytest
import torch

from instep.errors import CheckpointError, ConfigError
from tests.distributed.megatron_checks import compute, same_export, same_resume, same_scores, same_steps
from tests.distributed.megatron_layouts import BIAS_RATES, CUDA, LAYOUTS, MODELS, RESUMES, SLOW, random_model
from tests.distributed.megatron_oracle import checkpoint_weights

pytestmark = pytest.mark.filterwarnings("ignore")


SIZES = [n for n in (2, 1) if not CUDA or n <= torch.cuda.device_count()]
# On GPUs, over NCCL, those of two ranks that are slow on a CPU, too: `test_megatron_layouts.py` does not run there.
NAMES = [name for name, (ranks, *_) in LAYOUTS.items() if ranks in SIZES and (CUDA or name not in SLOW)]
RESUMED = [(a, b) for a, b in RESUMES if a in NAMES and b in NAMES]


@pytest.fixture(scope="module")
def computed(tmp_path_factory) -> dict:
    return compute(tmp_path_factory.mktemp("megatron"), NAMES, RESUMED)


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_and_entropy_are_those_of_transformers(computed, name):
    assert same_scores(computed, name) > 0


@pytest.mark.parametrize("name", [name for name in NAMES if "chunked" in name])
def test_the_head_of_a_chunked_layout_sees_few_tokens_at_a_time(computed, name):
    """Those tests above and below are about its results."""
    for rank in computed[name, "ranks"]:
        assert max(rank["head_tokens"]) <= 4 < 4 * 4 < len(rank["head_tokens"])
    assert max(computed["one", "ranks"][0]["head_tokens"]) > 10


@pytest.mark.parametrize("name", NAMES)
def test_three_steps_are_those_of_transformers_with_adamw(computed, name):
    assert same_steps(computed, name) > 0


@pytest.mark.parametrize("name", [name for name in ("one-deepseek", "one-qwen3.5") if name in NAMES])
def test_multi_token_prediction_changes_no_bit_of_the_policy(computed, name):
    """Other tests in this file check the results of multi-token prediction itself."""
    (plain,), (drafting,) = computed[name, "ranks"], computed[f"{name}-mtp", "ranks"]
    assert plain["losses"] == drafting["losses"] and plain["norms"] == drafting["norms"]
    assert len(drafting["weights"]) > len(plain["weights"]) > 10
    assert all(torch.equal(drafting["weights"][key], tensor) for key, tensor in plain["weights"].items())


@pytest.mark.parametrize("name", NAMES)
def test_export_after_load_is_bit_equal(computed, name):
    assert same_export(computed, name) > 0


@pytest.mark.parametrize(("saved", "name"), RESUMED)
def test_a_checkpoint_goes_on_under_another_layout(computed, saved, name):
    assert same_resume(computed, saved, name) > 0


def test_edges(computed):
    (edges,) = computed["edges", "ranks"]
    want = computed["untied"]
    assert edges["skipped"] and edges["unchanged"]
    for losses, norms in (edges["then_trains"], edges["beside"]):
        assert losses == pytest.approx(want["losses"][:1], rel=1e-5)
        assert norms == pytest.approx(want["norms"][:1], rel=1e-5)
    assert isinstance(edges["refused_upstream"], ConfigError)
    assert edges["type_outside"] == "torch.FloatTensor", "the platform's lie must stay inside its scope"
    assert bool(edges["compiled"]) == CUDA, "a run on a CPU needs no compiler"
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


def test_biases_of_experts_are_float32_in_a_model_of_bfloat16(computed):
    ((((before, after), remark),), rate) = computed["bf16 bias", "ranks"], BIAS_RATES["deepseek"]
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert remark.startswith("2 tensors of multi-token prediction (model.layers.2.enorm.weight, ...) are not read")
    assert before.dtype is after.dtype is torch.float32
    assert torch.equal(before, checkpoint_weights(random_model(MODELS["deepseek"]))[name])
    steps = (after - before) / rate
    assert steps.abs().max() > 0.9 and (steps - steps.round()).abs().max() < 1e-4


@pytest.mark.skipif(CUDA, reason="the stand-ins are for machines without CUDA")
def test_what_the_patches_mend_is_still_broken_upstream(computed):
    """A failure here means: Megatron-Core has changed, and a patch (or a way around) can go."""
    bare, (faults,) = computed["bare faults"], computed["faults", "ranks"]
    assert bare["te_general_gemm"] is False and bare["te_general_gemm fixed"] is None
    assert bare["latent attention"], "it takes Transformer Engine for installed"
    assert "sequence parallel not supported" in bare["norm"]
    assert "CUDA" in bare["device"] or "NVIDIA driver" in bare["device"]
    assert "CUDA" in faults["schedule"], faults["schedule"]
    assert "torch.cuda.FloatTensor" in faults["optimizer"] or "CUDA" in faults["optimizer"], faults["optimizer"]
    assert faults["dist_opt_state"].startswith(("AssertionError", "KeyError")), faults["dist_opt_state"]


@pytest.mark.skipif(CUDA, reason="the stand-ins are for machines without CUDA")
def test_patches_refuse_other_versions(monkeypatch):
    import importlib.metadata

    from instep.training.megatron import cpu_platform, upstream_fixes

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.17.1")
    with pytest.raises(ConfigError, match="0.17.1") as error:
        upstream_fixes.require_megatron()
    assert "0.16." in error.value.what
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="with CUDA"):
        cpu_platform.install()
