"""From a batch to its advantages: flags, hooks, and what is wrong with rewards; the rules over flags."""

from __future__ import annotations

import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from instep.arguments.algorithm.rules import COMBINATIONS
from instep.arguments.all_flags import own_flags
from instep.arguments.parse import parse
from instep.controller.advantage_columns import add_advantages
from instep.data.batch import build_batch
from instep.errors import ConfigError, RewardError, RolloutError
from instep.rollout.filters import check_reward_nonzero_std
from instep.types import Sample
from tests.assets import make_checkpoint, make_prompts


def sample(group, index, reward, length=3, **more):
    out = Sample(group_index=group, index=index, reward=reward, tokens=[1, 2], **more)
    out.append_response_tokens(list(range(length)), [-1.0] * length)
    out.status = Sample.Status.COMPLETED
    return out


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    make_checkpoint(folder / "hf")
    make_prompts(folder / "train.jsonl", 2)
    return folder


@pytest.fixture
def arguments(assets, monkeypatch):
    """`arguments("--flag value ...")`, parsed like those of a run."""
    monkeypatch.chdir(assets)

    def make(more=""):
        text = "--hf-checkpoint hf --prompt-data train.jsonl --input-key prompt "
        text += "--rm-type math --label-key label --rollout-batch-size 2"
        text += " --num-rollout 1 --rollout-max-response-len 8 --actor-num-gpus-per-node 1 "
        return parse((text + more).split(), "train")

    return make


def advantages(args, *groups):
    samples = [s for group in groups for s in group]
    batch = build_batch(groups)
    batch.token_columns["log_probs"] = batch.token_columns["rollout_log_probs"]
    batch.token_columns["ref_log_probs"] = batch.token_columns["rollout_log_probs"] - 0.5
    metrics = add_advantages(batch, samples, args, args.view({}))
    return batch.token_columns, metrics


@pytest.fixture
def hook(monkeypatch):
    """`hook(function)` makes it importable and gives its dotted path."""

    def make(function):
        module = types.ModuleType("hooks_of_advantages")
        module.function = function
        monkeypatch.setitem(sys.modules, "hooks_of_advantages", module)
        from instep.system.hooks import load_function

        load_function.cache_clear()
        return "hooks_of_advantages.function"

    return make


def named(args, **hooks):
    """`args` with hooks whose module cannot be found by the parser."""
    return args.replace(**hooks)


# ---- flags -----------------------------------------------------------------------------------------------------------


def test_the_penalty_on_overlong_responses_comes_before_the_comparison(arguments):
    args = arguments("--advantage-estimator dr_grpo --overlong-buffer-len 4 --overlong-penalty-factor 0.5")
    columns, metrics = advantages(args, [sample(0, 0, 1.0, 8), sample(0, 1, 1.0, 6), sample(0, 2, 1.0, 2)])
    rewards = [0.5, 0.75, 1.0]
    assert columns["advantages"].tolist() == pytest.approx([-0.25] * 8 + [0.0] * 6 + [0.25] * 2)
    assert metrics == {"train/overlong_penalty": pytest.approx(sum(rewards) / 3 - 1)}


def test_the_kl_in_the_reward_is_reported(arguments):
    args = arguments("--kl-coef 0.1 --ref-load hf --disable-rewards-normalization")
    columns, metrics = advantages(args, [sample(0, 0, 1.0, 2), sample(0, 1, 1.0, 4)])
    assert columns["advantages"].tolist() == pytest.approx([0.9] * 2 + [0.8] * 4)
    assert metrics == {"train/reward_kl": pytest.approx(0.5)}


def test_a_single_execution_in_a_group_names_the_group(arguments):
    args = arguments("--advantage-estimator rloo")
    with pytest.raises(RolloutError, match="group 4 has a single execution") as error:
        advantages(args, [sample(3, 0, 1.0), sample(3, 1, 0.0)], [sample(4, 2, 1.0)])
    assert "--advantage-estimator rloo" in error.value.where


def test_groups_of_different_sizes(arguments):
    groups = [sample(3, 0, 1.0), sample(3, 1, 0.0)], [sample(4, i, float(i == 2), 1) for i in range(2, 5)]
    columns, _ = advantages(arguments("--advantage-estimator rloo"), *groups)
    assert columns["advantages"].tolist() == pytest.approx([1.0] * 3 + [-1.0] * 3 + [1.0, -0.5, -0.5])


def test_a_reward_below_zero_is_no_success(arguments):
    with pytest.raises(RolloutError, match=r"reward -1 \(group 0\)"):
        advantages(arguments("--advantage-estimator max_rl"), [sample(0, 0, -1.0), sample(0, 1, 1.0)])


