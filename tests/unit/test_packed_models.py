"""Architectures of transformers under the `hf` backend: each is right, packed or padded, or refused by one message."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BloomModel, OPTConfig

from instep.errors import ConfigError
from instep.training.hf.model import Policy, _differ
from tests.architectures import PACKED, PADDED, REASONS, REFUSED, SPLIT, WINDOWED, compare

# Layers unlike those of the others: these are tested each time, and the others, which are like one of them, are slow.
UNLIKE = "afmoe cohere2_moe deepseek_v3 diffllama gemma3_text gemma4_text gpt2 gpt_neox granitemoe jetmoe lfm2 "
UNLIKE += "llama minimax_m2 modernbert-decoder opt phi3 qwen2 qwen3 qwen3_5_text qwen3_moe qwen3_next smollm3"
UNLIKE_PADDED = "bloom jamba nemotron_h rwkv falcon gpt_neo nemotron gemma2 gpt_oss doge axk2 mpt"
UNLIKE_WINDOWED = "afmoe cohere2 gemma2 gemma3_text gemma4_text gpt_oss mistral modernbert-decoder phi3 qwen2 qwen2_moe"


def some(names: Iterable[str], fast: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast.split() else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("model_type", some(PACKED, UNLIKE))
def test_packed(model_type: str):
    difference = compare(model_type)
    assert difference.log_probs < 1e-5 and difference.gradients < 1e-5 and not difference.remark


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("model_type", ["lfm2", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"])
def test_samples_shorter_and_longer_than_the_chunks_of_linear_attention(model_type: str, recompute: str | None):
    difference = compare(model_type, lengths=(1, 70, 2, 64, 1, 128, 3, 129, 9), recompute=recompute)
    assert difference.log_probs < 1e-5 and difference.gradients < 1e-5 and not difference.remark


@pytest.mark.parametrize("model_type", some(REASONS, UNLIKE_PADDED))
def test_padded(model_type: str):
    difference = compare(model_type)
    assert difference.log_probs < 1e-5 and difference.gradients < 1e-5
    assert re.search(f"is trained padded, which is slower: .*({REASONS[model_type]})", difference.remark)


@pytest.mark.parametrize("model_type", some(WINDOWED, UNLIKE_WINDOWED))
def test_samples_longer_than_the_window(model_type: str):
    difference = compare(model_type, window=4)
    assert difference.log_probs < 1e-5 and difference.gradients < 1e-5
    assert bool(difference.remark) is (model_type in REASONS)


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(model_type: str):
    with pytest.raises(ConfigError, match="cannot be trained: a token's hidden states depend on tokens after it"):
        compare(model_type)


def test_a_model_that_is_wrong_with_padding_runs_one_sample_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """Here a token's position counts the rows of its pass, too."""
    real = BloomModel.forward

    def forward(self: BloomModel, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        output = real(self, input_ids, **kwargs)
        output.last_hidden_state = output.last_hidden_state * len(input_ids)
        return output

    monkeypatch.setattr(BloomModel, "forward", forward)
    difference = compare("bloom")
    assert difference.log_probs < 1e-5 and difference.gradients < 1e-5
    assert "is trained one sample at a time" in difference.remark


def test_kernels_may_send_tokens_to_other_experts_in_16_bits_but_no_more():
    expected = torch.ones(21, 8, dtype=torch.bfloat16)
    for off, dtype, mixture, differs in (
        (0.1, torch.bfloat16, False, True),
        (0.1, torch.bfloat16, True, False),
        (0.5, torch.bfloat16, True, True),
        (0.1, torch.float32, True, True),
    ):
        states = expected.to(dtype)
        states = states + off * (torch.arange(21) % 2)[:, None].to(dtype)  # every other token
        assert _differ(states, expected.to(dtype), mixture=mixture) is differs


def test_the_document_lists_them():
    text = (Path(__file__).parents[2] / "docs/models.md").read_text()
    packed, padded, refused, split = (text.partition(f"<!-- {part} -->")[2].partition("\n\n<!--")[0] for part in _PARTS)
    names = r"`([a-z0-9_-]+)`"
    assert re.findall(names, packed.partition("\n\n")[0]) == PACKED
    assert re.findall(r"^\| `(.+)` \|", padded, re.MULTILINE) == ["`, `".join(n.split()) for n in PADDED.values()]
    assert re.findall(names, refused.partition(".")[0]) == REFUSED
    assert re.findall(names, split.partition("\n\n")[0]) == SPLIT


_PARTS = ("packed", "padded", "refused", "split")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.distributed.DistBackendError("NCCL error: remote process exited"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2612"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_faults_of_the_machine_are_not_the_models(error: RuntimeError):
    config = OPTConfig(
        vocab_size=40, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=32
    )
    policy = Policy(config, torch.float32)

    def fails(*_: object) -> None:
        raise error

    policy.model.base_model.decoder.layers[0].register_forward_pre_hook(fails)
    tokens, at = torch.arange(5, 20), torch.arange(15)
    with pytest.raises(type(error), match=re.escape(str(error))):
        policy(tokens, at, torch.tensor([0, 15]).int(), 15, at[:-1], tokens[1:], torch.ones(14), False, check=True)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def gradient(policy: Policy) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tokens, at = torch.arange(5, 20), torch.arange(15)
    bounds = torch.tensor([0, 15], dtype=torch.int32)
    log_probs = policy(tokens, at, bounds, 15, at[:-1], tokens[1:], torch.ones(14), False)[0]
    assert log_probs is not None
    log_probs.sum().backward()
    return log_probs.detach(), [p.grad for p in policy.parameters() if p.grad is not None]


def test_recomputation_leaves_dropout_off_also_where_it_is_a_function(monkeypatch: pytest.MonkeyPatch):
    """OPT's dropout is a function, which only train() turns on."""
    config = OPTConfig(
        vocab_size=40, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, dropout=0.5,
        attention_dropout=0.5, activation_dropout=0.5, word_embed_proj_dim=32, max_position_embeddings=32,
    )  # fmt: skip
    results, layers = [], 0
    for recompute in (None, "full", "selective"):
        torch.manual_seed(1)
        policy = Policy(config, torch.float32, recompute)
        for parameter in policy.parameters():
            nn.init.normal_(parameter, 0, 0.2)
        calls = [0]
        for layer in policy.model.base_model.decoder.layers:
            layer.self_attn.register_forward_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        results.append(gradient(policy))
        layers += calls[0]
        assert not any(module.training for module in policy.model.modules())
    assert layers == 2 + 2 * 2 + 2 * 2  # the others have computed their layers twice
    log_probs, gradients = results[0]
    for again, recomputed in results[1:]:
        torch.testing.assert_close(again, log_probs, rtol=0, atol=0)
        for a, b in zip(gradients, recomputed, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
