"""docs/metrics.md lists what is computed, and nothing else. (Whole runs: `e2e/test_train.py`, `e2e/test_ppo.py`.)"""

from __future__ import annotations

import torch

from instep.algorithms.losses.policy import PolicyLossConfig
from instep.controller.round_metrics import critic_metrics
from instep.observability.alarms import ALARMS
from instep.observability.metrics import rollout_metrics
from instep.training.backend import TokenOutputs
from instep.training.losses import dpo_loss_fn, finish_metrics
from instep.types import TokenBatch
from tests.documented import DOCUMENTED, undocumented
from tests.logged_run import make_groups
from tests.unit.test_loss_properties import run, samples


def documented(prefix: str) -> set[str]:
    return {name for name in DOCUMENTED if name.startswith(prefix)}


def test_of_rollouts() -> None:
    of_generation = {name for name in documented("rollout/") if "num_groups_" in name or "num_tokens_" in name}
    of_generation |= {"rollout/num_dropped_groups", "rollout/pass@<k>"}  # told by the ledger; with --log-passrate
    assert documented("rollout/") - of_generation == set(rollout_metrics(make_groups()))


def test_of_losses() -> None:
    everything = PolicyLossConfig(use_kl_loss=True, use_opsm=True, use_tis=True, use_rs=True)
    (output,), _ = run(samples(), everything, False)
    sums, maxes = ({n: v.item() for n, v in group.items()} for group in (output.sums, output.maxes))
    sample = TokenBatch(
        torch.zeros(4).long(),
        torch.tensor([2, 2]),
        torch.tensor([1, 1]),
        {"loss_mask": torch.ones(2), "ref_log_probs": torch.zeros(2)},
        {"execution_id": ["a", "a"], "loss_scale": torch.ones(2)},
    )
    preferences = dpo_loss_fn(0.1)(sample, TokenOutputs(torch.zeros(2))).sums
    finished = finish_metrics(sums | {"mtp_loss": 3.0, "mtp_weight": 0.5}, maxes)
    assert finished["mtp_loss"] == 6.0
    names = {*finished, "grad_norm", "lr", "skipped_steps", "reward_kl", "overlong_penalty"}
    names |= {"opd_reverse_kl", "log_prob_gap_fresh", *preferences}
    assert documented("train/") == {f"train/{name}" for name in names}


def test_of_critics() -> None:
    columns = {"loss_weights": torch.ones(2), "values": torch.zeros(2), "returns": torch.tensor([0.0, 1.0])}
    batch = TokenBatch(torch.zeros(3).long(), torch.tensor([3]), torch.tensor([2]), columns)
    step = {"loss": 0.0, "value_clipfrac": 0.0, "grad_norm": 0.0, "lr": 0.1, "skipped_steps": 0.0}
    assert documented("critic/") == set(critic_metrics([step], batch))


def test_of_alarms() -> None:
    assert documented("alarm/") == {f"alarm/{name}" for name in ALARMS}


def test_names_that_are_patterns() -> None:
    assert undocumented({"eval/math/reward_mean", "rollout/num_groups_filtered/zero_std_0.0"}) == set()
    assert undocumented({"eval/a/b/reward_mean", "train/nothing"}) == {"eval/a/b/reward_mean", "train/nothing"}
