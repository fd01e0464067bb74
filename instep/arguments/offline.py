"""`instep sft` and `instep dpo`, which sample nothing: the flags that have no meaning for them."""

from __future__ import annotations

from collections.abc import Iterator

from instep.algorithms.catalog import OFFLINE
from instep.arguments.all_flags import own_flags
from instep.arguments.asynchronous import ASYNCHRONOUS
from instep.arguments.cluster import CLUSTER
from instep.arguments.concern import Problem, Settings, flag_name
from instep.arguments.engine import ENGINE
from instep.arguments.evaluation import EVAL
from instep.arguments.reward import REWARD
from instep.arguments.rollout import ROLLOUT

_ONLY_DPO = ("dpo_beta", "dpo_label_smoothing", "chosen_key", "rejected_key")
_NOT_IN_DPO = ("calculate_per_token_loss", "constant_loss_length", "label_key")
# These act on rewards, advantages and the policy loss only; a flag that needs one of them is reported by its own rule.
_ONLY_RL = (
    "advantage_estimator rewards_normalization grpo_std_normalization normalize_advantages gamma lambd kl_coef "
    "use_kl_loss kl_loss_type custom_advantage_function_path overlong_buffer_len eps_clip eps_clip_high eps_clip_c "
    "gspo_gradient sapo_tau_pos sapo_tau_neg entropy_coef use_tis use_rs use_opsm use_rollout_logprobs critic_load "
    "use_routing_replay use_rollout_routing_replay "
    "critic_save critic_lr critic_lr_warmup_iters num_critic_only_steps value_clip megatron_config_path use_opd "
    "custom_pg_loss_reducer_function_path"
)
# Of the flags of rollouts and engines these act here, too; others are read by a rollout function of the user's at most.
_ACTS = {"rollout_function_path", "rollout_max_prompt_len", "custom_rollout_log_function_path", "vllm_max_model_len"}
_ENGINES = {"rollout_num_gpus", "rollout_num_gpus_per_engine", "colocate"}
_ENGINES |= {"offload", *(no + name for no in ("", "no_") for name in ("offload_train", "offload_rollout"))}
_LENGTHS = {"rollout_max_context_len", "rollout_max_response_len"}


def without_meaning(command: str) -> set[str]:
    """The attributes of flags that have no meaning for `instep <command>`, which trains."""
    names = set(_ONLY_DPO if command != "dpo" else _NOT_IN_DPO)
    if command not in ("train-async", "plan"):
        names |= {flag.attribute for flag in ASYNCHRONOUS.flags}
    if command not in OFFLINE:
        return names
    sampling = {flag.attribute for part in (ROLLOUT, REWARD, EVAL, ENGINE) for flag in part.flags} - _ACTS
    return names | sampling | {*_ONLY_RL.split(), "n_samples_per_prompt", "apply_chat_template"}


def only_dpo(args: Settings, given: set[str]) -> Iterator[Problem]:
    """DPO has flags of its own, and some others have no meaning for it."""
    for name in _ONLY_DPO if args.command != "dpo" else _NOT_IN_DPO:
        if name in given:
            what = "acts in `instep dpo` only" if args.command != "dpo" else "has no meaning for `instep dpo`"
            yield Problem(what, flag_name(name), "leave it out")


def sampling(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Flags of rollouts, rewards and evaluations have no meaning where nothing is sampled."""
    if args.command not in OFFLINE:
        return
    names = {flag.attribute: flag.name for flag in own_flags().values()}
    for name in _ONLY_RL.split():
        if name in given:
            yield Problem(f"has no meaning for `instep {args.command}`", names[name], "leave it out")
    if args.n_samples_per_prompt != 1:
        yield Problem(f"{args.command} reads the responses from the data", "--n-samples-per-prompt", "leave it out")
    if args.apply_chat_template:
        yield Problem(f"{args.command} reads the messages themselves", "--apply-chat-template", "leave it out")
    own_function = args.rollout_function_path != OFFLINE[args.command].defaults["rollout_function_path"]
    for flag in (*ROLLOUT.flags, *REWARD.flags):
        if flag.attribute in given - _ACTS and not own_function:
            remedy = "leave it out"
            if flag.attribute in _LENGTHS:
                what = "conversations of" if args.command == "sft" else "pairs whose prompts have"
                remedy += f"; --rollout-max-prompt-len leaves out {what} more tokens"
            yield Problem(f"acts on samples of an engine, and `instep {args.command}` has none", flag.name, remedy)
    for flag in EVAL.flags:
        if flag.attribute in given:
            yield Problem("there is no engine to evaluate with", flag.name, "use it with `instep train`")
    for flag in (*ENGINE.flags, *CLUSTER.flags):
        if flag.attribute in given & _ENGINES or (flag in ENGINE.flags and flag.attribute in given - _ACTS):
            yield Problem("there is no engine", flag.name, "leave it out")


def loss(args: Settings, given: set[str]) -> Iterator[Problem]:
    """The losses of `instep sft` and `instep dpo` belong to these commands."""
    for name, algorithm in OFFLINE.items():
        own = algorithm.loss.type
        if args.command == name and args.loss_type != own:
            yield Problem(f"is {args.loss_type}, but {name} trains {own}", "--loss-type", "leave it out")
        if args.command not in OFFLINE and args.loss_type == own:
            remedy = f"run `instep {name}` with the same flags"
            yield Problem(f"is what `instep {name}` sets", f"--loss-type {own}", remedy)


RULES = (loss, only_dpo, sampling)
