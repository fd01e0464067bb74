"""DeepSeek-V3 with Megatron in bfloat16, with the published widths of heads: the fused kernel, the router, its bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config

from tests.distributed import megatron_runs
from tests.distributed.helpers import RankPool
from tests.distributed.megatron_layouts import LATENT, NUMBERS, YARN, random_model
from tests.distributed.megatron_oracle import oracle_outputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
HEADS = dict(hidden_size=256, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
GROUPS = dict(q_lora_rank=192, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
RATE = 0.01


def _train(folder: Path) -> dict[str, Any]:
    from instep.training.megatron.backend import MegatronBackend

    args = megatron_runs.make_args(moe_router_bias_update_rate=RATE)
    backend = MegatronBackend(
        args, hf_config=AutoConfig.from_pretrained(folder), device=torch.device("cuda", 0), dtype=torch.bfloat16
    )
    backend.load_hf(folder)
    before, scores = megatron_runs.export(backend), backend.forward_only(megatron_runs.micro_batches(0), entropy=True)
    losses, norms = megatron_runs.train(backend, range(3))
    after = megatron_runs.export(backend)
    return dict(before=before[BIAS], after=after[BIAS], scores=scores, losses=losses, norms=norms)


def test_it_scores_as_transformers_and_moves_its_bias(tmp_path):
    config = DeepseekV3Config(**NUMBERS | LATENT | HEADS, **GROUPS, rope_parameters=YARN)
    model = random_model(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.3 if weight.ndim > 1 else 1.0)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        want = [oracle_outputs(plain, batch) for batch in megatron_runs.micro_batches(0)]
    with RankPool(1, cuda=True) as pool:
        got = pool.run(_train, tmp_path)[0]
    differences = torch.cat([(g.log_probs - w.log_probs).abs() for g, w in zip(got["scores"], want, strict=True)])
    print(f"\nlog-probs off by {differences.mean():.1e} in the mean, losses {got['losses']}, norms {got['norms']}")
    assert differences.mean() < 2e-2 and all(0 < norm < 1e3 for norm in got["norms"])
    assert got["before"].dtype is torch.float32 and torch.equal(got["before"], dict(plain.named_buffers())[BIAS])
    steps = (got["after"] - got["before"]) / RATE
    assert steps.round().abs().max() >= 1 and (steps - steps.round()).abs().max() < 1e-3
