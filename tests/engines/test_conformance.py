"""What the client relies on, whatever engine answers (design, section 4): log-probs, ends of responses, batches."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from instep.engines.kind import kind_of
from instep.engines.stops import find_stop
from instep.errors import EngineError
from tests.engines.conftest import both_heads
from tests.engines.oracle import EOS, PROMPT, ending, expected_log_probs, oracle, returned_log_probs
from tests.engines.running import MAX_MODEL_LEN, TOLERANCE, Engine, run_engine

# -- log-probs


@both_heads
def test_prompt_log_probs_equal_a_plain_forward(engine: Engine) -> None:
    tokens = [(7 * i * i + 3) % 290 + 3 for i in range(60)]
    want = oracle(engine, tokens).log_softmax(-1)
    got = engine.prompt_log_probs(tokens)
    assert len(got) == 59
    assert max(abs(got[i] - float(want[i, tokens[i + 1]])) for i in range(59)) < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_sampled_log_probs_are_those_at_the_sampling_temperature(engine: Engine, temperature: float) -> None:
    choice = engine.generate(PROMPT, max_tokens=80, temperature=temperature, logprobs=0, seed=5, ignore_eos=True)
    want = expected_log_probs(engine, choice, temperature)
    assert max(abs(a - b) for a, b in zip(returned_log_probs(choice), want, strict=True)) < TOLERANCE


def test_greedy_takes_the_likeliest_token_and_scores_it_at_temperature_one(engine: Engine) -> None:
    choice = engine.generate(PROMPT, max_tokens=40, temperature=0, logprobs=0, ignore_eos=True)
    tokens = PROMPT + choice["token_ids"]
    assert choice["token_ids"] == oracle(engine, tokens).argmax(-1)[len(PROMPT) - 1 : -1].tolist()
    want = expected_log_probs(engine, choice)
    assert max(abs(a - b) for a, b in zip(returned_log_probs(choice), want, strict=True)) < TOLERANCE


@pytest.mark.parametrize("limits", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.5}])
def test_truncated_sampling_is_renormalised_or_not(engine: Engine, limits: dict[str, float]) -> None:
    """Against a scalar oracle; tokens outside the kept set never appear. The kind says which log-probs it gives."""
    choice = engine.generate(PROMPT, max_tokens=60, temperature=0.8, logprobs=0, ignore_eos=True, seed=3, **limits)
    tokens = PROMPT + choice["token_ids"]
    probs = (oracle(engine, tokens) / 0.8).double().softmax(-1).tolist()
    for i, got in enumerate(returned_log_probs(choice), len(PROMPT)):
        row = sorted(enumerate(probs[i - 1]), key=lambda x: -x[1])
        row = row[: int(limits.get("top_k", 300))]
        total, kept, before = sum(p for _, p in row), {}, 0.0
        for token, p in row:
            if before < limits.get("top_p", 1.0):
                kept[token] = p
            before += p / (total if kind_of(engine.kind).renormalizes else 1.0)  # SGLang: a share of all tokens
        assert tokens[i] in kept
        share = sum(kept.values()) if kind_of(engine.kind).renormalizes else 1.0
        assert got == pytest.approx(math.log(kept[tokens[i]] / share), abs=1e-4)


def test_the_likeliest_tokens_come_after_the_sampled_one(engine: Engine) -> None:
    """So many entries in all, from the distribution that was sampled from, each token once."""
    if engine.kind == "sglang":
        pytest.skip("its wire asks for the sampled tokens only")
    choice = engine.generate(PROMPT, max_tokens=20, temperature=0.8, logprobs=4, ignore_eos=True, seed=3)
    want = (oracle(engine, PROMPT + choice["token_ids"]) / 0.8).log_softmax(-1)[len(PROMPT) - 1 : -1]
    for token, entry, scores in zip(choice["token_ids"], choice["logprobs"]["content"], want, strict=True):
        top = [(e["token_id"] if "token_id" in e else int(e["token"][9:]), e["logprob"]) for e in entry["top_logprobs"]]
        likely = [i for i in scores.topk(4).indices.tolist() if i != token]
        assert [i for i, _ in top] == [token, *likely][:4]
        assert all(abs(p - float(scores[i])) < TOLERANCE for i, p in top)


def test_the_likeliest_tokens_of_a_prompt_come_with_ranks(engine: Engine) -> None:
    params = {"max_tokens": 1, "prompt_logprobs": 3}
    status, reply = engine.call("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})
    assert status == 200 and reply["prompt_logprobs"][0] is None
    want = oracle(engine, PROMPT).log_softmax(-1)
    for token, scores, place in zip(PROMPT[1:], want, reply["prompt_logprobs"][1:], strict=False):
        rank = int((scores >= scores[token]).sum())
        ranks = {**{i: n for n, i in enumerate(scores.topk(3).indices.tolist(), 1)}, token: rank}
        assert {int(i): e["rank"] for i, e in place.items()} == ranks
        assert all(abs(e["logprob"] - float(scores[int(i)])) < TOLERANCE for i, e in place.items())


def test_tokens_follow_the_distribution(engine: Engine) -> None:
    """First tokens of 1024 seeds against the model's probabilities: chi-squared over the likely tokens."""
    probs = oracle(engine, PROMPT)[-1].softmax(-1)
    counts = torch.zeros_like(probs)
    for start in range(0, 1024, 64):
        for choice in engine.choices(PROMPT, max_tokens=1, n=64, seed=1000 + start):
            counts[choice["token_ids"][0]] += 1
    assert counts.sum() == 1024
    likely = probs * 1024 > 5
    want, got = probs[likely] * 1024, counts[likely]
    degrees = int(likely.sum())
    assert float(((got - want) ** 2 / want).sum()) < degrees + 5 * math.sqrt(2 * degrees)