def test_nothing_to_whiten(arguments):
    args = arguments("--advantage-estimator reinforce_plus_plus")
    with pytest.raises(RolloutError, match="at least one token"):
        advantages(args, [sample(0, i, 1.0, remove_sample=True) for i in range(2)])


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, "1"])
def test_a_reward_that_is_no_number_names_its_sample(reward):
    with pytest.raises(RewardError) as error:
        build_batch([[sample(5, 0, 1.0), sample(5, 1, reward)]])
    assert "group 5, sample 1" in error.value.where


# ---- hooks -----------------------------------------------------------------------------------------------------------


def test_custom_advantages(arguments, hook):
    seen = {}

    def function(args, rollout_data):
        seen.update(rollout_data, estimator=args.advantage_estimator)
        rewards, masks = rollout_data["rewards"], rollout_data["loss_masks"]
        rollout_data["advantages"] = [r * mask for r, mask in zip(rewards, masks, strict=True)]
        rollout_data["returns"] = [2 * a for a in rollout_data["advantages"]]

    args = named(arguments("--advantage-estimator dr_grpo"), custom_advantage_function_path=hook(function))
    columns, _ = advantages(args, [sample(0, 0, 1.0, 2), sample(0, 1, 0.0, 3)])
    assert columns["advantages"].tolist() == [0.5] * 2 + [-0.5] * 3
    assert columns["returns"].tolist() == [1.0] * 2 + [-1.0] * 3
    assert seen["raw_reward"] == [1.0, 0.0] and seen["rewards"] == [0.5, -0.5]
    assert [k.tolist() for k in seen["kl"]] == [[0.0] * 2, [0.0] * 3]
    assert seen["tokens"][0].tolist() == [1, 2, 0, 1] and seen["response_lengths"] == [2, 3]
    assert seen["total_lengths"] == [4, 5] and [s.index for s in seen["samples"]] == [0, 1]
    assert {"log_probs", "ref_log_probs", "rollout_log_probs"} <= seen.keys() and "values" not in seen
    assert seen["estimator"] == "dr_grpo"
    whitened, _ = advantages(args.replace(normalize_advantages=True), [sample(0, 0, 1.0, 2), sample(0, 1, 0.0, 3)])
    assert whitened["advantages"].mean().item() == pytest.approx(0, abs=1e-6)
    assert whitened["advantages"].std().item() == pytest.approx(1, abs=1e-6)


def sets(value):
    def function(args, rollout_data):
        rollout_data["advantages"] = value

    return function


BAD_HOOKS = [
    (lambda args, data: None, "it set no advantages"),
    (sets([torch.zeros(3)]), "advantages of 1 samples, not 2"),
    (sets([torch.zeros(3), torch.zeros(2)]), r"advantages\[1\] has the shape \(2,\) for 3 response tokens"),
    (sets([torch.zeros(3), torch.tensor([0.0, math.nan, 0.0])]), "1 trained tokens are not finite"),
    (lambda args, data: data["value"], "raised KeyError"),
]


