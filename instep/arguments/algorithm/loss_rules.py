"""Refused or useless combinations of flags of losses and importance corrections."""

from __future__ import annotations

from instep.algorithms.catalog import DEFAULT_ROLLOUT, listed, names_where
from instep.arguments.algorithm.combination import Combination, given
from instep.arguments.concern import Settings
from instep.engines.backend_choice import planned_kind

_CLIPPED_RATIO = names_where(lambda estimator, loss: loss.bounds == "ratio")
_BOUNDED_WEIGHT = names_where(lambda estimator, loss: loss.bounds == "weight")
_BOUNDED_DIVERGENCE = names_where(lambda estimator, loss: loss.bounds == "divergence")
_OF_RESPONSE = names_where(lambda estimator, loss: loss.of_response)
_SMOOTH_GATE = names_where(lambda estimator, loss: loss.bounds == "nothing")


def _corrects(args: Settings) -> bool:
    """Return whether the loss corrects the gap between the trainer's log-probs and the engine's."""
    return args.use_tis or args.use_rs


def _has_older_tokens(args: Settings) -> bool:
    """Return whether older weights than the trained ones may have sampled tokens."""
    return args.partial_rollout or (args.command == "train-async" and args.max_staleness != 0)


def _always_on_policy(args: Settings) -> bool:
    """Return whether every ratio to the old policy is 1: one step per rollout, all tokens from the same weights."""
    makes_its_own = args.rollout_function_path == DEFAULT_ROLLOUT and args.load_debug_rollout_data is None
    same_weights = not (args.use_rollout_logprobs or _has_older_tokens(args))
    return makes_its_own and args.num_steps_per_rollout == 1 and same_weights


def _truncates(args: Settings) -> bool:
    """Return whether the engines' log-probs are of a truncated distribution. SGLang's are of all tokens."""
    return (args.rollout_top_p < 1 or args.rollout_top_k > 0) and planned_kind(args).renormalizes


def _rounding_clips(args: Settings) -> bool:
    """Return whether old log-probs may be the engine's, rounded in bf16, under bounds as narrow as GSPO's."""
    rounded = args.precision == "bf16" or (args.precision == "auto" and args.device != "cpu")
    engines = args.use_rollout_logprobs or (_has_older_tokens(args) and not args.use_tis)
    return rounded and engines and args.eps_clip < 0.01


