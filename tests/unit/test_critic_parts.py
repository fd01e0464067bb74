"""The controller's part of PPO: from values to advantages and returns, the critic's metrics, what a round asks for."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from instep.cluster.local import WorkerGroup
from instep.controller.advantage_columns import add_advantages
from instep.controller.role import RoleTrainer
from instep.controller.round import TrainingRound
from instep.controller.round_metrics import critic_metrics
from instep.data.batch import build_batch
from instep.errors import RolloutError, TrainingError
from instep.training.backend import TokenOutputs
from instep.training.losses import value_loss_fn
from instep.types import Sample


def arguments(**more):
    base = dict(
        command="train", advantage_estimator="ppo",
        overlong_buffer_len=None, kl_coef=0.0, kl_loss_type="k1", gamma=0.9, lambd=0.8,
        custom_advantage_function_path=None, custom_reward_post_process_path=None,
        custom_convert_samples_to_train_data_path=None, rollout_data_postprocess_path=None, normalize_advantages=False,
        rewards_normalization=True, grpo_std_normalization=True, loss_type="policy_loss", use_kl_loss=False,
        use_rollout_logprobs=False, use_opd=False, ref_served_model=None,
    )  # fmt: skip
    return SimpleNamespace(**base | more)


def rollout():
    """Two samples; the second one's third token is a tool's, and it ends with one."""
    samples = []
    for index, (reward, mask) in enumerate([(1.0, [1, 1]), (2.0, [1, 1, 0, 1, 0])]):
        sample = Sample(group_index=0, index=index, reward=reward, tokens=[1, 2])
        sample.append_response_tokens(list(range(len(mask))), [-1.0] * len(mask))
        sample.loss_mask, sample.status = mask, Sample.Status.COMPLETED
        samples.append(sample)
    batch = build_batch([samples])
    batch.token_columns["values"] = torch.tensor([0.1, 0.2, 0.3, 0.4, 9.0, 0.5, 9.0])
    return batch, samples


def test_values_become_advantages_and_returns():
    batch, samples = rollout()
    batch.token_columns["log_probs"] = batch.token_columns["rollout_log_probs"]
    batch.token_columns["ref_log_probs"] = batch.token_columns["log_probs"] - torch.tensor([1.0, 0, 0, 2, 50, 0, 50])
    args = arguments(kl_coef=0.1)
    metrics = add_advantages(batch, samples, args, args)
    last, kl = 2.0 - 0.5, 0.1
    third = last
    second = (-2 * kl + 0.9 * 0.5 - 0.4) + 0.9 * 0.8 * third
    first = (0.9 * 0.4 - 0.3) + 0.9 * 0.8 * second
    own = [(-kl + 0.9 * 0.2 - 0.1) + 0.9 * 0.8 * 0.8, 1.0 - 0.2]
    assert batch.token_columns["advantages"].tolist() == pytest.approx([*own, first, second, 0.0, third, 0.0])
    returns = [own[0] + 0.1, 1.0, first + 0.3, second + 0.4, 0.0, 2.0, 0.0]
    assert batch.token_columns["returns"].tolist() == pytest.approx(returns)
    assert metrics["train/reward_kl"] == pytest.approx(3 / 5)
    add_advantages(batch, samples, arguments(normalize_advantages=True), None)
    trained = batch.token_columns["advantages"][batch.token_columns["loss_mask"] > 0].tolist()
    assert statistics.mean(trained) == pytest.approx(0, abs=1e-6) and statistics.stdev(trained) == pytest.approx(1)


def only_advantages(args, rollout_data):
    rollout_data["advantages"] = rollout_data["values"]


def test_a_custom_function_gives_the_critic_its_returns():
    batch, samples = rollout()
    args = arguments(custom_advantage_function_path=f"{__name__}.only_advantages")
    with pytest.raises(RolloutError, match="no returns") as caught:
        add_advantages(batch, samples, args, args)
    assert "only_advantages" in caught.value.where


def test_what_stands_under_the_mask_poisons_nothing():
    """A hook's returns may be NaN there."""
    batch, _ = rollout()
    mask = batch.token_columns["loss_mask"]
    batch.token_columns["loss_weights"] = mask / mask.sum()
    batch.token_columns["returns"] = torch.where(mask > 0, 1.0, math.nan)
    values = batch.token_columns["values"].clone().requires_grad_()
    out = value_loss_fn(0.2)(batch, TokenOutputs(torch.empty(0), values=values))
    out.loss.backward()
    expected = statistics.mean((v - 1) ** 2 for v in (0.1, 0.2, 0.3, 0.4, 0.5))
    assert out.loss.item() == pytest.approx(expected)
    assert values.grad.isfinite().all() and (values.grad == 0).equal(mask == 0)


def test_metrics_are_of_trained_tokens():
    batch, samples = rollout()
    add_advantages(batch, samples, arguments(lambd=1.0), None)
    batch.token_columns["loss_weights"] = batch.token_columns["loss_mask"] / 5
    steps = [
        {"loss": x, "value_clipfrac": x / 2, "grad_norm": 1 + x, "lr": x, "skipped_steps": 0.0} for x in (1.0, 3.0)
    ]
    got = critic_metrics(steps, batch)
    values, returns = [0.1, 0.2, 0.3, 0.4, 0.5], [0.9, 1.0, 0.81 * 2, 0.9 * 2, 2.0]
    left = statistics.pvariance([r - v for r, v in zip(returns, values, strict=True)])
    assert got == pytest.approx(
        {
            "critic/value_loss": 2.0, "critic/value_clipfrac": 1.0, "critic/grad_norm": 3.0, "critic/lr": 3.0,
            "critic/skipped_steps": 0.0, "critic/values_mean": 0.3, "critic/returns_mean": statistics.mean(returns),
            "critic/explained_variance": 1 - left / statistics.pvariance(returns),
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "num_steps", "names"),
    [
        ({}, 1, []),
        ({}, 4, ["log_probs"]),
        ({}, 0, []),
        ({"use_kl_loss": True}, 0, []),  # the critic alone: the loss, and the reference with it, is not needed
        ({"use_kl_loss": True}, 1, ["ref_log_probs"]),
        ({"kl_coef": 0.1}, 0, ["ref_log_probs", "log_probs"]),  # its returns need them
    ],
)
def test_what_the_actor_scores(more, num_steps, names):
    args = arguments(**more)
    assert TrainingRound(args, None, None)._scored_names(num_steps) == names


def test_three_skipped_steps_of_the_critic_end_the_run(tmp_path):
    args, place = SimpleNamespace(train_timeout=1), SimpleNamespace(dp_size=1)
    critic = RoleTrainer(args, WorkerGroup("critic", 0, tmp_path), [place], None)
    critic._check_steps([{"skipped_steps": 1.0}, {"skipped_steps": 1.0}])
    with pytest.raises(TrainingError, match="3 optimizer steps in a row") as caught:
        critic._check_steps([{"skipped_steps": 1.0}])
    assert "critic" in caught.value.where and "--critic-lr" in caught.value.remedy
