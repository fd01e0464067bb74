"""Routed experts from an engine's answer to a batch: nothing is lost, and what is missing is named."""

from __future__ import annotations

import asyncio
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from instep.data.batch import build_batch
from instep.engines.embedded.model import Runner
from instep.engines.embedded.protocol import Request
from instep.engines.wire import Completion
from instep.errors import RolloutError
from instep.models import routes
from instep.rollout import group_request, vllm_rollout
from instep.training.megatron.replay import has_twice
from instep.types import Sample, Status
from instep_engine import answers


def rows_of(tokens: list[int]) -> np.ndarray:
    """Two different experts of 300 for each token in 3 layers, which tell the token."""
    return np.array([[[token, token + 1 + layer] for layer in range(3)] for token in tokens])


def asked(prompt: list[int], response: list[int], start: int = 0) -> np.ndarray:
    """What an engine answers: all tokens but the last, from `start` on."""
    return rows_of([*prompt, *response][start:-1])


def make_sample() -> Sample:
    """A response of three parts: one that was aborted, the rest of it, and a turn after a tool's answer."""
    sample = Sample(group_index=0, index=0, tokens=[7, 8], reward=1.0)
    sample.append_response_tokens([9, 10], [-1.0, -1.0], routed_experts=asked([7, 8], [9, 10]))
    changed = asked([7, 8, 9, 10], [11]) + 100  # the engine has computed all of it again, under other weights
    changed[-1:] = rows_of([10])
    sample.append_response_tokens([11], [-1.0], routed_experts=changed)
    sample.append_response_tokens([200, 201], trainable=False)
    prompt = list(sample.tokens)
    sample.append_response_tokens([290], [-1.0], routed_experts=asked(prompt, [290], len(prompt) - 3))
    return sample


def test_a_sample_keeps_the_experts_that_each_token_was_sampled_under():
    sample = make_sample()
    assert np.array_equal(sample.rollout_routed_experts, rows_of(sample.tokens[:-1]))
    assert sample.rollout_routed_experts.dtype == np.uint8 and len(sample.tokens) == 8
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert np.array_equal(again.rollout_routed_experts, sample.rollout_routed_experts)
    with pytest.raises(ValueError, match=r"1 rows of \(3, 2\) for 2 tokens"):
        sample.append_response_tokens([5, 6], [-1.0, -1.0], routed_experts=rows_of([5]))
    assert routes.as_routes(rows_of([299])).dtype == np.int16
    for wrong in ([1, 2], np.zeros((1, 1, 1)), np.full((1, 1, 1), -1)):
        with pytest.raises(ValueError, match="routed experts are"):
            routes.as_routes(wrong)
    for text in ("", "x", "eA=="):
        with pytest.raises(ValueError):
            routes.decode(text)


def test_the_experts_of_tokens_that_were_cut_go_with_them():
    sample = make_sample()
    sample.tokens, sample.response_length = sample.tokens[:-2], 4  # at a tool's call
    sample.loss_mask, sample.rollout_log_probs = sample.loss_mask[:4], sample.rollout_log_probs[:4]
    sample.append_response_tokens([50, 51, 52], trainable=False)
    assert np.array_equal(sample.rollout_routed_experts, rows_of([7, 8, 9, 10, 11]))
    prompt = list(sample.tokens)
    sample.append_response_tokens([60, 61], [-1.0, -1.0], routed_experts=asked(prompt, [60, 61], 5))
    assert np.array_equal(sample.rollout_routed_experts, rows_of(sample.tokens[:-1]))
    sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs = [70, 71, 72], 0, None, None
    sample.append_response_tokens([73], [-1.0], routed_experts=asked([70, 71, 72], [73]))  # compacted to a new prompt
    assert np.array_equal(sample.rollout_routed_experts, rows_of([70, 71, 72]))
    with pytest.raises(ValueError, match="for -1 tokens without a route, after 3 rows"):
        routes.extended(rows_of([1, 2, 3]), rows_of([4]), 3)


@pytest.mark.parametrize(
    ("cut", "start", "evaluation"),
    [
        (dict(tokens=[1, 2], response_length=0), 0, False),
        (dict(tokens=[7, 8, 9], response_length=1), 2, False),
        (dict(tokens=[1, 2], response_length=0), 1, True),  # whose experts nobody reads
    ],
)
def test_an_engine_is_never_asked_for_rows_behind_the_prompt(cut, start, evaluation, monkeypatch):
    """vLLM 0.26 asserts that they begin within it, and its engine ends."""
    sample = Sample(tokens=[7, 8])
    sample.append_response_tokens([9, 10, 11], routed_experts=asked([7, 8], [9, 10, 11]))
    sample.loss_mask = [1] * cut["response_length"]
    vars(sample).update(cut)

    async def answer(args, sample, params):
        assert params["routed_experts_prompt_start"] == start < len(sample.tokens)
        rows = asked(sample.tokens, [20, 21], start)
        return [Completion([20, 21], None, [], "stop", None, rows)]

    async def text(args, ids, **options):
        return ""

    monkeypatch.setattr(vllm_rollout, "ask", answer)
    monkeypatch.setattr(group_request, "decode", text)
    args = SimpleNamespace(use_rollout_routing_replay=True)
    asyncio.run(vllm_rollout.generate(args, sample, {}, evaluation=evaluation))
    if evaluation:
        assert sample.rollout_routed_experts is None and sample.tokens == [1, 2, 20, 21]
    else:
        assert np.array_equal(sample.rollout_routed_experts, rows_of([*cut["tokens"], 20]))


