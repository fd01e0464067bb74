"""Router replay from the engine to the trainer (R3): whole runs, in bfloat16, where routers of the two would differ."""

import json
from pathlib import Path

import numpy as np
import pytest

from instep.controller.dumps import load_rollout
from tests import forks
from tests.assets import make_prompts
from tests.e2e.commands import grpo_arguments, on_sglang, run
from tests.families import make_family

pytestmark = pytest.mark.slow
EP2 = ["--rollout-backend", "embedded", "--actor-num-gpus-per-node", "2", "--expert-model-parallel-size", "2"]


def gaps(folder: Path, name: str, *flags: str) -> list[tuple[float, float]]:
    """The largest and the mean gap between the log-probs of engine and trainer in each step of a run."""
    flags = ("--train-backend", "megatron", "--vllm-max-model-len", "128", *flags)
    done = run(grpo_arguments(folder, folder / name, *flags), 300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [(r["train/log_prob_gap_max"], r["train/log_prob_gap_mean"]) for r in rows if "train/log_prob_gap_max" in r]


def compare(
    folder: Path, *flags: str, family: str = "qwen3_moe", **sizes: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """A run with replay, whose samples are trained on again: with the trainer's choices, and with the engine's.

    Returns the largest and the mean gap with replay, and without it.
    """
    make_family(family, folder / "hf", **sizes)
    make_prompts(folder / "train.jsonl", 16)
    template, common = str(folder / "{rollout_id}.pt"), [*flags, "--precision", "bf16", "--num-rollout", "1"]
    dumped = ["--save-debug-rollout-data", template, "--use-rollout-routing-replay"]
    ((largest, mean),) = gaps(folder, "with", *common, *dumped)
    ((own_largest, own_mean),) = gaps(folder, "without", *common, "--load-debug-rollout-data", template)
    print(f"gap with replay {mean:.4f}, at most {largest:.4f}; without {own_mean:.4f}, at most {own_largest:.4f}")
    again = ["--load-debug-rollout-data", template, "--use-rollout-routing-replay"]
    ((again_largest, again_mean),) = gaps(folder, "again", *common, *again)
    assert (again_largest, again_mean) == pytest.approx((largest, mean), rel=1e-3)
    return (largest, mean), (own_largest, own_mean)


OF_SGLANG = [pytest.mark.sglang, pytest.mark.sglang_router]
# Few tokens of a random model have a close choice: more experts and tokens, and experts that weigh more.
CLOSE = {"n_routed_experts": 32, "routed_scaling_factor": 20.0}


@pytest.mark.parametrize(
    ("engines", "family", "sizes", "share"),
    [
        pytest.param(EP2, "qwen3_moe", {}, 0.8, id="embedded-qwen3_moe"),
        pytest.param(EP2, "deepseek_v3", CLOSE, 0.8, id="embedded-deepseek_v3"),
        pytest.param(EP2, "qwen3_next", {"num_experts": 32}, 0.8, id="embedded-qwen3_next"),
        pytest.param(EP2, "qwen3_5_moe", {"num_experts": 32}, 0.8, id="embedded-qwen3_5_moe"),
        pytest.param(on_sglang(), "qwen3_moe", {}, 1.0, id="sglang", marks=OF_SGLANG),
    ],
)
def test_the_gap_is_smaller_with_the_engines_experts(engines, family, sizes, share, tmp_path):
    flags = ["--rollout-max-response-len", "64"]
    with forks.using(forks.SERVER):  # a process with SGLang's stand-ins has no Megatron
        (largest, mean), (own_largest, own_mean) = compare(tmp_path, *engines, *flags, family=family, **sizes)
    assert mean < share * own_mean and largest < 0.5 * own_largest


def test_the_experts_of_partial_rollouts_and_several_steps(tmp_path):
    make_family("qwen3_moe", tmp_path / "hf")
    make_prompts(tmp_path / "train.jsonl", 16)
    flags = ["--partial-rollout", "--over-sampling-batch-size", "8", "--num-steps-per-rollout", "2", "--use-kl-loss"]
    flags += ["--rollout-max-response-len", "64", "--num-rollout", "3", "--ref-load", str(tmp_path / "hf")]
    flags += ["--save-debug-rollout-data", str(tmp_path / "{rollout_id}.pt"), "--use-rollout-routing-replay"]
    assert gaps(tmp_path, "run", *EP2, *flags)
    samples = [s for i in range(3) for group in load_rollout(tmp_path / f"{i}.pt").samples for s in group]
    assert any(len(s.weight_versions) > 1 for s in samples)
    for sample in samples:
        rows = sample.rollout_routed_experts
        assert rows.shape == (len(sample.tokens) - 1, 2, 2) and (rows[..., 0] != rows[..., 1]).all()
        assert rows.dtype == np.uint8 and rows.max() < 4