# -- where a response ends


def test_eos_is_kept_and_default_length_fills_the_context(engine: Engine) -> None:
    choices = engine.choices(PROMPT, n=32, seed=1, temperature=1.5)
    stopped = [c for c in choices if c["finish_reason"] == "stop"]
    assert stopped
    for choice in stopped:
        assert choice["token_ids"].index(EOS) == len(choice["token_ids"]) - 1
        assert ending(engine, choice, None)
    for choice in choices:
        if choice["finish_reason"] == "length":
            assert len(choice["token_ids"]) == room(engine) - len(PROMPT) and EOS not in choice["token_ids"]


def test_ignore_eos_runs_to_the_end_of_the_context(engine: Engine) -> None:
    choice = engine.generate(PROMPT, ignore_eos=True, temperature=1.5, seed=1)
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == room(engine) - len(PROMPT)


def room(engine: Engine) -> int:
    """The most tokens of a sequence: SGLang leaves the last two places of its context empty."""
    return MAX_MODEL_LEN - 2 * (engine.kind == "sglang")


def test_max_tokens_beyond_the_context_is_capped(engine: Engine) -> None:
    prompt = [5] * (room(engine) - 10)  # SGLang takes no prompt that leaves fewer
    choice = engine.generate(prompt, max_tokens=50, ignore_eos=True)
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 10


def test_stop_token_ids(engine: Engine) -> None:
    params = {"max_tokens": 12, "temperature": 0, "ignore_eos": engine.kind != "sglang"}  # which would ignore both
    free = engine.generate(PROMPT, **params)["token_ids"]
    choice = engine.generate(PROMPT, **params, stop_token_ids=[free[4]])
    assert choice["token_ids"] == free[: free.index(free[4]) + 1]
    assert ending(engine, choice, free[4])


