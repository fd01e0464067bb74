"""`benchmarks/train_step.py` counts the products that a trained model makes."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.train_step import flops_of_sample
from instep.training import packing
from instep.training.hf.model import Policy
from instep.types import TokenBatch

NUMBERS: dict[str, Any] = dict(
    vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, pad_token_id=None,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=160)


@pytest.mark.parametrize("config", [Qwen3Config(**NUMBERS), Qwen3MoeConfig(**NUMBERS, **EXPERTS)], ids=["dense", "moe"])
def test_flops_are_those_of_the_products_that_are_made(config: PretrainedConfig) -> None:
    """Samples of 20 + 12 tokens. A CPU computes short attentions as squares, of which half is causal."""
    config._experts_implementation = "eager"  # the counter does not know products of groups
    policy, prompt, response, num_samples = Policy(config, torch.float32), 20, 12, 3
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    length = prompt + response
    batch = TokenBatch(
        torch.randint(3, 512, (num_samples * length,)),
        torch.full((num_samples,), length),
        torch.full((num_samples,), response),
        sample_columns={"temperature": torch.ones(num_samples)},
    )
    positions, targets = packing.response_positions(batch), packing.response_targets(batch)
    scale = packing.response_temperatures(batch)
    with FlopCounterMode(display=False) as counter:
        log_probs = policy(
            batch.tokens, packing.position_ids(batch), *packing.cu_seqlens(batch), positions, targets, scale, True
        )[0]
        log_probs.sum().backward()
    squares = 6 * config.num_hidden_layers * length**2 * config.num_attention_heads * config.head_dim
    counted = counter.get_total_flops() - num_samples * squares
    assert counted == pytest.approx(num_samples * flops_of_sample(config.to_dict(), prompt, response), rel=2e-3)
