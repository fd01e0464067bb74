"""What a weight sync does to responses that are under way, and that each token's version is the one that made it."""

import json

import pytest
import torch

from instep.engines.sglang import KIND
from tests.e2e.commands import grpo_arguments, on_sglang, on_vllm, run

NUM_ROLLOUT = 5


def train(folder, mode, *more):
    hooks = ["--rollout-function-path", "tests.e2e.background_rollout.rollout", "--no-hook-trial"]
    hooks += ["--custom-rm-path", "tests.e2e.background_rollout.reward"]
    given = ["--pause-mode", mode, "--num-rollout", str(NUM_ROLLOUT), "--lr", "5e-3", *hooks]
    saves = ["--save-hf", str(folder / mode / "hf-{rollout_id}"), "--save-interval", "1"]
    done = run(grpo_arguments(folder, folder / mode, *given, *saves, *more), 400)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / mode / "background.json").read_text())


def load(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def log_probs_under(model, tokens):
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def numbers_of_versions(folder, mode, found):
    """By how many versions responses were made; every token's log-prob is that under the one which it claims, and not
    under others."""
    models = [load(folder / "hf"), *(load(folder / mode / f"hf-{i}") for i in range(NUM_ROLLOUT))]  # of version i + 1
    for tokens, ours, spans in found["rows"]:
        assert [s[1] for s in spans] == [0, *(s[2] for s in spans[:-1])] and spans[-1][2] == len(ours)
        ours = torch.tensor(ours)
        scores = [log_probs_under(model, tokens)[-len(ours) :] for model in models]
        for version, start, end in spans:
            gaps = [(score[start:end] - ours[start:end]).abs().max() for score in scores]
            assert gaps[int(version) - 1] < 1e-4, (version, start, end, gaps)
            if end - start > 20:
                assert all(gap > 1e-3 for i, gap in enumerate(gaps) if i != int(version) - 1), (version, gaps)
    assert mode != "wait" or not any(found["under_way"])
    return {len(spans) for _, _, spans in found["rows"]}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_responses_across_weight_syncs(long, mode):
    numbers = numbers_of_versions(long, mode, train(long, mode))
    assert (numbers == {1}) == (mode == "wait")  # with which every response ends before the weights change


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_responses_of_vllm_across_weight_syncs(long, mode):
    assert (numbers_of_versions(long, mode, train(long, mode, *on_vllm())) == {1}) == (mode == "wait")


@pytest.mark.sglang
@pytest.mark.sglang_router
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_responses_of_sglang_across_weight_syncs(long, mode):
    if mode == "keep" and not KIND.capabilities.version_spans:
        pytest.skip("SGLang from 0.5.19 on")
    assert (numbers_of_versions(long, mode, train(long, mode, *on_sglang())) == {1}) == (mode == "wait")
