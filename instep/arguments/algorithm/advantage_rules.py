"""Refused or useless combinations of flags of advantages, KL and on-policy distillation."""

from __future__ import annotations

from instep.algorithms.catalog import ALGORITHMS, KL_IN_LOSS, listed, names_where
from instep.arguments.algorithm.combination import Combination
from instep.arguments.concern import Settings
from instep.arguments.flag import attribute_name

_DISCOUNTED = names_where(lambda estimator, loss: estimator.discounts)
_WITH_CRITIC = names_where(lambda estimator, loss: estimator.has_critic)
_SUCCESS_RATES = names_where(lambda estimator, loss: estimator.takes_success_rates)
_REWARD_HOOKS = "--custom-reward-post-process-path or --custom-convert-samples-to-train-data-path"
_UNCOMPARED = names_where(lambda estimator, loss: not estimator.compares_group)


def _makes_rewards(args: Settings) -> bool:
    """Return whether a hook returns the final rewards, from which advantages are made."""
    hooks = args.custom_reward_post_process_path, args.custom_convert_samples_to_train_data_path
    return any(path is not None for path in hooks)


def _only_with_kl(flag: str) -> Combination:
    return Combination(
        flag,
        lambda a, given: attribute_name(flag) in given and not a.use_kl_loss and a.kl_coef == 0,
        "there is no reference without a KL",
        f"leave it out, or add {KL_IN_LOSS}",
    )


