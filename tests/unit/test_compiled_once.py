"""How often the trainer's layers and log-probs are compiled: as often for two micro-batches as for any others."""

from __future__ import annotations

import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from transformers import Qwen3Config

from instep.training import log_probs, packing
from instep.training.hf import model as hf
from instep.training.hf.layout import PACKED
from instep.training.hf.model import Policy
from instep.types import TokenBatch
from tests.architectures import tiny_config

VOCAB, HIDDEN, HEAD_DIM = 96, 64, 16
LONGEST = 1000  # tokens of a micro-batch: for more of them a CPU's code, and no GPU's, adds up in another way
CONFIG = dict(hidden_size=HIDDEN, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=HEAD_DIM, vocab_size=VOCAB, tie_word_embeddings=True)  # fmt: skip


def batch_of(samples: list[tuple[list[int], list[int]]]) -> TokenBatch:
    return TokenBatch(
        tokens=torch.tensor([token for prompt, response in samples for token in prompt + response]),
        total_lengths=torch.tensor([len(p) + len(r) for p, r in samples]),
        response_lengths=torch.tensor([len(r) for _, r in samples]),
        sample_columns={"temperature": torch.ones(len(samples))},
    )


def some(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(num)]


def coincidences(rng: random.Random) -> TokenBatch:
    """As many tokens as states are wide, as many bounds as a head is, and as many tokens in the longest sample."""
    lengths = [HEAD_DIM, *[3] * 9, *[4] * 4, 5]
    assert sum(lengths) == HIDDEN and len(lengths) + 1 == max(lengths) == HEAD_DIM
    return batch_of([(some(rng, 1), some(rng, n - 1)) for n in lengths])


def any_batch(rng: random.Random) -> TokenBatch:
    """One sample, few or many; prompts of their own or one for all; responses of one token each, or up to 200."""
    num = rng.choice([1, 1, 2, rng.randint(3, 40)])
    longest = rng.choice([1, 20, 200])
    prompt = some(rng, rng.randint(1, 60)) if rng.random() < 0.5 else []
    samples: list[tuple[list[int], list[int]]] = []
    for _ in range(num):
        sample = prompt or some(rng, rng.randint(1, 30)), some(rng, rng.randint(1, longest))
        if sum(map(len, sample)) + sum(len(p) + len(r) for p, r in samples) > LONGEST:
            break
        samples.append(sample)
    return batch_of(samples)


def compiled_log_probs(logits, targets, temperature, *, vocab_size, tp_group, with_entropy):
    """`log_probs_and_entropy` as it is on a GPU."""
    found, entropy = log_probs._CompiledLogProbs.apply(logits, targets, temperature, vocab_size, with_entropy)
    return found, entropy if with_entropy else None


def score_and_train(policy: Policy, batch: TokenBatch, check: bool) -> bool:
    """A pass without and one with gradients; whether prefixes were shared."""
    shared = packing.shared_prefixes(batch)
    inputs = (batch.tokens, packing.position_ids(batch), *packing.cu_seqlens(batch), packing.response_positions(batch))
    inputs = (*inputs, packing.response_targets(batch), packing.response_temperatures(batch))
    with torch.no_grad():
        scores, *_ = policy(*inputs, with_entropy=False, shared=shared, check=check)
    found, entropy, *_ = policy(*inputs, with_entropy=True, shared=shared)
    torch.testing.assert_close(found.detach(), scores, rtol=1e-5, atol=1e-5)
    (found.mean() + 0.01 * entropy.mean()).backward()
    return shared is not None


def compilations(recompute: str | None) -> tuple[int, int, set[bool], float]:
    """How many graphs there are after two micro-batches and after 34, whether prefixes were shared, and the distance
    of the gradients to those without the compiler, relative to them."""
    hf.log_probs_and_entropy = compiled_log_probs
    hf._LOGIT_ELEMENTS = 100 * VOCAB * 16 // 15  # 100 response tokens in a chunk
    policy = Policy(Qwen3Config(**CONFIG), torch.float32, recompute=recompute, compiles=True)
    torch.manual_seed(0)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.05)
    stats, rng = torch._dynamo.utils.counters["stats"], random.Random(0)
    batches = [coincidences(rng), *(any_batch(rng) for _ in range(33))]
    score_and_train(policy, batches[0], check=True)
    score_and_train(policy, batches[1], check=False)
    first = stats["unique_graphs"]
    policy.zero_grad()
    kinds = {score_and_train(policy, batch, check=False) for batch in batches}
    later, grads = stats["unique_graphs"], [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    with torch.compiler.set_stance("force_eager"):
        for batch in batches:
            score_and_train(policy, batch, check=False)
    eager = torch.cat([p.grad.flatten() for p in policy.parameters()])
    return first, later, kinds, float((torch.cat([g.flatten() for g in grads]) - eager).norm() / eager.norm())


@pytest.mark.parametrize(("model_type", "kinds"), [
    ("mistral", None),
    ("gemma3_text", ["sliding_attention"] * 2),
    ("gemma3_text", ["sliding_attention", "full_attention"]),
])  # fmt: skip
def test_a_layer_with_a_window_is_one_graph(
    model_type: str, kinds: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile = torch.compile
    eagerly = lambda f, **how: compile(f, backend="eager", dynamic=how["dynamic"])  # noqa: E731
    monkeypatch.setattr(torch, "compile", eagerly)
    torch.manual_seed(0)
    config = tiny_config(model_type, window=4)
    if kinds is not None:
        config.layer_types = kinds
    policy = Policy(config, torch.float32, compiles=True)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.05)
    stats, batch = torch._dynamo.utils.counters["stats"], coincidences(random.Random(0))
    before = stats["unique_graphs"]
    with torch.compiler.set_stance("default"):  # another test in this process may have left another
        score_and_train(policy, batch, check=True)
    graphs = 2 * len({*(kinds or [""])})  # with and without gradients
    assert policy.layout == PACKED and stats["unique_graphs"] - before == graphs
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_no_mix_of_lengths_is_compiled_anew(recompute):
    """In a process of its own: the compiler gives up on layers that other tests have made it compile."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        first, later, kinds, distance = pool.submit(compilations, recompute).result(timeout=600)
    assert kinds == {False, True}
    assert first == 5  # layers with and without gradients, log-probs with and without entropy, their gradient
    assert later == first
    assert distance < 1e-5