RULES: tuple[Combination, ...] = (
    # ---- forms of the policy loss ----
    Combination(
        "--eps-clip of 1 or more",
        lambda a, given: a.eps_clip >= 1,
        "it would never clip below",
        "use a value below 1, such as 0.2",
        algorithms=_CLIPPED_RATIO,
    ),
    Combination(
        "--eps-clip or --eps-clip-high of 1 or more",
        lambda a, given: max(a.eps_clip, a.eps_clip_high) >= 1,
        "no probability changes by 1, and a KL of 1 nat is no trust region: almost no token would be masked",
        "use a value below 1, such as 0.15 for the total variation or 0.05 for the KL",
        algorithms=_BOUNDED_DIVERGENCE,
    ),
    Combination(
        "--eps-clip above 1",
        lambda a, given: a.eps_clip > 1,
        "the lower bound of a weight is 1 - eps_clip, which must be at least 0",
        "use 1 for no lower bound",
        algorithms=_BOUNDED_WEIGHT,
    ),
    Combination(
        "--eps-clip, --eps-clip-high or --eps-clip-c",
        given("--eps-clip", "--eps-clip-high", "--eps-clip-c"),
        "SAPO has a smooth gate and clips nothing",
        "use --sapo-tau-pos and --sapo-tau-neg",
        algorithms=_SMOOTH_GATE,
    ),
    Combination(
        "--eps-clip-c",
        given("--eps-clip-c"),
        "CISPO bounds the weight itself; there is no second bound",
        "use --eps-clip-high",
        algorithms=_BOUNDED_WEIGHT,
    ),
    Combination(
        "--sapo-tau-pos or --sapo-tau-neg",
        given("--sapo-tau-pos", "--sapo-tau-neg"),
        "has no effect without SAPO's gate",
        f"leave it out, or use {listed(_SMOOTH_GATE)}",
        algorithms=names_where(lambda estimator, loss: loss.bounds != "nothing"),
    ),
    Combination(
        "--gspo-gradient",
        given("--gspo-gradient"),
        "has no effect: this loss has no ratio per response",
        f"leave it out, or use {listed(_OF_RESPONSE)}",
        algorithms=names_where(lambda estimator, loss: not loss.of_response),
    ),
    Combination(
        "--partial-rollout, --use-rollout-logprobs or `instep train-async` in bf16",
        lambda a, given: _rounding_clips(a),
        "tokens of older weights (all tokens with --use-rollout-logprobs) have the engine's log-probs as old ones; "
        "rounding alone puts most responses outside such narrow bounds (87 % of responses of 64 tokens)",
        "use --use-tis, --precision fp32, or an --eps-clip of 0.01 or more",
        refused=False,
        algorithms=_OF_RESPONSE,
    ),
    Combination(
        "--constant-loss-length with --calculate-per-token-loss",
        lambda a, given: a.constant_loss_length is not None and a.calculate_per_token_loss,
        "the loss has one denominator: a constant, or the number of tokens",
        "give one of the two",
    ),
    # ---- between trainer and engine ----
    Combination(
        "--use-tis or --use-rs with --use-rollout-logprobs",
        lambda a, given: _corrects(a) and a.use_rollout_logprobs,
        "the engine's log-probs are the old policy (always so with dppo), so there is nothing to correct",
        "leave the correction out",
    ),
    Combination(
        "--rollout-top-p or --rollout-top-k with --use-tis, --use-rs or --use-rollout-logprobs (dppo has it)",
        lambda a, given: _truncates(a) and (_corrects(a) or a.use_rollout_logprobs),
        "the engine's log-probs are of the truncated distribution, the trainer's of the full distribution: every ratio "
        "would be biased",
        "sample from the full distribution, or leave the correction out",
    ),
    Combination(
        "--rollout-top-p or --rollout-top-k with --partial-rollout or `instep train-async`",
        lambda a, given: _truncates(a) and _has_older_tokens(a),
        "log-probs of a truncated distribution cannot be the base of a ratio: tokens of older weights are trained "
        "without a correction, as if the current weights had sampled them",
        "sample from the full distribution, or only with the current weights (`instep train`, no --partial-rollout)",
        refused=False,
    ),
    Combination(
        "--tis-clip-low above --tis-clip",
        lambda a, given: a.tis_clip_low > a.tis_clip,
        "no weight is between the two",
        "exchange them",
    ),
    Combination(
        "--tis-clip-low with --tis-mode truncate",
        lambda a, given: a.tis_mode == "truncate" and a.tis_clip_low > 0,
        "truncation has an upper bound only",
        "use --tis-mode clip",
    ),
    Combination(
        "--rs-lower-bound above --rs-upper-bound",
        lambda a, given: a.use_rs and a.rs_lower_bound > a.rs_upper_bound,
        "everything would be rejected",
        "exchange them",
    ),
    Combination(
        "--use-opsm with one step per rollout",
        lambda a, given: a.use_opsm and _always_on_policy(a),
        "no sample is masked: the policy is still the one of the old log-probs",
        "use --num-steps-per-rollout 2 or more, or --use-rollout-logprobs",
    ),
    # ---- users' losses ----
    Combination(
        "--loss-type custom_loss without --custom-loss-function-path",
        lambda a, given: a.loss_type == "custom_loss" and a.custom_loss_function_path is None,
        "it needs the loss",
        "give --custom-loss-function-path",
    ),
    Combination(
        "--custom-loss-function-path",
        lambda a, given: a.loss_type != "custom_loss" and a.custom_loss_function_path is not None,
        "has no effect without --loss-type custom_loss",
        "give both",
    ),
    Combination(
        "--loss-type custom_loss with --tensor-model-parallel-size",
        lambda a, given: a.loss_type == "custom_loss" and a.tensor_model_parallel_size > 1,
        "a custom loss needs the logits of the whole vocabulary, but tensor parallelism splits it",
        "use data or pipeline parallelism",
    ),
    Combination(
        "--loss-type custom_loss with --context-parallel-size",
        lambda a, given: a.loss_type == "custom_loss" and a.context_parallel_size > 1,
        "a custom loss needs the logits of all tokens, but context parallelism splits them",
        "use data or pipeline parallelism",
    ),
    Combination(
        "--loss-type custom_loss with flags of the policy loss",
        lambda a, given: (
            a.loss_type == "custom_loss"
            and (_corrects(a) or a.use_opsm or a.custom_pg_loss_reducer_function_path is not None)
        ),
        "--use-tis, --use-rs, --use-opsm and a reducer belong to the policy loss",
        "do it in the function",
    ),
)
