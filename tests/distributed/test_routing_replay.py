"""Router replay in training: experts that the model itself would not have chosen, in each layout, against transformers
with the same experts forced upon it, sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from instep.training.backend import TokenOutputs
from instep.types import TokenBatch
from tests.distributed.helpers import RankPool
from tests.distributed.megatron_layouts import CLIP, LAYOUTS, MODELS, random_model
from tests.distributed.megatron_oracle import oracle_outputs
from tests.distributed.megatron_runs import weighted_loss
from tests.distributed.replay_runs import own_choices_replayed, replayed, routed_batches, without_routes_recorded

RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
EP2 = dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1)
CLOSE = dict(rtol=0, atol=2e-5)


def forced(folder: Path, batches: list[TokenBatch]) -> tuple[list[torch.Tensor], float, float]:
    """Log-probs, loss and gradient norm of transformers with the experts of the batches."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    routes: list[torch.Tensor] = []  # of the sample that is computed

    def force(layer):
        def hook(gate, args, output):
            logits, experts = args[0].reshape(-1, gate.weight.shape[1]) @ gate.weight.T, routes[0][:, layer]
            sigmoid = model.config.model_type == "deepseek_v3"  # its bias and groups only choose
            scores = (logits.sigmoid() if sigmoid else logits.softmax(-1)).gather(1, experts)
            scores = scores / scores.sum(-1, keepdim=True) if model.config.norm_topk_prob else scores
            return logits, scores * (model.config.routed_scaling_factor if sigmoid else 1), experts

        return hook

    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(force(int(name.split(".")[2])))
    loss, scores = torch.zeros(()), []
    for batch in batches:
        parts = []
        for i in range(batch.num_samples):
            routes[:] = [torch.from_numpy(batch.sample_columns["routed_experts"][i]).long()]
            parts.append(oracle_outputs(model, batch.select([i])))
        outputs = TokenOutputs(*(torch.cat([getattr(p, name) for p in parts]) for name in ("log_probs", "entropy")))
        scores.append(outputs.log_probs.detach())
        loss = loss + weighted_loss(batch, outputs).loss
    loss.backward()
    return scores, float(loss.detach()), float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("replay")
    for name in ("moe", "moe-mixed", "deepseek"):
        random_model(MODELS[name]).save_pretrained(root / name)
    return root


def both(root: Path, pool: RankPool, layout: str, more: dict) -> list[tuple[torch.Tensor, Any]]:
    """Log-probs, and loss and gradient norm, of the layout and of transformers with the same experts."""
    ranks = pool.run(replayed, root, layout, more)
    model = LAYOUTS[layout][1]
    scores, loss, norm = forced(root / model, routed_batches(model))
    parts = [r["output"] for r in sorted(ranks, key=lambda r: r["output"][0] or 0) if r["output"][0] is not None]
    found = torch.cat([o.log_probs for part in parts for o in part[1]])
    own = torch.cat([o.log_probs for part in parts for o in part[2]])
    print(f"{layout}: gap {(found - torch.cat(scores)).abs().mean():.1e} with replay, {(own - found).abs().mean():.1e}")
    assert (own - found).abs().mean() > 0.01  # other experts are other log-probs
    own_loss = sum(float(o.loss) for part in parts for o in part[3])
    return [(found, (own_loss, ranks[0]["norm"])), (torch.cat(scores), pytest.approx((loss, norm), rel=1e-5, abs=1e-6))]


def test_forced_experts_give_the_log_probs_and_gradients_of_forced_transformers(root):
    """A pipeline of dense and mixed layers in turns, recomputed; context with expert parallelism; and, with sigmoids,
    groups and shared experts, sequence with expert parallelism."""
    with RankPool(2, megatron=True) as pool:
        for layout, more in (("pp2-moe", RECOMPUTE), ("cp2-ep2", {}), ("tp2-sp-deepseek", EP2)):
            ours, forced_ones = both(root, pool, layout, more)
            torch.testing.assert_close(ours[0], forced_ones[0], **CLOSE)
            assert ours[1] == forced_ones[1]
        for noted, engines, own in pool.run(own_choices_replayed, root):
            assert noted == pytest.approx(engines, rel=1e-6) and own[1] != pytest.approx(noted[1], rel=1e-3)
        with pytest.raises(AssertionError, match="the same expert twice"):
            pool.run(without_routes_recorded, root)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "more"),
    [
        (1, "one-moe", {}),
        (1, "one-moe-mixed", RECOMPUTE),
        (1, "one-deepseek", {}),
        (2, "pp2-deepseek", {}),
        (2, "cp2-deepseek", {}),
        (2, "tp2-sp-etp2", {}),
        (2, "tp2-sp-ep2", {}),
        (2, "ep2-dist-opt", {}),
        (4, "tp2-sp-cp2-ep4", RECOMPUTE),
        (4, "pp2-ep2", {}),
        (4, "tp2-sp-pp2-losses", dict(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None)),
    ],
)
def test_in_every_layout(root, ranks, layout, more):
    with RankPool(ranks, timeout=300, megatron=True) as pool:
        ours, forced_ones = both(root, pool, layout, more)
    torch.testing.assert_close(ours[0], forced_ones[0], **CLOSE)
    assert ours[1] == forced_ones[1]
