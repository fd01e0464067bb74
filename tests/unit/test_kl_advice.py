"""The KL that alarms, remedies and documents recommend pulls the policy back to its reference, which k1 does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from instep.algorithms.catalog import KL_IN_LOSS
from instep.algorithms.losses.policy import PolicyLossConfig, policy_loss
from instep.arguments.algorithm.flags import ALGORITHM
from instep.arguments.parse import parse
from instep.observability.alarms import Limits, entropy_collapse
from tests.assets import make_prompts

DOCS = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))


def gradient_of_the_kl_term(logits: torch.Tensor, reference: torch.Tensor, **settings) -> torch.Tensor:
    """The expected gradient of the KL in the loss over the policy's own samples: each token counts with its
    probability, which carries no gradient, as samples carry none."""
    logits = logits.clone().requires_grad_()
    log_probs, n = logits.log_softmax(-1), len(logits)
    config = PolicyLossConfig(use_kl_loss=True, kl_loss_coef=1.0, **settings)
    weights, lengths = log_probs.detach().exp(), torch.tensor([n])
    old = log_probs.detach() if settings.get("use_unbiased_kl") else None
    nothing = torch.zeros(n, dtype=log_probs.dtype)
    policy_loss(
        log_probs, nothing, weights, lengths, config, old_log_probs=old, ref_log_probs=reference
    ).loss.backward()
    assert logits.grad is not None
    return logits.grad


def kl(logits: torch.Tensor, reference: torch.Tensor) -> float:
    log_probs = logits.log_softmax(-1)
    return float((log_probs.exp() * (log_probs - reference)).sum())


@pytest.fixture(params=range(3))
def policy(request) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy and log-probs of its reference, over 9 tokens."""
    generator = torch.Generator().manual_seed(request.param)
    logits, other = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    return logits, other.log_softmax(-1)


def test_k1_as_a_loss_has_no_expected_gradient(policy) -> None:
    assert gradient_of_the_kl_term(*policy, kl_loss_type="k1").abs().max() < 1e-12


def argv(folder: Path, words: str) -> list[str]:
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    (folder / "hf" / "model.safetensors").write_bytes(b"")
    make_prompts(folder / "train.jsonl", 4)
    line = f"--hf-checkpoint {folder}/hf --prompt-data {folder}/train.jsonl --rollout-batch-size 4 --num-rollout 3 "
    return (
        line + f"--rm-type math --actor-num-gpus-per-node 1 --device cpu --input-key prompt --label-key label {words}"
    ).split()


@pytest.mark.parametrize("words", [KL_IN_LOSS, "--use-kl-loss --kl-loss-coef 1e-3 --use-unbiased-kl"])
def test_what_is_recommended_pulls_back(policy, tmp_path, words) -> None:
    logits, reference = policy
    args = parse(argv(tmp_path, words), "train")
    assert args.notes == [] and args.use_kl_loss and args.kl_loss_coef > 0
    gradient = gradient_of_the_kl_term(
        logits, reference, kl_loss_type=args.kl_loss_type, use_unbiased_kl=args.use_unbiased_kl
    )
    before = kl(logits, reference)
    for _ in range(400):
        logits = logits - 0.5 * gradient
        gradient = gradient_of_the_kl_term(
            logits, reference, kl_loss_type=args.kl_loss_type, use_unbiased_kl=args.use_unbiased_kl
        )
    assert before > 0.1 and kl(logits, reference) < 0.3 * before


@pytest.mark.parametrize(
    "words, said",
    [
        ("--use-kl-loss --kl-loss-coef 1e-3", "expected gradient is 0"),
        ("--use-kl-loss --kl-loss-coef 1e-3 --kl-loss-type k1", "expected gradient is 0"),
        ("--use-kl-loss", "only reported"),
        ("--use-kl-loss --kl-loss-coef 0.0 --kl-loss-type low_var_kl", None),
        ("--kl-coef 1e-3", None),
    ],
)
def test_a_kl_that_holds_nothing_back_is_noted(tmp_path, words, said) -> None:
    notes = parse(argv(tmp_path, words), "train").notes
    assert [said in note for note in notes] == ([True] if said else [])
    assert all("low_var_kl" in note for note in notes)  # and what to do


def test_every_place_that_recommends_a_kl_in_the_loss_names_a_weight_and_an_estimator() -> None:
    """Documents, remedies and the alarm; words that only name the flag are not taken for advice."""
    alarm = entropy_collapse([{"train/entropy": v} for v in (1.0, 1.0, 1.0, 0.001)], Limits())
    assert KL_IN_LOSS in (alarm or "")
    lines = [line for doc in DOCS for line in doc.read_text().splitlines() if "--kl-loss-coef" in line]
    advised = [line for line in lines if re.search(r"--kl-loss-coef`? [0-9.]+e?-?[0-9]*", line)]
    assert len(advised) >= 8
    for line in advised:
        assert re.search(r"--kl-loss-coef`? 0[`,]|--kl-loss-type`? (k2|k3|low_var_kl)|--use-unbiased-kl", line), line
    flags = {flag.name: flag.help for flag in ALGORITHM.flags}
    assert "k1" in flags["--kl-loss-type"]