@pytest.mark.parametrize(("function", "what"), BAD_HOOKS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_custom_function_that_is_wrong_is_named(arguments, hook, function, what):
    args = named(arguments(), custom_advantage_function_path=hook(function))
    with pytest.raises(RolloutError, match=what) as error:
        advantages(args, [sample(0, 7, 1.0), sample(0, 8, 0.0)])
    text = str(error.value)
    assert "hooks_of_advantages.function" in text
    assert "not finite" not in what or "group 0, sample 8" in text
    assert "KeyError" not in what or "rollout_data has " in text and " kl, log_probs, loss_masks" in text


def test_processed_rewards_take_the_place_of_the_comparison(arguments, hook):
    path = hook(lambda args, samples: (None, [2.0, 4.0]))
    for name, expected in (("rloo", [2.0] * 2 + [4.0]), ("reinforce_plus_plus_baseline", [-0.57735] * 2 + [1.154701])):
        args = named(arguments(f"--advantage-estimator {name}"), custom_reward_post_process_path=path)
        columns, _ = advantages(args, [sample(0, 0, 1.0, 2), sample(0, 1, 0.0, 1)])
        assert columns["advantages"].tolist() == pytest.approx(expected, abs=1e-5)


BAD_ANSWERS = [
    (lambda args, samples: (None, [math.nan, 1.0]), "returned nan", "group 2, sample 5"),
    (lambda args, samples: (None, [1.0]), "1 rewards for 2 samples", "--custom-reward-post-process-path"),
    (lambda args, samples: [1.0, 2.0], r"returned \[1.0, 2.0\]", "--custom-reward-post-process-path"),
    (lambda args, samples: samples.rewards, "raised AttributeError", "test_advantages.py"),
]


@pytest.mark.parametrize(("function", "what", "where"), BAD_ANSWERS, ids=lambda x: x if isinstance(x, str) else "")
def test_processed_rewards_that_are_wrong_are_named(arguments, hook, function, what, where):
    args = named(arguments(), custom_reward_post_process_path=hook(function))
    with pytest.raises(RolloutError, match=what) as error:
        advantages(args, [sample(2, 5, 1.0), sample(2, 6, 0.0)])
    assert where in error.value.where


def test_the_filter_of_dynamic_sampling():
    def keeps(*rewards, ids=None):
        group = [sample(0, i, r, execution_id=ids[i] if ids else None) for i, r in enumerate(rewards)]
        return check_reward_nonzero_std(SimpleNamespace(reward_key=None), group)

    assert keeps(1.0, 0.0).keep and not keeps(1.0, 1.0).keep and not keeps(0.5).keep
    assert keeps(0.0, 0.0).reason == "zero_std_0.0"
    assert not keeps(0.0, 1.0, 0.5, ids=["a", "a", None]).keep  # siblings count once, by their mean
    assert not keeps(0.1, 0.1, 0.1, 0.1, ids=["a", "a", "a", "b"]).keep  # and exactly


# ---- what goes with what ---------------------------------------------------------------------------------------------


def test_a_combination_names_flags_that_exist():
    for combination in COMBINATIONS:
        flags = [word for word in combination.flags.replace(",", "").split() if word.startswith("--")]
        assert flags and set(flags) <= set(own_flags())


REWARD_HOOK = "--custom-reward-post-process-path instep.system.hooks.load_function"
FILTER = "--dynamic-sampling-filter-path instep.rollout.filters.check_reward_nonzero_std"
REFUSED = [
    ("--n-samples-per-prompt 1", "a group of one"),
    ("--advantage-estimator rloo --n-samples-per-prompt 1", "1 with --advantage-estimator rloo"),
    (f"--advantage-estimator reinforce_plus_plus --n-samples-per-prompt 1 {FILTER}", "every group would be dropped"),
    ("--advantage-estimator max_rl --disable-rewards-normalization", "this estimator consists of the comparison"),
    ("--gamma 0.9", "nothing to discount"),
    ("--advantage-estimator reinforce_plus_plus --lambd 0.9", "without a critic"),
    (f"--kl-coef 0.1 --ref-load hf {REWARD_HOOK}", "would replace those with the KL"),
    ("--advantage-estimator max_rl --kl-coef 0.1 --ref-load hf", "not a success rate"),
    ("--advantage-estimator max_rl --overlong-buffer-len 2", "not a success rate"),
    (f"--overlong-buffer-len 2 {REWARD_HOOK}", "would replace those with the penalty"),
    ("--overlong-penalty-factor 2", "has no effect without --overlong-buffer-len"),
    ("--overlong-buffer-len 9", "would begin before the response"),
]


@pytest.mark.parametrize(("flags", "why"), REFUSED)
def test_refused(arguments, flags, why):
    with pytest.raises(ConfigError) as error:
        arguments(flags)
    text = str(error.value)
    assert why in text and "things are wrong" not in text


ACCEPTED = [
    ("--disable-rewards-normalization --n-samples-per-prompt 1", ""),
    ("--advantage-estimator reinforce_plus_plus --n-samples-per-prompt 1 --gamma 0.9", ""),
    (f"--advantage-estimator reinforce_plus_plus --kl-coef 0.1 --ref-load hf {REWARD_HOOK}", ""),
    ("--advantage-estimator reinforce_plus_plus --normalize-advantages", "whitens its advantages anyway"),
    ("--advantage-estimator reinforce_plus_plus --disable-rewards-normalization", "no comparison within groups"),
    ("--advantage-estimator dr_grpo --disable-grpo-std-normalization", "no division by the std"),
]


@pytest.mark.parametrize(("flags", "note"), ACCEPTED)
def test_accepted(arguments, flags, note):
    notes = arguments(flags).notes
    assert len(notes) == bool(note) and all(note in text for text in notes)


def test_without_the_std_a_reward_is_only_centred(arguments):
    columns, _ = advantages(arguments("--disable-grpo-std-normalization"), [sample(0, 0, 3.0), sample(0, 1, 1.0)])
    assert columns["advantages"].tolist() == [1.0] * 3 + [-1.0] * 3
