"""What `megatron_runs.py` is compared with: plain transformers and torch.optim.AdamW, sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from instep.training.backend import TokenOutputs
from instep.types import TokenBatch
from tests.distributed.megatron_layouts import BETAS, CLIP, EPS, LR, WEIGHT_DECAY
from tests.distributed.megatron_runs import micro_batches, weighted_loss
from tests.distributed.mtp_oracle import Drafter, checkpoint_weights


def oracle_outputs(model: torch.nn.Module, batch: TokenBatch) -> TokenOutputs:
    """Sample by sample, no packing, plain log-softmax."""
    log_probs, entropies = [], []
    for tokens, n, t in zip(
        batch.tokens.split(batch.total_lengths.tolist()), batch.response_lengths, batch.sample_columns["temperature"],
        strict=True,
    ):  # fmt: skip
        logits = model(tokens[None]).logits[0, -n - 1 : -1] / t
        log_p = torch.log_softmax(logits, -1)
        log_probs.append(log_p.gather(1, tokens[-n:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return TokenOutputs(torch.cat(log_probs), torch.cat(entropies))


def oracle(
    folder: Path, steps: int = 3, clip: float = CLIP, balance: float = 0.0, z: float = 0.0, bias_rate: float = 0.0
) -> dict[str, Any]:
    """Scores, and the losses, gradient norms and weights of some steps; `balance` and `z` weigh losses of routers.

    Args:
        bias_rate: by how much a step moves the bias of each expert of DeepSeek-V3.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    with torch.no_grad():
        scores = [oracle_outputs(model, b) for b in micro_batches(0)]
    gates = [m for name, m in model.named_modules() if name.endswith(".mlp.gate")]
    seen: dict[torch.nn.Module, list[torch.Tensor]] = {gate: [] for gate in gates}  # logits, sample by sample
    for gate in gates:
        gate.register_forward_hook(
            lambda m, args, _: seen[m].append(args[0].reshape(-1, m.weight.shape[1]) @ m.weight.T)
        )
    counts = {gate: torch.zeros(gate.weight.shape[0]) for gate in gates if bias_rate}  # tokens of each expert

    def count_tokens(gate: Any, _: Any, out: Any) -> None:
        counts[gate] += out[2].flatten().bincount(minlength=len(counts[gate]))

    for gate in counts:
        gate.register_forward_hook(count_tokens)
    drafter = Drafter(model) if folder.name.endswith("-mtp") else None
    losses, norms, weights = [], [], []
    for step in range(steps):
        batches = micro_batches(step)
        num_tokens = sum(b.tokens.numel() for b in batches)
        if drafter is not None:
            drafter.step(batches, LR / (step + 1), clip, bias_rate)
            for count in counts.values():
                count.zero_()
        loss = auxiliary = torch.zeros(())
        for batch in batches:
            for logits in seen.values():
                logits.clear()
            loss = loss + weighted_loss(batch, oracle_outputs(model, batch)).loss
            for logits in seen.values():
                auxiliary = auxiliary + router_losses(torch.cat(logits), model.config, balance, z) / num_tokens
        optimizer.zero_grad()
        (loss + auxiliary).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, clip)))
        for group in optimizer.param_groups:
            group["lr"] = LR / (step + 1)
        optimizer.step()
        for gate, count in counts.items():
            gate.e_score_correction_bias += bias_rate * (count.mean() - count).sign()
            count.zero_()
        losses.append(float(loss))
        weights.append(checkpoint_weights(model) | (drafter.weights() if drafter is not None else {}))
    return dict(scores=scores, losses=losses, norms=norms, weights=weights)


def router_losses(logits: torch.Tensor, config: Any, balance: float, z: float) -> torch.Tensor:
    """Those of one layer and one micro-batch, times its tokens, as their papers have them."""
    tokens, num_experts = logits.shape
    scores = logits.sigmoid()
    probs = scores / scores.sum(-1, keepdim=True) if config.model_type == "deepseek_v3" else logits.softmax(-1)
    chosen = torch.zeros(num_experts)
    for row in probs:
        for expert in sorted(range(num_experts), key=lambda e: -float(row[e]))[: config.num_experts_per_tok]:
            chosen[expert] += 1
    fraction = chosen / (tokens * config.num_experts_per_tok)
    switch = num_experts * sum(fraction[e] * probs[:, e].mean() for e in range(num_experts))
    return tokens * (balance * switch + z * (logits.exp().sum(-1).log() ** 2).mean())
