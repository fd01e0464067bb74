"""With responses that go on through syncs, on several engines, every token is of the version that it claims."""

from __future__ import annotations

import json

import pytest
import torch

from tests.e2e import prefix_hits
from tests.e2e.commands import grpo_arguments, on_vllm, run
from tests.e2e.test_pause_modes import load, log_probs_under

NUM_ROLLOUT = 4


NEAR = 1e-4  # of log-probs


def moved(one, other):
    """The largest change of a weight. Steps whose groups have equal rewards change little."""
    return max(float((a - b).abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def gap_of_every_token(folder, mode, *more):
    """The largest gap of the log-probs of all tokens that are trained on to those under the trainer's weights of the
    version that each claims."""
    run_dir = folder / f"fresh-{mode}"
    flags = ["--max-staleness", "2", "--pause-mode", mode, "--num-rollout", str(NUM_ROLLOUT), "--lr", "5e-3"]
    flags += ["--rollout-max-response-len", "400", "--custom-rm-path", "tests.e2e.background_rollout.reward"]
    flags += ["--save-hf", str(run_dir / "hf-{rollout_id}"), "--save-interval", "1", "--rollout-num-gpus", "2"]
    flags += ["--save-debug-rollout-data", str(run_dir / "{rollout_id}.pt"), "--no-hook-trial"]
    done = run(["train-async", *grpo_arguments(folder, run_dir, *flags, *more)[1:]], 400)
    assert done.returncode == 0, done.stderr[-4000:]

    models = [load(folder / "hf"), *(load(run_dir / f"hf-{i}") for i in range(NUM_ROLLOUT))]  # of version i + 1
    num_tokens = num_mixed = 0
    largest = 0.0
    for rollout_id in range(NUM_ROLLOUT):
        for sample in torch.load(run_dir / f"{rollout_id}.pt", weights_only=True)["samples"]:
            ours, spans = torch.tensor(sample["rollout_log_probs"]), sample["weight_versions"]
            spans = [(int(s["version"]), s["start"], s["end"]) for s in spans]
            assert [s[1] for s in spans] == [0, *(s[2] for s in spans[:-1])] and spans[-1][2] == len(ours)
            num_mixed += len(spans) > 1
            for version, start, end in spans:
                assert rollout_id + 1 - 2 <= version <= rollout_id + 1  # the bound
                theirs = log_probs_under(models[version - 1], sample["tokens"])
                largest = max(largest, float((theirs[-len(ours) :][start:end] - ours[start:end]).abs().max()))
                num_tokens += end - start
            first, last = models[spans[0][0] - 1], models[spans[-1][0] - 1]
            start, end = spans[0][1:]
            if end - start >= 20 and moved(first, last) > 1e-3:  # the other version would have been told apart
                other = log_probs_under(last, sample["tokens"])[-len(ours) :][start:end]
                assert (other - ours[start:end]).abs().max() > 1e-3
    assert num_tokens > 2000 and num_mixed > 0
    return largest


def test_every_token_is_of_the_version_it_claims(long):
    assert gap_of_every_token(long, "keep") < NEAR


@pytest.mark.slow
def test_every_token_is_of_the_version_it_claims_after_aborts(long):
    assert gap_of_every_token(long, "abort") < NEAR


def gap_with_prefix_hits(folder, mode, *more):
    """The same, where each rollout has the prompts of the one before; and the tokens that each engine found cached."""
    rows = [{"prompt": [{"role": "user", "content": f"{i} " + "and " * 70}], "label": "1"} for i in range(2)]
    (folder / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gap = gap_of_every_token(folder, mode, "--prompt-data", str(folder / "same.jsonl"), *prefix_hits.FLAGS, *more)
    return gap, prefix_hits.of(folder / f"fresh-{mode}")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_every_token_of_vllm_is_of_the_version_it_claims(long, mode):
    gap, hits = gap_with_prefix_hits(long, mode, *on_vllm(2))
    assert gap < NEAR and len(hits) == 2 and min(hits) > 500


ADAPTER = ["--lora-rank", "4", "--weight-sync", "lora", "--lr", "2e-2"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_every_token_is_of_the_adapter_that_it_claims(long, engine):
    assert gap_of_every_token(long, "keep", *(on_vllm(2) if engine == "vllm" else ()), *ADAPTER) < NEAR
