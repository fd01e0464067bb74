"""What samples begin with alike is computed once: against the same micro-batch without it, in float64."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3_5TextConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from instep.training import packing
from instep.training.hf.model import Policy
from instep.types import TokenBatch

VOCAB = 61
CONFIG = Qwen3Config(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.2,
)  # fmt: skip
WINDOWED = Qwen3Config.from_dict(
    {**CONFIG.to_dict(), "layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 8}
)
DELTA = Qwen3_5TextConfig.from_dict(
    {
        **CONFIG.to_dict(), "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    }
)  # fmt: skip


def make_batch(samples: list[tuple[list[int], list[int]]]) -> TokenBatch:
    return TokenBatch(
        tokens=torch.tensor([t for prompt, response in samples for t in prompt + response]),
        total_lengths=torch.tensor([len(p) + len(r) for p, r in samples]),
        response_lengths=torch.tensor([len(r) for _, r in samples]),
    )


def mixed(prompt_length: int) -> TokenBatch:
    """Two groups, their samples not side by side; samples of their own; one twice; a second turn; no response."""
    g = torch.Generator().manual_seed(prompt_length)

    def some(n: int) -> list[int]:
        return torch.randint(0, VOCAB, (n,), generator=g).tolist()

    a, b = some(prompt_length), some(prompt_length // 2 + 1)
    turn, same = some(9), some(6)
    samples = [(a, some(7)), (b, some(3)), (a, turn), (some(5), some(20)), (a + turn + some(4), some(5)), (b, some(11))]
    samples += [(a, same), (b, some(1)), (a, same), (a, []), (some(1), some(2)), (a, same[:3] + some(8))]
    return make_batch(samples)


def test_where_shared_tokens_stand():
    shared = packing.shared_prefixes(make_batch([([5, 6], [1, 2]), ([7], [8]), ([5, 6], [1, 3, 4]), ([7], [8])]))
    assert shared is not None
    assert shared.kept.tolist() == [0, 1, 2, 3, 4, 5, 9, 10]
    assert shared.copies.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7, 4, 5]
    assert shared.cu_kept.tolist() == [0, 4, 6, 8, 8] and shared.cu_kept.dtype is torch.int32 and shared.max_kept == 4


def test_samples_with_little_in_common_are_left_as_they_are():
    assert packing.shared_prefixes(make_batch([([1] + [2] * 20, [3]), ([1] + [4] * 20, [3])])) is None


def test_samples_that_stand_elsewhere_cost_nothing():
    """The last four fill a chunk of the padded attention by themselves, in which there is no query."""
    policy = Policy(CONFIG, torch.float32)
    torch.manual_seed(0)
    for p in policy.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.2)
    one, other = torch.randint(0, VOCAB, (2, 60)).tolist()
    batch = make_batch([*[(other[:5], other[5:45])] * 8, (one[:30], one[30:])])  # the longest is attended first
    shared = packing.shared_prefixes(batch)
    assert shared is not None and shared.cu_kept.tolist() == [0, *[45] * 8, 105]
    targets = packing.response_targets(batch)
    inputs = (batch.tokens, packing.position_ids(batch), *packing.cu_seqlens(batch), packing.response_positions(batch))
    got, expected = (
        policy(*inputs, targets, torch.ones(len(targets)), with_entropy=False, shared=s)[0] for s in (shared, None)
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    got.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())


@pytest.mark.parametrize("prompt_length", [12, 150], ids=["plain products", "fused kernel"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("recompute, config", [(None, CONFIG), ("full", CONFIG), (None, WINDOWED), ("full", DELTA)])
def test_sharing_changes_no_result(monkeypatch, prompt_length, dtype, tolerance, recompute, config):
    if dtype is torch.float64 and config is DELTA:
        pytest.skip("the delta rule is computed in float32")
    if dtype is torch.float64:  # transformers' norm rounds to float32
        monkeypatch.setattr(Qwen3RMSNorm, "forward", lambda m, x: F.rms_norm(x, m.weight.shape, m.weight, 1e-6))
    policy = Policy(config, dtype, recompute)
    torch.manual_seed(0)
    for p in policy.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.2)
    batch = mixed(prompt_length)
    cu_seqlens, max_seqlen = packing.cu_seqlens(batch)
    targets = packing.response_targets(batch)
    weights = torch.randn(2, len(targets), dtype=dtype)

    def run(shared):
        log_probs, entropy = policy(
            batch.tokens, packing.position_ids(batch), cu_seqlens, max_seqlen, packing.response_positions(batch),
            targets, torch.ones(len(targets)), with_entropy=True, shared=shared,
        )  # fmt: skip
        loss = (weights[0] * log_probs + weights[1] * entropy).sum()
        return [log_probs, entropy, *torch.autograd.grad(loss, list(policy.parameters()))]

    shared = packing.shared_prefixes(batch)
    assert shared is not None and len(shared.kept) < 0.7 * len(batch.tokens)
    results = run(shared)
    for result, expected in zip(results, run(None), strict=True):
        assert (result - expected).norm() <= tolerance * expected.norm()
    assert all(torch.equal(a, b) for a, b in zip(results, run(shared), strict=True)), "not the same from run to run"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("config", [CONFIG, WINDOWED, DELTA], ids=["all", "window", "delta"])
def test_on_a_gpu_sharing_changes_only_roundings(config):
    """bfloat16, through the varlen kernel, which sees fewer queries than keys, none of a sample that comes twice."""
    policy = Policy(config, torch.bfloat16)
    torch.manual_seed(0)
    for p in policy.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.2)
    policy.cuda()
    batch = mixed(40).to(torch.device("cuda"))
    cu_seqlens, max_seqlen = packing.cu_seqlens(batch)
    targets = packing.response_targets(batch)
    weights = torch.randn(len(targets), device="cuda")

    def run(shared):
        log_probs, _ = policy(
            batch.tokens, packing.position_ids(batch), cu_seqlens, max_seqlen, packing.response_positions(batch),
            targets, torch.ones(len(targets), device="cuda"), with_entropy=True, shared=shared,
        )  # fmt: skip
        grads = torch.autograd.grad((weights * log_probs).sum(), list(policy.parameters()))
        return [log_probs.detach(), *(g.float() for g in grads)]

    shared = packing.shared_prefixes(batch)
    assert shared is not None
    for result, expected in zip(run(shared), run(None), strict=True):
        assert (result - expected).norm() <= 0.05 * expected.norm()
