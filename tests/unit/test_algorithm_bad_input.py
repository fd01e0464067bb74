"""Bad and odd rollouts, from the samples to the advantages of every estimator: an error that names them, or no harm."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from instep.algorithms.catalog import ALGORITHMS
from instep.algorithms.reductions import loss_weights
from instep.controller.advantage_columns import add_advantages
from instep.controller.round_metrics import critic_metrics
from instep.data.batch import build_batch
from instep.errors import InstepError, RewardError, RolloutError
from instep.types import Sample

each_estimator = pytest.mark.parametrize("name", ALGORITHMS)
LENGTHS = ((3, 2), (4, 1, 5, 2))  # of two groups, one larger than the other


def arguments(name, **more):
    base = dict(
        command="train", advantage_estimator=name, overlong_buffer_len=None,
        kl_coef=0.0 if name == "max_rl" else 0.1, kl_loss_type="k1",
        gamma=1.0, lambd=1.0, custom_advantage_function_path=None, custom_reward_post_process_path=None,
        custom_convert_samples_to_train_data_path=None,
        normalize_advantages=False, rewards_normalization=True, grpo_std_normalization=True, use_opd=False,
    )  # fmt: skip
    return SimpleNamespace(**base | more)


def groups():
    out, index = [], 0
    for g, lengths in enumerate(LENGTHS):
        out.append([])
        for n in lengths:
            sample = Sample(group_index=g, index=index, reward=float(index % 2), tokens=[1, 2])
            sample.append_response_tokens(list(range(n)), [-1.0 - t for t in range(n)])
            sample.status = Sample.Status.COMPLETED
            out[-1].append(sample)
            index += 1
    return out


def columns(rollout, name, **more):
    """The batch with its advantages; what the workers would have scored is made up."""
    batch = build_batch(rollout)
    mask = batch.token_columns["loss_mask"]
    old = torch.arange(mask.numel()).float().cos()
    old[mask == 0] = math.nan  # what stands at a token that is not trained on must not matter
    batch.token_columns |= {"log_probs": old, "ref_log_probs": old.sin(), "values": old / 2}
    add_advantages(batch, [s for group in rollout for s in group], arguments(name, **more), None)
    return batch


FAULTS = [
    ({"loss_mask": [1]}, RolloutError, "loss_mask has 1 entries for 5 response tokens"),
    ({"loss_mask": [1] * 6}, RolloutError, "loss_mask has 6 entries for 5 response tokens"),
    ({"rollout_log_probs": [-1.0] * 4}, RolloutError, "rollout_log_probs has 4 entries for 5"),
    ({"response_length": 0}, RolloutError, "the response is empty"),
    ({"reward": math.nan}, RewardError, "the reward nan is not a finite number"),
    ({"reward": None}, RewardError, "None is not a finite number"),
]


@pytest.mark.parametrize(("change", "kind", "what"), FAULTS, ids=lambda x: x if isinstance(x, str) else "")
@each_estimator
def test_a_bad_sample_is_named(name: str, change: dict, kind: type[InstepError], what: str) -> None:
    rollout = groups()
    vars(rollout[1][2]).update(change)
    with pytest.raises(kind, match=what) as error:
        columns(rollout, name)
    assert "group 1, sample 4" in error.value.where and error.value.remedy


@each_estimator
def test_groups_of_different_sizes_are_compared_each_by_itself(name: str) -> None:
    both, (alone, _) = columns(groups(), name, normalize_advantages=False), groups()
    got = both.token_columns["advantages"]
    assert got.isfinite().all() and got.abs().max() > 0.1
    if ALGORITHMS[name].estimator.whitens:
        return  # over the whole rollout
    first = columns([alone], name).token_columns["advantages"]
    torch.testing.assert_close(got[: first.numel()], first)


@each_estimator
def test_a_masked_sample_has_no_part_but_its_reward(name: str) -> None:
    rollout = groups()
    rollout[1][3].remove_sample = True
    batch = columns(rollout, name)
    trained = batch.token_columns["loss_mask"] > 0
    assert batch.token_columns["advantages"][trained].isfinite().all()
    rollout[1][3].remove_sample, rollout[1][3].loss_mask = False, [0, 0]  # the other way to say so
    again = columns(rollout, name)
    assert again.token_columns["advantages"][trained].equal(batch.token_columns["advantages"][trained])


@each_estimator
def test_a_rollout_without_a_trained_token(name: str) -> None:
    """Whitening has nothing to take a mean of, which is an error; for the others there is nothing to learn."""
    rollout = groups()
    for group in rollout:
        for sample in group:
            sample.remove_sample = True
    if ALGORITHMS[name].estimator.whitens:
        with pytest.raises(RolloutError, match="at least one token with mask 1") as error:
            columns(rollout, name)
        assert f"--advantage-estimator {name}" in error.value.where
        return
    batch = columns(rollout, name)
    lengths = batch.response_lengths
    weights = loss_weights(batch.token_columns["loss_mask"], lengths, [0] * len(lengths))
    assert weights.equal(torch.zeros_like(weights))


def test_metrics_of_a_critic_that_nothing_was_trained_on() -> None:
    rollout = groups()
    for group in rollout:
        for sample in group:
            sample.remove_sample = True
    batch = columns(rollout, "ppo")
    batch.token_columns["loss_weights"] = torch.zeros_like(batch.token_columns["loss_mask"])
    step = {"loss": 0.0, "value_clipfrac": 0.0, "grad_norm": 0.0, "lr": 0.1, "skipped_steps": 0.0}
    assert set(critic_metrics([step], batch)) == {
        f"critic/{name}" for name in ("value_loss", "value_clipfrac", "grad_norm", "lr", "skipped_steps")
    }


@each_estimator
def test_tokens_appended_under_the_mask_change_nothing(name: str) -> None:
    rollout, longer = groups(), groups()
    for i, sample in enumerate(s for group in longer for s in group):
        sample.append_response_tokens([7] * (1 + i), None, trainable=False)
    before, after = (build_batch(r) for r in (rollout, longer))
    for batch in (before, after):
        mask = batch.token_columns["loss_mask"] > 0
        for place, column in enumerate(("log_probs", "ref_log_probs", "values")):
            values = torch.full(mask.shape, math.nan)
            values[mask] = torch.arange(int(mask.sum())).float().mul(1 + place).cos()
            batch.token_columns[column] = values
    got = []
    for batch, samples in ((before, rollout), (after, longer)):
        add_advantages(batch, [s for group in samples for s in group], arguments(name), None)
        trained = batch.token_columns["loss_mask"] > 0
        got.append({c: batch.token_columns[c][trained] for c in ("advantages", "returns") if c in batch.token_columns})
    assert got[0].keys() == got[1].keys() and ("returns" in got[0]) == (name == "ppo")
    for column, values in got[0].items():
        torch.testing.assert_close(got[1][column], values)
