import pytest
import torch
import torch.distributed as dist

from instep.training.log_probs import _CompiledLogProbs, in_chunks, log_probs_and_entropy
from tests.distributed.helpers import run_ranks
from tests.live_bytes import LiveBytes
from tests.ranks_in_threads import one_of

VOCAB, PADDED, NUM_TOKENS = 13, 20, 6


def make_inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(NUM_TOKENS, PADDED, generator=generator, dtype=dtype) * 3
    targets = torch.tensor([0, 12, 5, 7, 8, 12])
    temperature = torch.tensor([1.0, 0.7, 1.3, 1.0, 2.0, 0.5], dtype=dtype)
    weights = torch.randn(2, NUM_TOKENS, generator=generator, dtype=dtype)
    return logits, targets, temperature, weights


def oracle(logits, targets, temperature, weights, with_entropy):
    logits = logits.clone().requires_grad_()
    log_p = torch.log_softmax(logits[:, :VOCAB] / temperature[:, None], -1)
    log_probs = log_p[torch.arange(NUM_TOKENS), targets]
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = (log_probs * weights[0]).sum() + (entropy * weights[1]).sum() * with_entropy
    return log_probs.detach(), entropy.detach(), torch.autograd.grad(loss, logits)[0]


def ours(logits, targets, temperature, weights, with_entropy, tp_group=None):
    logits = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        logits, targets, temperature, vocab_size=VOCAB, tp_group=tp_group, with_entropy=with_entropy
    )
    loss = (log_probs * weights[0]).sum()
    if with_entropy:
        loss = loss + (entropy * weights[1]).sum()
    else:
        assert entropy is None
    return log_probs.detach(), entropy.detach() if with_entropy else None, torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_equals_log_softmax_and_its_autograd_in_float64(with_entropy):
    expected = oracle(*make_inputs(), with_entropy)
    log_probs, entropy, grad = ours(*make_inputs(), with_entropy)
    torch.testing.assert_close(log_probs, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, expected[2], rtol=1e-12, atol=1e-12)
    assert torch.all(grad[:, VOCAB:] == 0)
    if with_entropy:
        torch.testing.assert_close(entropy, expected[1], rtol=1e-12, atol=1e-12)


