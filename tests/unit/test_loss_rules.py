"""Combinations of the losses' flags: what is refused, with which words; what follows from what is not given."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.arguments.algorithm.loss_rules import RULES
from instep.arguments.parse import parse
from instep.errors import ConfigError
from tests.assets import make_prompts


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    make_prompts(tmp_path / "train.jsonl", 8)
    line = f"--hf-checkpoint {tmp_path}/hf --prompt-data {tmp_path}/train.jsonl --rollout-batch-size 4 --num-rollout 3 "
    line += "--rm-type math --label-key label "
    line += "--actor-num-gpus-per-node 1 --device cpu --rollout-max-response-len 8 --input-key prompt"
    return line.split()


REFUSED = [
    ("--eps-clip 1.5", "never clip below"),
    ("--advantage-estimator gspo --eps-clip 1", "never clip below"),
    ("--advantage-estimator cispo --eps-clip 1.1", "1 - eps_clip, which must be at least 0"),
    ("--advantage-estimator sapo --eps-clip 0.2", "smooth gate"),
    ("--advantage-estimator sapo --eps-clip-c 3", "smooth gate"),
    ("--advantage-estimator cispo --eps-clip-c 3", "no second bound"),
    ("--advantage-estimator dppo_tv --eps-clip-high 1", "almost no token would be masked"),
    ("--advantage-estimator dppo_kl --eps-clip 1", "almost no token would be masked"),
    ("--advantage-estimator dppo_tv --use-tis", "nothing to correct"),
    ("--advantage-estimator dppo_kl --rollout-top-k 9", "truncated distribution"),
    ("--advantage-estimator dppo_tv --sapo-tau-neg 2", "without SAPO's gate"),
    ("--sapo-tau-neg 2", "without SAPO's gate"),
    ("--constant-loss-length 100 --calculate-per-token-loss", "one denominator"),
    ("--use-tis --use-rollout-logprobs", "nothing to correct"),
    ("--use-rs --use-rollout-logprobs", "nothing to correct"),
    ("--use-rs --rollout-top-p 0.9", "truncated distribution"),
    ("--use-tis --tis-clip-low 3", "no weight is between"),
    ("--use-tis --tis-mode truncate --tis-clip-low 0.5", "upper bound only"),
    ("--use-rs --rs-lower-bound 3", "everything would be rejected"),
    ("--tis-level sequence", "without --use-tis"),
    ("--tis-mode mask --use-rs", "without --use-tis"),
    ("--custom-tis-function-path tests.loss_hooks.icepop", "without --use-tis"),
    ("--tis-clip 3", "without --use-tis or --use-rs"),
    ("--tis-upper-bound 3", "without --use-tis or --use-rs"),
    ("--use-tis --rs-veto-threshold 1e-4", "without --use-rs"),
    ("--opsm-delta 0.1", "without --use-opsm"),
    ("--use-opsm", "no sample is masked"),
    ("--gspo-gradient sequence", "no ratio per response"),
    ("--loss-type custom_loss", "it needs the loss"),
    ("--custom-loss-function-path tests.loss_hooks.ppo_loss", "without --loss-type custom_loss"),
    (
        "--loss-type custom_loss --custom-loss-function-path tests.loss_hooks.ppo_loss --actor-num-gpus-per-node 2 "
        "--tensor-model-parallel-size 2",
        "tensor parallelism splits",
    ),
    (
        "--loss-type custom_loss --custom-loss-function-path tests.loss_hooks.ppo_loss --actor-num-gpus-per-node 2 "
        "--context-parallel-size 2",
        "but context parallelism splits them",
    ),
    ("--loss-type custom_loss --custom-loss-function-path tests.loss_hooks.ppo_loss --use-opsm", "policy loss"),
    ("--tis-batch-normalize", "the other samples of the micro-batch"),
]


@pytest.mark.parametrize(("extra", "words"), REFUSED, ids=lambda x: x if x.startswith("--") else "")
def test_refused(argv: list[str], extra: str, words: str):
    with pytest.raises(ConfigError) as error:
        parse(argv + extra.split(), "train")
    assert words in str(error.value)


def test_each_rule_is_reached_by_a_test(argv: list[str]):
    reached = set()
    for extra, _ in REFUSED:
        with pytest.raises(ConfigError) as error:
            parse(argv + extra.split(), "train")
        reached |= {rule.what for rule in RULES if rule.what in str(error.value)}
    assert reached == {rule.what for rule in RULES if rule.refused}


ACCEPTED = [
    ("", (0.2, 0.2)),
    ("--eps-clip 0.1", (0.1, 0.1)),
    ("--eps-clip-high 0.28", (0.2, 0.28)),
    ("--advantage-estimator gspo", (3e-4, 4e-4)),
    ("--advantage-estimator gspo --eps-clip-high 5e-4", (3e-4, 5e-4)),
    ("--advantage-estimator gspo --eps-clip 0.2", (0.2, 0.2)),
    ("--advantage-estimator gspo --eps-clip-c 3", (3e-4, 4e-4)),
    ("--advantage-estimator cispo", (1.0, 4.0)),
    ("--advantage-estimator cispo --eps-clip 0.2 --eps-clip-high 0.3", (0.2, 0.3)),
    ("--advantage-estimator dppo_tv", (0.15, 0.15)),
    ("--advantage-estimator dppo_kl --eps-clip-c 5", (0.05, 0.05)),
    ("--advantage-estimator dppo_tv --eps-clip 0.2 --eps-clip-high 0.3", (0.2, 0.3)),
]


@pytest.mark.parametrize(("extra", "bounds"), ACCEPTED, ids=lambda x: x if isinstance(x, str) else "")
def test_clip_bounds(argv: list[str], extra: str, bounds: tuple[float, float]):
    args = parse(argv + extra.split(), "train")
    assert (args.eps_clip, args.eps_clip_high) == bounds


def test_corrections(argv: list[str]):
    line = "--use-tis --tis-level geometric --tis-mode mask --tis-lower-bound 0.99 --tis-clip 1.01 --use-rs --rs-level "
    line += "sequence --rs-veto-threshold 1e-4 --advantage-estimator sapo --sapo-tau-neg 1.1 --use-opsm --opsm-delta .1"
    line += " --num-steps-per-rollout 2"
    args = parse(argv + line.split(), "train")
    assert (args.tis_clip_low, args.tis_clip) == (args.tis_lower_bound, args.tis_upper_bound) == (0.99, 1.01)
    assert (args.rs_lower_bound, args.rs_upper_bound) == (0.99, 1.01)
    assert args.view({}).tis_batch_normalize is False and args.view({}).rs_level == "sequence"


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        ("--precision bf16 --partial-rollout", True),
        ("--device cuda --use-rollout-logprobs", True),
        ("--precision bf16 --partial-rollout --use-tis", False),
        ("--precision bf16 --partial-rollout --eps-clip 0.02", False),
        ("--precision bf16", False),
        ("--device cpu --partial-rollout", False),
    ],
)
def test_gspo_with_log_probs_that_bf16_has_rounded_is_noted(argv: list[str], words: str, noted: bool):
    notes = parse([*argv, "--advantage-estimator", "gspo", *words.split()]).notes
    assert any("narrow" in note and "87 %" in note for note in notes) == noted, notes
    assert not any("narrow" in note for note in parse([*argv, *words.split()]).notes)
