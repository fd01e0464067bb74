"""`instep sft` and `instep dpo`, which sample nothing: the flags that have no meaning for them."""

from __future__ import annotations

from collections.abc import Iterator

from instep.algorithms.catalog import OFFLINE
from instep.arguments.all_flags import own_flags
from instep.arguments.concern import Problem, Settings, flag_name

_ONLY_DPO = ("dpo_beta", "dpo_label_smoothing", "chosen_key", "rejected_key")
_NOT_IN_DPO = ("calculate_per_token_loss", "constant_loss_length", "label_key", "rollout_temperature")
# These act on rewards, advantages and the policy loss only; a flag that needs one of them is reported by its own rule.
_ONLY_RL = (
    "advantage_estimator rewards_normalization grpo_std_normalization normalize_advantages gamma lambd kl_coef "
    "use_kl_loss custom_advantage_function_path overlong_buffer_len eps_clip eps_clip_high eps_clip_c sapo_tau_pos "
    "sapo_tau_neg entropy_coef use_tis use_rs use_opsm use_rollout_logprobs partial_rollout group_rm critic_load "
    "critic_save critic_lr critic_lr_warmup_iters num_critic_only_steps value_clip megatron_config_path use_opd"
)
_ONLINE = "n_samples_per_prompt apply_chat_template eval_interval eval_prompt_data eval_config"


def without_meaning(command: str) -> set[str]:
    """The attributes of flags that have no meaning for `instep train`, `instep sft` or `instep dpo`."""
    names = set(_ONLY_DPO if command != "dpo" else _NOT_IN_DPO)
    return names | {*_ONLY_RL.split(), *_ONLINE.split()} if command in OFFLINE else names


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
    for name in ("eval_interval", "eval_prompt_data", "eval_config"):
        if name in given:
            yield Problem("there is no engine to evaluate with", flag_name(name), "use it with `instep train`")


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
