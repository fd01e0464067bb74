"""Which flags of losses and importance corrections go together; and what follows from those that are not given."""

from __future__ import annotations

from instep.arguments.args import Args
from instep.arguments.rules import Rule, given, only_with, without

# The bounds (--eps-clip, --eps-clip-high) of each estimator with a loss of its own, where none is given: the papers'.
CLIP_DEFAULTS = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}


def _corrects(args: Args) -> bool:
    return args.use_tis or args.use_rs


RULES: tuple[Rule, ...] = (
    # ---- forms of the policy loss ----
    Rule(
        without("cispo", "sapo"),
        "--eps-clip of 1 or more",
        lambda a, given: a.eps_clip >= 1,
        "it would never clip below",
        "use a value below 1, such as 0.2",
        reads="eps_clip",
    ),
    Rule(
        ("cispo",),
        "--eps-clip above 1",
        lambda a, given: a.eps_clip > 1,
        "the lower bound of a weight is 1 - eps_clip, which is 0 at least",
        "use 1 for no lower bound",
        reads="eps_clip",
    ),
    Rule(
        ("sapo",),
        "--eps-clip, --eps-clip-high or --eps-clip-c",
        given("--eps-clip", "--eps-clip-high", "--eps-clip-c"),
        "SAPO has a smooth gate and clips nothing",
        "use --sapo-tau-pos and --sapo-tau-neg",
    ),
    Rule(
        ("cispo",),
        "--eps-clip-c",
        given("--eps-clip-c"),
        "CISPO bounds the weight itself; there is no second bound",
        "use --eps-clip-high",
    ),
    Rule(
        without("sapo"),
        "--sapo-tau-pos or --sapo-tau-neg",
        given("--sapo-tau-pos", "--sapo-tau-neg"),
        "has no effect without SAPO's gate",
        "leave it out, or use sapo",
    ),
    # ---- between trainer and engine ----
    Rule(
        (),
        "--use-tis or --use-rs with --use-rollout-logprobs",
        lambda a, given: _corrects(a) and a.use_rollout_logprobs,
        "with the engine's log-probs as old policy there is nothing to correct",
        "give one of the two",
    ),
    Rule(
        (),
        "--rollout-top-p or --rollout-top-k with --use-tis, --use-rs or --use-rollout-logprobs",
        lambda a, given: (a.rollout_top_p < 1 or a.rollout_top_k > 0) and (_corrects(a) or a.use_rollout_logprobs),
        "the engine's log-probs are of the truncated distribution, the trainer's of the full one: every ratio would be "
        "biased",
        "sample from the full distribution, or leave the correction out",
        reads="rollout_top_p rollout_top_k",
    ),
    Rule(
        (),
        "--tis-clip-low above --tis-clip",
        lambda a, given: a.tis_clip_low > a.tis_clip,
        "no weight lies between the two",
        "exchange them",
        reads="tis_clip tis_clip_low",
    ),
    Rule(
        (),
        "--tis-clip-low with --tis-mode truncate",
        lambda a, given: a.tis_mode == "truncate" and a.tis_clip_low > 0,
        "truncation has an upper bound only",
        "use --tis-mode clip",
        reads="tis_mode tis_clip_low",
    ),
    Rule(
        (),
        "--rs-lower-bound above --rs-upper-bound",
        lambda a, given: a.use_rs and a.rs_lower_bound > a.rs_upper_bound,
        "everything would be rejected",
        "exchange them",
        reads="rs_lower_bound rs_upper_bound tis_clip tis_clip_low",
    ),
    *only_with(("--use-tis",), "--tis-level", "--tis-mode", "--custom-tis-function-path"),
    *only_with(("--use-tis", "--use-rs"), "--tis-clip", "--tis-clip-low"),
    *only_with(("--use-rs",), "--rs-level", "--rs-lower-bound", "--rs-upper-bound", "--rs-veto-threshold"),
    *only_with(("--use-opsm",), "--opsm-delta"),
    # ---- users' losses ----
    Rule(
        (),
        "--loss-type custom_loss without --custom-loss-function-path",
        lambda a, given: a.loss_type == "custom_loss" and a.custom_loss_function_path is None,
        "it needs the loss",
        "give --custom-loss-function-path",
        reads="loss_type custom_loss_function_path",
    ),
    Rule(
        (),
        "--custom-loss-function-path",
        lambda a, given: a.loss_type != "custom_loss" and a.custom_loss_function_path is not None,
        "has no effect without --loss-type custom_loss",
        "give both",
        reads="loss_type custom_loss_function_path",
    ),
    Rule(
        (),
        "--loss-type custom_loss with --tensor-model-parallel-size",
        lambda a, given: a.loss_type == "custom_loss" and a.tensor_model_parallel_size > 1,
        "a custom loss gets the logits of the whole vocabulary, which tensor parallelism splits",
        "use data or pipeline parallelism",
        reads="loss_type tensor_model_parallel_size",
    ),
    Rule(
        (),
        "--loss-type custom_loss with flags of the policy loss",
        lambda a, given: (
            a.loss_type == "custom_loss"
            and (_corrects(a) or a.use_opsm or a.custom_pg_loss_reducer_function_path is not None)
        ),
        "--use-tis, --use-rs, --use-opsm and a reducer belong to the policy loss",
        "do it in the function",
        reads="loss_type custom_pg_loss_reducer_function_path",
    ),
)


def derive_losses(args: Args, given: set[str]) -> None:
    """Bounds that are not given: the paper's of the estimator; and names under which slime's examples read ours."""
    if "eps_clip" not in given and args.advantage_estimator in CLIP_DEFAULTS:
        args.eps_clip, high = CLIP_DEFAULTS[args.advantage_estimator]
        args.eps_clip_high = high if args.eps_clip_high is None else args.eps_clip_high
    args.eps_clip_high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    args.tis_lower_bound, args.tis_upper_bound, args.tis_batch_normalize = args.tis_clip_low, args.tis_clip, False
    args.rs_lower_bound = args.tis_clip_low if args.rs_lower_bound is None else args.rs_lower_bound
    args.rs_upper_bound = args.tis_clip if args.rs_upper_bound is None else args.rs_upper_bound
