"""`instep.train` in TRL's words against TRL 1.16.0 itself: the table of fields, the batches, the loss.

Run by `make test-peers`. The loss of a call is that of `GRPOTrainer._compute_loss` with the same fields, value and
gradient, in float64.
"""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any

import pytest

import instep
from instep.algorithms.losses.policy import PolicyLossConfig
from instep_neighbours.trl.config import as_flags
from instep_neighbours.trl.fields import FIELDS
from tests.assets import make_checkpoint
from tests.oracles import peers
from tests.oracles.test_oracle_peers import agreed_gradient, data, each_seed, trl_loss

pytestmark = pytest.mark.peers
ROWS = [{"prompt": "a"}] * 64
COMMON = {"output_dir": "unused", "report_to": "none", "bf16": False, "use_cpu": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "hf")


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def run_args(checkpoint: Path, folder: Path, **fields: Any) -> Any:
    given = {"device": "cpu", "run_dir": folder, "save_strategy": "no"} | fields
    return instep.Run(model=checkpoint, reward_funcs=reward, train_dataset=ROWS, **given).args


def test_oracle_the_table_has_every_field_of_the_wheel_with_its_default() -> None:
    def default_of(field: Any) -> Any:
        value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        return value.value if isinstance(value, enum.Enum) else value

    wheel = {field.name: default_of(field) for field in dataclasses.fields(peers.load("trl").GRPOConfig)}
    assert wheel == {field.name: field.default for field in FIELDS}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_accumulation_steps": 4, "num_generations": 4},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
        {"generation_batch_size": 32, "per_device_train_batch_size": 4},
        {"per_device_train_batch_size": 16, "learning_rate": 1e-5, "beta": 0.04},
        {"scale_rewards": False, "loss_type": "dr_grpo", "max_completion_length": 99},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "optim": "adamw_torch", "eval_strategy": "no"},
    ],
)
def test_oracle_a_config_object_says_what_its_fields_say(fields: dict[str, Any]) -> None:
    config = peers.load("trl").GRPOConfig(**COMMON, **fields)
    flags = as_flags("train", config, reward, ROWS, None, {}).flags
    assert flags == as_flags("train", None, reward, ROWS, None, COMMON | fields).flags
    assert flags["rollout_batch_size"] * config.num_generations == config.generation_batch_size
    steps = config.steps_per_generation // config.gradient_accumulation_steps
    assert flags["global_batch_size"] * steps == config.generation_batch_size


LOSSES: list[dict[str, Any]] = [
    {"loss_type": "grpo"},
    {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.28},
    {"loss_type": "dapo", "epsilon_high": 0.28},
    {"loss_type": "dr_grpo"},
    {"loss_type": "luspo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.1},
    {"loss_type": "dapo", "importance_sampling_level": "sequence", "epsilon": 0.05},
    {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "delta": 1.1},
    {"loss_type": "cispo", "epsilon_high": 1.3},
    {"loss_type": "sapo", "sapo_temperature_pos": 0.9, "sapo_temperature_neg": 1.2},
    {"loss_type": "grpo", "delta": 1.4},
    {"loss_type": "dapo", "beta": 0.1},
    {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    {"loss_type": "cispo", "epsilon_high": 1.3, "beta": 0.1},
    {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": False},
    {"loss_type": "grpo", "off_policy_mask_threshold": 0.03, "steps_per_generation": 2},
]


@each_seed
@pytest.mark.parametrize("fields", LOSSES, ids=lambda fields: "-".join(map(str, fields.values())))
def test_oracle_the_loss_is_that_of_trl(fields: dict[str, Any], seed: int, checkpoint: Path, tmp_path: Path) -> None:
    batch = data(seed)
    longest = max(len(r.mask) for r in batch)  # the harness takes it for max_completion_length
    args = run_args(checkpoint, tmp_path, max_completion_length=longest, **fields)
    config, per_token = PolicyLossConfig.from_args(args), args.calculate_per_token_loss
    theirs = trl_loss(batch, **fields)
    assert agreed_gradient(batch, config, per_token, theirs, args.constant_loss_length) > 1e-3


@each_seed
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize(
    ("mode", "low", "high"),
    [
        ("token_truncate", None, 1.1),
        ("token_truncate", 0.9, 1.1),
        ("token_mask", 0.8, 1.2),
        ("sequence_mask", None, 1.2),
        ("sequence_truncate", 0.7, 1.3),
    ],
)
def test_oracle_the_correction_is_that_of_trl(
    mode: str, low: float | None, high: float, loss_type: str, seed: int, checkpoint: Path, tmp_path: Path
) -> None:
    """The ratio is transcribed from TRL's `_generate_and_score_completions`, which is no function of its own."""
    batch, name = data(seed), "vllm_importance_sampling_"
    fields = {f"{name}mode": mode, f"{name}clip_min": low, f"{name}clip_max": high, "loss_type": loss_type}
    args = run_args(checkpoint, tmp_path, use_vllm=True, **fields)
    gap = (peers.padded(batch, "old") - peers.padded(batch, "engine")) * peers.padded(batch, "mask")
    ratio = (gap.sum(-1, keepdim=True) if mode.startswith("sequence") else gap).exp()
    if mode.endswith("truncate"):
        ratio = ratio.clamp(min=low, max=high)
    else:
        ratio = ratio.masked_fill((ratio < (low or 0)) | (ratio > high), 0.0)
    theirs = trl_loss(batch, {"importance_sampling_ratio": ratio}, loss_type=loss_type)
    assert agreed_gradient(batch, PolicyLossConfig.from_args(args), args.calculate_per_token_loss, theirs) > 1e-3