def test_float32_and_bfloat16_logits_give_float32_log_probs():
    logits, targets, temperature, weights = make_inputs(torch.float32)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-6)):
        rounded = logits.to(dtype)
        expected = oracle(rounded.double(), targets, temperature.double(), weights.double(), True)
        log_probs, entropy, grad = ours(rounded, targets, temperature, weights, True)
        assert log_probs.dtype is entropy.dtype is torch.float32 and grad.dtype is dtype
        torch.testing.assert_close(log_probs.double(), expected[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(entropy.double(), expected[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_formulas_that_are_compiled_on_gpus_are_those_of_their_slow_twin(with_entropy: bool):
    logits, targets, temperature, weights = make_inputs(torch.float32)
    logits[:, 3] = -torch.inf if not with_entropy else logits[:, 3]
    _, _, expected = ours(logits, targets, temperature, weights, with_entropy)
    want, want_entropy = log_probs_and_entropy(
        logits, targets, temperature, vocab_size=VOCAB, with_entropy=with_entropy
    )
    logits.requires_grad_()
    with torch.compiler.set_stance("force_eager"):
        log_probs, entropy = _CompiledLogProbs.apply(logits, targets, temperature, VOCAB, with_entropy)
        loss = (log_probs * weights[0]).sum() + ((entropy * weights[1]).sum() if with_entropy else 0)
        grad = torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(log_probs, want)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)
    if with_entropy:
        torch.testing.assert_close(entropy, want_entropy)


def test_gradients_survive_a_second_backward_and_a_single_used_output():
    logits, targets, temperature, _ = make_inputs()
    logits.requires_grad_()
    log_probs, entropy = log_probs_and_entropy(logits, targets, temperature, vocab_size=VOCAB, with_entropy=True)
    first = torch.autograd.grad(entropy.sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(entropy.sum(), logits, retain_graph=True)[0], first)
    both = torch.autograd.grad(entropy.sum() + log_probs.sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(both, first + torch.autograd.grad(log_probs.sum(), logits)[0])


def _tp_rank(with_entropy):
    logits, *rest = make_inputs()
    local = logits.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    return ours(local, *rest, with_entropy, tp_group=dist.group.WORLD)


@pytest.mark.parametrize("world_size, with_entropy", [(2, False), (4, True)])
def test_vocab_parallel_equals_one_rank(world_size, with_entropy):
    """With 4 ranks of 5 columns the last rank holds padding only."""
    expected = oracle(*make_inputs(), with_entropy)
    results = run_ranks(_tp_rank, world_size, with_entropy)
    for log_probs, entropy, _ in results:
        torch.testing.assert_close(log_probs, expected[0], rtol=1e-12, atol=1e-12)
        if with_entropy:
            torch.testing.assert_close(entropy, expected[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[2] for r in results], 1), expected[2], rtol=1e-12, atol=1e-12)


def test_a_loss_may_change_log_probs_in_place():
    logits, targets, temperature, _ = make_inputs()
    grads = []
    for change in (lambda x: x.exp(), lambda x: x.exp_()):
        logits = logits.detach().requires_grad_()
        log_probs, _ = log_probs_and_entropy(logits, targets, temperature, vocab_size=VOCAB)
        assert not log_probs._is_view()
        grads.append(torch.autograd.grad(change(log_probs).sum(), logits)[0])
    assert torch.equal(*grads)


CHUNKS = {3: 0, 4: 0, 5: 1, 9: 5}  # how many of them are computed again
FAST = [(1, torch.bfloat16, 3), (1, torch.bfloat16, 5), (1, torch.float32, 5)]
FAST += [(2, torch.bfloat16, 5), (2, torch.float32, 3)]  # the others take seconds each, and are like these


@pytest.mark.parametrize(
    "ranks, dtype, num_chunks, again",
    [
        pytest.param(ranks, dtype, num, again, marks=() if (ranks, dtype, num) in FAST else pytest.mark.slow)
        for ranks in (1, 2)
        for dtype in (torch.bfloat16, torch.float32)
        for num, again in CHUNKS.items()
    ],
)
def test_the_head_keeps_8_bytes_for_each_logit_of_a_chunk_and_needs_as_much(dtype, ranks, num_chunks, again):
    """Sizes of a real model on the device `meta`, where every tensor has its size and nothing is computed."""
    vocab, width, num_logits = 151936, 64, 2**28
    size = num_logits * ranks * 15 // (16 * vocab)
    if dtype is torch.float32:
        again = num_chunks - 2  # of 4 bytes

    calls = []

    def head(hidden, targets, temperature, with_entropy):
        calls.append(len(hidden))
        group = dist.group.WORLD if ranks > 1 else None
        return log_probs_and_entropy(
            hidden @ weight.T, targets, temperature, vocab_size=vocab, tp_group=group, with_entropy=with_entropy
        )

    with one_of(ranks), LiveBytes() as live, torch.device("meta"):
        weight = torch.empty(vocab // ranks, width, dtype=dtype)
        num_tokens = num_chunks * size
        hidden = torch.empty(num_tokens, width, dtype=dtype, requires_grad=True)
        targets, temperature = torch.empty(num_tokens, dtype=torch.int64), torch.empty(num_tokens)
        before = live.now
        where = dict(num_logits=num_logits * ranks, vocab_size=vocab)
        log_probs, entropy = in_chunks(head, hidden, targets, temperature, True, **where)
        kept = live.now - before
        (log_probs + entropy).sum().backward()
    assert calls == [size] * (num_chunks + again)
    most, chunk = 8 * num_logits, size * vocab // ranks * dtype.itemsize
    small = 10 * num_tokens * 8 + 2 * hidden.nbytes
    assert (num_chunks - again) * chunk <= kept <= min(most, (num_chunks - again) * chunk) + small
    assert live.peak - before <= kept + min(1, dtype.itemsize / 4 + 0.05) * most + small