def test_stop_strings_stay_in_the_tokens_and_leave_the_text(engine: Engine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(engine.path)
    params = {"max_tokens": 60, "ignore_eos": True, "seed": 11}
    free = engine.generate(PROMPT, **params)["token_ids"]
    stop = next(s for i in range(20, 55) if "\ufffd" not in (s := tokenizer.decode(free[i : i + 3])) and len(s) > 2)
    choice = engine.generate(PROMPT, stop=[stop, "never to be seen"], **params)
    kept = choice["token_ids"]
    assert ending(engine, choice, stop)
    assert kept == free[: len(kept)] and stop in tokenizer.decode(kept) and stop not in tokenizer.decode(kept[:-1])
    texts = tokenizer.decode(kept), tokenizer.decode(kept[:-1])
    # As the client finds it where the engine is silent.
    assert find_stop(*texts, [stop, "never to be seen"]) == (texts[0].index(stop), stop)
    body = {"prompt": PROMPT, "stop": stop, "return_token_ids": True, **params}
    completion = engine.ok("/v1/completions", body)["choices"][0]
    assert completion["token_ids"] == kept
    assert completion["text"] == tokenizer.decode(kept, skip_special_tokens=True).split(stop)[0]


def test_min_tokens_passes_over_stop_strings(engine: Engine) -> None:
    if engine.kind == "sglang":
        with pytest.raises(EngineError, match="before min_tokens"):
            engine.generate(PROMPT, stop="x", min_tokens=3)
        return
    tokenizer = AutoTokenizer.from_pretrained(engine.path)
    params = {"max_tokens": 60, "ignore_eos": True, "seed": 11}
    free = engine.generate(PROMPT, **params)["token_ids"]
    texts = [tokenizer.decode(free[:n], skip_special_tokens=True).rstrip("\ufffd") for n in range(61)]
    stop = max((c for c in texts[-1] if c.isascii()), key=texts[-1].count)
    num_passed = 1 + next(n for n in range(61) if stop in texts[n])
    num = next(n for n in range(num_passed + 1, 61) if stop in texts[n][len(texts[n - 1]) :])
    params |= {"stop": stop, "min_tokens": num_passed}
    assert engine.generate(PROMPT, **params)["token_ids"] == free[:num]
    completion = engine.ok("/v1/completions", {"prompt": PROMPT, **params})["choices"][0]
    assert completion["stop_reason"] == stop
    assert completion["text"] == texts[num][: texts[num].index(stop, len(texts[num - 1]))]


def test_min_tokens(engine: Engine) -> None:
    free = engine.generate(PROMPT, max_tokens=1, temperature=0)["token_ids"]
    stops = [free[0], EOS]
    choice = engine.generate(PROMPT, max_tokens=40, temperature=0, min_tokens=6, stop_token_ids=stops, logprobs=0)
    assert len(choice["token_ids"]) >= 6 and not set(choice["token_ids"][:6]) & set(stops)
    row = oracle(engine, PROMPT)[-1]
    row[stops] = -torch.inf
    assert returned_log_probs(choice)[0] == pytest.approx(float(row.log_softmax(-1).max()), abs=TOLERANCE)


# -- many at once


def test_n_responses_of_one_prompt(engine: Engine) -> None:
    first, second = (engine.choices(PROMPT, n=6, max_tokens=20, seed=9) for _ in range(2))
    tokens = [c["token_ids"] for c in first]
    assert [c["index"] for c in first] == list(range(6)) and len(set(map(tuple, tokens))) == 6
    assert tokens == [c["token_ids"] for c in second]
    alone = [engine.generate(PROMPT, max_tokens=20, seed=9 + i)["token_ids"] for i in range(6)]
    assert tokens == alone  # what the client relies on when it asks for a group at once


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(engine: Engine) -> None:
    prompts = [[40 + i, *PROMPT[: 1 + i % 5]] for i in range(10)]
    params = [{"max_tokens": 20 + 5 * i, "temperature": 0.7 + 0.08 * i, "seed": 100 + i} for i in range(10)]
    params[3] |= {"top_k": 7}
    params[5] |= {"temperature": 0}
    alone = [engine.generate(p, ignore_eos=True, **kw)["token_ids"] for p, kw in zip(prompts, params, strict=True)]
    futures = [engine.submit(p, ignore_eos=True, **kw) for p, kw in zip(prompts, params, strict=True)]
    together = [f.result(timeout=60)["token_ids"] for f in futures]
    assert together == alone
    assert [len(t) for t in alone] == [20 + 5 * i for i in range(10)]


def test_batch_invariant_bits_do_not_depend_on_the_batch(engine: Engine, tmp_path: Path) -> None:
    """Log-probs to the last bit, whatever shares the batch and in whatever order it came: what exact resume needs."""
    if engine.kind != "embedded":
        pytest.skip("a mode of the embedded engine")
    prompts = [[40 + i % 5, *PROMPT[: 1 + i % 5]] for i in range(14)]
    params = [{"max_tokens": 10 + 3 * i, "seed": i, "logprobs": 0, "ignore_eos": True} for i in range(14)]
    options = ("--batch-invariant", "--max-num-seqs", "8")
    with run_engine(engine.kind, engine.path, engine.hf, tmp_path / "log", *options) as fixed:
        alone = [fixed.generate(p, **kw) for p, kw in zip(prompts, params, strict=True)]
        for order in (range(14), range(13, -1, -1)):
            futures = {i: fixed.submit(prompts[i], **params[i]) for i in order}
            assert [futures[i].result(timeout=60) for i in range(14)] == alone


def test_without_a_seed_responses_differ(engine: Engine) -> None:
    assert engine.generate(PROMPT, max_tokens=20)["token_ids"] != engine.generate(PROMPT, max_tokens=20)["token_ids"]


def test_more_requests_than_slots(engine: Engine) -> None:
    body = {"prompt": [[50 + i] for i in range(5)], "n": 30, "max_tokens": 4, "ignore_eos": True, "seed": 2}
    reply = engine.ok("/v1/completions", body | {"return_token_ids": True})
    choices = reply["choices"]
    assert [c["index"] for c in choices] == list(range(150))
    assert [c["prompt_token_ids"] for c in choices] == [[50 + i] for i in range(5) for _ in range(30)]
    assert all(len(c["token_ids"]) == 4 for c in choices)