def test_a_batch_has_a_row_for_each_token_or_says_what_is_missing():
    sample = make_sample()
    sample.append_response_tokens([17, 18], trainable=False)  # whose experts nobody has asked for, nor needs
    sample.status = Status.COMPLETED
    batch = build_batch([[sample, make_sample()]], replays=True)
    first, second = batch.sample_columns["routed_experts"]
    assert np.array_equal(first, np.concatenate([rows_of(sample.tokens[:7]), *[rows_of(sample.tokens[6:7])] * 3]))
    assert np.array_equal(batch.select([1]).sample_columns["routed_experts"][0], second) and len(second) == 8
    assert "routed_experts" not in batch.without_routes().sample_columns
    assert "routed_experts" not in build_batch([[sample]]).sample_columns
    alone = Sample(group_index=0, index=1, tokens=[1, 2, 3], response_length=1, loss_mask=[0], reward=0.0)
    column = build_batch([[alone, sample]], replays=True).sample_columns["routed_experts"]
    assert np.array_equal(column[0], rows_of([7, 7, 7])) and np.array_equal(column[1], first)  # any model's experts do
    assert "routed_experts" not in build_batch([[alone]], replays=True).sample_columns
    sample.loss_mask[-1] = 1
    sample.rollout_log_probs[-1] = -1.0
    with pytest.raises(RolloutError, match="of 7 tokens are known, but 9") as error:
        build_batch([[sample]], replays=True)
    assert "--enable-return-routed-experts" in error.value.remedy
    sample.rollout_routed_experts = None
    with pytest.raises(RolloutError, match="of 0 tokens are known, but 9"):
        build_batch([[sample]], replays=True)


@pytest.mark.parametrize("tokens", [[1, 2], [1, 299]])
def test_answers_in_arrays_carry_them(tokens):
    choices = [
        {"token_ids": [5, 6], "log_probs": [-0.5, -1.0], "routed_experts": rows_of(tokens), "index": 0},
        {"token_ids": [7], "log_probs": [-0.5], "index": 1},
    ]
    first, second = answers.decode(answers.encode(choices))["choices"]
    assert np.array_equal(first.pop("routed_experts"), rows_of(tokens))
    assert first == {"token_ids": [5, 6], "log_probs": [-0.5, -1.0], "index": 0}
    assert second == choices[1]


@torch.inference_mode()
def test_the_embedded_engine_notes_the_experts_of_every_token():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=3, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, num_experts=6, num_experts_per_tok=2, mlp_only_layers=[1],
        attn_implementation="instep_embedded",
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    runner = Runner(model, 8, 64, records=True)
    sequences = [[1, 2, 3, 4, 5], [6, 7]]
    requests = [
        Request(id="", prompt=p, seed=0, max_tokens=9, stop=[], stop_ids=frozenset(), eos_ids=frozenset(),
                skip_special_tokens=True, wants_text=False) for p in (sequences[1], sequences[0], sequences[1])
    ]  # fmt: skip

    def note(tokens: list[int]) -> None:
        for request, rows, token in zip(requests, runner.routes, tokens, strict=True):
            request.add_routes(rows)
            request.tokens.append(token)

    runner.prefill(sequences, [1, 0, 1], 0)
    note([8, 9, 10])
    runner.decode([8, 9, 10], [3, 6, 3])
    note([11, 12, 13])
    whole = [[*r.prompt, *r.tokens] for r in requests]  # a pause has cleared the cache: all is computed again
    runner.prefill(whole, [0, 1, 2], 0)
    note([14, 15, 16])
    gates = {i: model.model.layers[i].mlp.gate for i in (0, 2)}
    for request in requests:
        chosen = {}
        hooks = [
            g.register_forward_hook(lambda _, a, out, i=i, c=chosen: c.update({i: out[2]})) for i, g in gates.items()
        ]
        model(torch.tensor([[*request.prompt, *request.tokens[:-1]]]), use_cache=False)
        noted = np.concatenate(request.routes)
        assert noted.shape == (len(request.prompt) + 2, 3, 2) and request.num_routes == len(noted)
        assert all(np.array_equal(noted[:, i], experts.numpy()) for i, experts in chosen.items())
        assert (noted[:, 1] == 0).all()
        for hook in hooks:
            hook.remove()
    with pytest.raises(ValueError, match="this model has no routed experts"):
        config.mlp_only_layers = [0, 1, 2]
        Runner(Qwen3MoeForCausalLM(config), 8, 64, records=True)


@pytest.mark.parametrize("kind", [np.uint8, np.int16])
def test_oracle_a_token_with_an_expert_twice_is_found(kind: type):
    """By sorting, whatever pair it is."""
    rng = np.random.default_rng(0)
    rows = np.argsort(rng.random((50, 3, 16)), -1)[..., :4].astype(kind)
    assert not has_twice(rows) and not has_twice(rows[:, [0, 2]]) and not has_twice(rows[:0])
    for one, other in itertools.combinations(range(4), 2):
        changed, token, layer = rows.copy(), rng.integers(50), rng.integers(3)
        changed[token, layer, other] = changed[token, layer, one]
        assert has_twice(changed) and (np.diff(np.sort(changed), axis=-1) == 0).any()
