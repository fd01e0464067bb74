"""Which flags of losses and importance corrections go together: one record per combination that makes no sense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from instep.arguments.args import Args
from instep.arguments.parser import Problem

# The bounds (--eps-clip, --eps-clip-high) of each estimator with a loss of its own, where none is given: the papers'.
CLIP_DEFAULTS = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}


class LossRule(NamedTuple):
    """A combination that is refused.

    Attributes:
        flags: the flags at fault, as the message names them.
        when: whether the arguments (and the names of those given) are of that kind.
        message: what is wrong with them.
        remedy: what to do.
    """

    flags: str
    when: Callable[[Args, set[str]], bool]
    message: str
    remedy: str


def _given(*names: str) -> Callable[[set[str]], bool]:
    return lambda given: bool(given.intersection(names))


def _corrects(args: Args) -> bool:
    return args.use_tis or args.use_rs


def _only_with(needed: tuple[str, ...], *flags: str) -> list[LossRule]:
    """Flags that act only where one of the switches `needed` is given."""

    def unused(flag: str) -> Callable[[Args, set[str]], bool]:
        return lambda args, given: _name(flag) in given and not any(getattr(args, _name(n)) for n in needed)

    message = f"has no effect without {' or '.join(needed)}"
    return [LossRule(flag, unused(flag), message, "give both") for flag in flags]


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


LOSS_RULES: tuple[LossRule, ...] = (
    # forms of the policy loss
    LossRule(
        "--eps-clip",
        lambda args, given: args.eps_clip >= 1 and args.advantage_estimator != "cispo",
        "1 or more would never clip below",
        "use a value below 1, such as 0.2",
    ),
    LossRule(
        "--eps-clip",
        lambda args, given: args.eps_clip > 1 and args.advantage_estimator == "cispo",
        "the lower bound of a weight is 1 - eps_clip, which is 0 at least",
        "use 1 for no lower bound",
    ),
    LossRule(
        "--eps-clip, --eps-clip-high or --eps-clip-c with --advantage-estimator sapo",
        lambda args, given: (
            args.advantage_estimator == "sapo" and _given("eps_clip", "eps_clip_high", "eps_clip_c")(given)
        ),
        "SAPO has a smooth gate and clips nothing",
        "use --sapo-tau-pos and --sapo-tau-neg",
    ),
    LossRule(
        "--eps-clip-c with --advantage-estimator cispo",
        lambda args, given: args.advantage_estimator == "cispo" and args.eps_clip_c is not None,
        "CISPO bounds the weight itself; there is no second bound",
        "use --eps-clip-high",
    ),
    LossRule(
        "--sapo-tau-pos or --sapo-tau-neg",
        lambda args, given: args.advantage_estimator != "sapo" and _given("sapo_tau_pos", "sapo_tau_neg")(given),
        "has no effect without --advantage-estimator sapo",
        "give both",
    ),
    # between trainer and engine
    LossRule(
        "--use-tis or --use-rs with --use-rollout-logprobs",
        lambda args, given: _corrects(args) and args.use_rollout_logprobs,
        "with the engine's log-probs as old policy there is nothing to correct",
        "give one of the two",
    ),
    LossRule(
        "--rollout-top-p or --rollout-top-k with --use-tis, --use-rs or --use-rollout-logprobs",
        lambda args, given: (
            (args.rollout_top_p < 1 or args.rollout_top_k > 0) and (_corrects(args) or args.use_rollout_logprobs)
        ),
        "the engine's log-probs are of the truncated distribution, the trainer's of the full one: every ratio would be "
        "biased",
        "sample from the full distribution, or leave the correction out",
    ),
    LossRule(
        "--tis-clip-low",
        lambda args, given: args.tis_clip_low > args.tis_clip,
        "is above --tis-clip",
        "exchange them",
    ),
    LossRule(
        "--tis-clip-low with --tis-mode truncate",
        lambda args, given: args.tis_mode == "truncate" and args.tis_clip_low > 0,
        "truncation has an upper bound only",
        "use --tis-mode clip",
    ),
    LossRule(
        "--rs-lower-bound",
        lambda args, given: args.use_rs and args.rs_lower_bound > args.rs_upper_bound,
        "is above --rs-upper-bound: everything would be rejected",
        "exchange them",
    ),
    *_only_with(("--use-tis",), "--tis-level", "--tis-mode", "--custom-tis-function-path"),
    *_only_with(("--use-tis", "--use-rs"), "--tis-clip", "--tis-clip-low"),
    *_only_with(("--use-rs",), "--rs-level", "--rs-lower-bound", "--rs-upper-bound", "--rs-veto-threshold"),
    *_only_with(("--use-opsm",), "--opsm-delta"),
    # users' losses
    LossRule(
        "--loss-type custom_loss",
        lambda args, given: args.loss_type == "custom_loss" and args.custom_loss_function_path is None,
        "needs the loss",
        "give --custom-loss-function-path",
    ),
    LossRule(
        "--custom-loss-function-path",
        lambda args, given: args.loss_type != "custom_loss" and args.custom_loss_function_path is not None,
        "has no effect without --loss-type custom_loss",
        "give both",
    ),
    LossRule(
        "--loss-type custom_loss with --tensor-model-parallel-size",
        lambda args, given: args.loss_type == "custom_loss" and args.tensor_model_parallel_size > 1,
        "a custom loss gets the logits of the whole vocabulary, which tensor parallelism splits",
        "use data or pipeline parallelism",
    ),
    LossRule(
        "--loss-type custom_loss with flags of the policy loss",
        lambda args, given: (
            args.loss_type == "custom_loss"
            and (_corrects(args) or args.use_opsm or args.custom_pg_loss_reducer_function_path is not None)
        ),
        "--use-tis, --use-rs, --use-opsm and a reducer belong to the policy loss",
        "do it in the function",
    ),
)
READS = (
    "advantage_estimator loss_type eps_clip eps_clip_high eps_clip_c sapo_tau_pos sapo_tau_neg tis_clip tis_clip_low "
    "tis_level tis_mode rs_level rs_lower_bound rs_upper_bound rs_veto_threshold opsm_delta rollout_top_p "
    "rollout_top_k "
    "custom_tis_function_path custom_loss_function_path custom_pg_loss_reducer_function_path tensor_model_parallel_size"
)


def losses(args: Args, given: set[str]) -> Iterator[Problem]:
    """The rule over all of them."""
    for rule in LOSS_RULES:
        if rule.when(args, given):
            yield Problem(rule.message, rule.flags, rule.remedy)


def derive_losses(args: Args, given: set[str]) -> None:
    """Bounds that are not given: the paper's of the estimator; and names under which slime's examples read ours."""
    if "eps_clip" not in given and args.advantage_estimator in CLIP_DEFAULTS:
        args.eps_clip, high = CLIP_DEFAULTS[args.advantage_estimator]
        args.eps_clip_high = high if args.eps_clip_high is None else args.eps_clip_high
    args.eps_clip_high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    args.tis_lower_bound, args.tis_upper_bound, args.tis_batch_normalize = args.tis_clip_low, args.tis_clip, False
    args.rs_lower_bound = args.tis_clip_low if args.rs_lower_bound is None else args.rs_lower_bound
    args.rs_upper_bound = args.tis_clip if args.rs_upper_bound is None else args.rs_upper_bound