RULES = (
    Combination(
        "--n-samples-per-prompt 1",
        lambda a, given: a.n_samples_per_prompt == 1 and a.rewards_normalization and not _makes_rewards(a),
        "a group of one has no advantage: every sample equals its group's mean",
        f"use at least 2 (the default is 8), or {listed(_UNCOMPARED)}",
        algorithms=names_where(lambda estimator, loss: estimator.compares_group),
    ),
    Combination(
        "--n-samples-per-prompt 1 --dynamic-sampling-filter-path ...check_reward_nonzero_std",
        lambda a, given: (
            a.n_samples_per_prompt == 1 and (a.dynamic_sampling_filter_path or "").endswith(".check_reward_nonzero_std")
        ),
        "the rewards of a group of one never differ, so every group would be dropped",
        "use at least 2, or leave the filter out",
        algorithms=tuple(ALGORITHMS),
    ),
    Combination(
        "--disable-rewards-normalization",
        lambda a, given: not a.rewards_normalization,
        "this estimator consists of the comparison within a group",
        f"leave it out, or use {listed(_UNCOMPARED)}",
        algorithms=names_where(lambda estimator, loss: estimator.compares_group and not estimator.comparison_optional),
    ),
    Combination(
        "--disable-rewards-normalization",
        lambda a, given: not a.rewards_normalization,
        "has no effect: there is no comparison within groups",
        "leave it out",
        refused=False,
        algorithms=_UNCOMPARED,
    ),
    Combination(
        "--disable-grpo-std-normalization",
        lambda a, given: not a.grpo_std_normalization,
        "has no effect: there is no division by the std of a group",
        "leave it out",
        refused=False,
        algorithms=names_where(lambda estimator, loss: not estimator.divides_by_std),
    ),
    Combination(
        "--disable-grpo-std-normalization and --disable-rewards-normalization",
        lambda a, given: not a.rewards_normalization and not a.grpo_std_normalization,
        "without the normalization over groups there is no std to leave out",
        "give one of the two",
    ),
    Combination(
        "--normalize-advantages",
        lambda a, given: a.normalize_advantages,
        "has no effect: this estimator whitens its advantages anyway",
        "leave it out",
        refused=False,
        algorithms=names_where(lambda estimator, loss: estimator.whitens),
    ),
    Combination(
        "--gamma",
        lambda a, given: a.gamma != 1,
        "has no effect: all tokens of a response have one advantage, so there is nothing to discount",
        f"leave it out, or use {listed(_DISCOUNTED)}",
        algorithms=names_where(lambda estimator, loss: not estimator.discounts),
    ),
    Combination(
        "--lambd",
        lambda a, given: a.lambd != 1,
        "has no effect without a critic",
        f"leave it out, or use {listed(_WITH_CRITIC)}",
        algorithms=names_where(lambda estimator, loss: not estimator.has_critic),
    ),
    # ---- KL ----
    Combination(
        "--kl-coef and --kl-loss-coef",
        lambda a, given: a.kl_coef != 0 and a.kl_loss_coef != 0,
        "the KL counts twice",
        "set one of them to 0",
    ),
    Combination(
        "--kl-loss-coef",
        lambda a, given: a.kl_loss_coef != 0 and not a.use_kl_loss,
        "has no effect without --use-kl-loss",
        "give both",
    ),
    Combination(
        "--use-kl-loss without --kl-loss-coef",
        lambda a, given: a.use_kl_loss and "kl_loss_coef" not in given,
        "the KL is only reported: its weight in the loss is 0",
        f"give {KL_IN_LOSS}, or --kl-loss-coef 0",
        refused=False,
    ),
    Combination(
        "--kl-loss-coef with --kl-loss-type k1",
        lambda a, given: a.kl_loss_coef != 0 and a.kl_loss_type == "k1" and not a.use_unbiased_kl,
        "k1 as a loss has no effect on average: the expected gradient is 0, and it only adds noise",
        "add --kl-loss-type low_var_kl, or --use-unbiased-kl",
        refused=False,
    ),
    *(_only_with_kl(flag) for flag in ("--ref-update-interval", "--ref-served-model")),
    Combination(
        "--ref-served-model and --ref-load or --ref-update-interval",
        lambda a, given: a.ref_served_model is not None and not given.isdisjoint(("ref_load", "ref_update_interval")),
        "there is one reference: a served model, or a copy in the trainer",
        "name its folder as model_path in the file of groups, or leave --ref-served-model out",
    ),
    Combination(
        "--ref-served-model with --rollout-temperature",
        lambda a, given: a.ref_served_model is not None and a.rollout_temperature != 1,
        "engines score given tokens at temperature 1, but the policy's log-probs are at the sampling temperature",
        "sample at temperature 1, or leave --ref-served-model out",
    ),
    Combination(
        f"--kl-coef and {_REWARD_HOOKS}",
        lambda a, given: a.kl_coef != 0 and _makes_rewards(a),
        "the hook's rewards would replace those with the KL",
        f"use {KL_IN_LOSS}, or subtract the KL in the hook",
        algorithms=names_where(lambda estimator, loss: not estimator.kl_on_tokens),
    ),
    Combination(
        "--kl-coef",
        lambda a, given: a.kl_coef != 0,
        "a reward minus a KL is not a success rate",
        f"use {KL_IN_LOSS}",
        algorithms=_SUCCESS_RATES,
    ),
    # ---- on-policy distillation ----
    Combination(
        "--use-opd",
        lambda a, given: a.use_opd and (a.opd_teacher_load if a.opd_type == "model" else a.opd_teacher_url) is None,
        "there is no teacher",
        "give --opd-teacher-url, the address of a served one, or --opd-teacher-load, a checkpoint",
    ),
    Combination(
        "--opd-teacher-url and --opd-teacher-load",
        lambda a, given: {"opd_teacher_url", "opd_teacher_load"} <= given,
        "there is one teacher: served or loaded",
        "give one of the two",
    ),
    Combination(
        "--use-opd with --rollout-temperature and a served teacher",
        lambda a, given: a.use_opd and a.opd_type == "engine" and a.rollout_temperature != 1,
        "engines score given tokens at temperature 1, but the student's log-probs are at the sampling temperature",
        "sample at temperature 1, or load the teacher with --opd-teacher-load",
    ),
    # ---- overlong responses ----
    Combination(
        "--overlong-buffer-len",
        lambda a, given: a.overlong_buffer_len is not None,
        "a reward minus a penalty is not a success rate",
        "leave it out",
        algorithms=_SUCCESS_RATES,
    ),
    Combination(
        f"--overlong-buffer-len and {_REWARD_HOOKS}",
        lambda a, given: a.overlong_buffer_len is not None and _makes_rewards(a),
        "the hook's rewards would replace those with the penalty",
        "subtract the penalty in the hook",
    ),
    Combination(
        "--custom-reward-post-process-path and --custom-convert-samples-to-train-data-path",
        lambda a, given: (
            "custom_reward_post_process_path" in given and a.custom_convert_samples_to_train_data_path is not None
        ),
        "the conversion returns the rewards: --custom-reward-post-process-path is not called, as in slime",
        "call it in the conversion",
        refused=False,
    ),
    Combination(
        "--overlong-buffer-len without --rollout-max-response-len",
        lambda a, given: a.overlong_buffer_len is not None and a.rollout_max_response_len is None,
        "the buffer is the last part of that length",
        "give both",
    ),
    Combination(
        "--overlong-buffer-len above --rollout-max-response-len",
        lambda a, given: (
            a.overlong_buffer_len is not None
            and a.rollout_max_response_len is not None
            and a.overlong_buffer_len > a.rollout_max_response_len
        ),
        "the buffer would begin before the response",
        "lower it",
    ),
)
