"""`instep sft` and `instep dpo`, which sample nothing: the flags that have no meaning for them."""

from __future__ import annotations

from collections.abc import Iterator

from instep.algorithms.catalog import OFFLINE
from instep.arguments.all_flags import groups, own_flags
from instep.arguments.cluster import CLUSTER
from instep.arguments.concern import Problem, Settings
from instep.arguments.engine import ENGINE
from instep.arguments.evaluation import EVAL
from instep.arguments.reward import REWARD
from instep.arguments.rollout import ROLLOUT

_NOT_IN_DPO = ("calculate_per_token_loss", "constant_loss_length", "label_key")
# Of the flags of rollouts and engines these act here, too; others are read by a rollout function of the user's at most.
_ACTS = {"rollout_function_path", "rollout_max_prompt_len", "custom_rollout_log_function_path", "vllm_max_model_len"}
_ENGINES = {"rollout_num_gpus", "rollout_num_gpus_per_engine", "colocate"}
_ENGINES |= {"offload", *(no + name for no in ("", "no_") for name in ("offload_train", "offload_rollout"))}
_LENGTHS = {"rollout_max_context_len", "rollout_max_response_len"}


def without_meaning(command: str) -> set[str]:
    """The attributes of flags that have no meaning for `instep <command>`, which trains."""
    here = {"", command, "train-async" if command == "plan" else "", "rl" if command not in OFFLINE else ""}
    names = {flag.attribute for flag in own_flags().values() if flag.only not in here}
    names |= {*_NOT_IN_DPO} if command == "dpo" else set()
    if command not in OFFLINE:
        return names
    sampling = {flag.attribute for part in (ROLLOUT, REWARD, EVAL, ENGINE) for flag in part.flags} - _ACTS
    return names | sampling | {"n_samples_per_prompt", "apply_chat_template"}


def elsewhere(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Flags that act in another command; slime's default of one is what every run does."""
    for flag in (flag for group in groups() for flag in group.flags if flag.attribute in given):
        if flag.only in ("dpo", "train-async") and flag.only != args.command:
            if (flag.attribute, getattr(args, flag.attribute)) != ("update_weights_interval", 1):
                yield Problem(f"acts in `instep {flag.only}` only", flag.name, "use that command, or leave it out")
        no_dpo = args.command == "dpo" and flag.attribute in _NOT_IN_DPO
        if no_dpo or (flag.only == "rl" and args.command in OFFLINE):
            yield Problem(f"has no meaning for `instep {args.command}`", flag.name, "leave it out")


def sampling(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Flags of rollouts, rewards and evaluations have no meaning where nothing is sampled."""
    if args.command not in OFFLINE:
        return
    if args.n_samples_per_prompt != 1:
        yield Problem(f"{args.command} reads the responses from the data", "--n-samples-per-prompt", "leave it out")
    if args.apply_chat_template:
        yield Problem(f"{args.command} reads the messages themselves", "--apply-chat-template", "leave it out")
    flags = [*EVAL.flags, *ENGINE.flags, *(flag for flag in CLUSTER.flags if flag.attribute in _ENGINES)]
    if args.rollout_function_path == OFFLINE[args.command].defaults["rollout_function_path"]:
        flags += [*ROLLOUT.flags, *REWARD.flags]
    for flag in (flag for flag in flags if flag.attribute in given - _ACTS):
        remedy = "leave it out"
        if flag.attribute in _LENGTHS:
            what = "conversations of" if args.command == "sft" else "pairs whose prompts have"
            remedy += f"; --rollout-max-prompt-len leaves out {what} more tokens"
        yield Problem(f"acts on samples of an engine, and `instep {args.command}` has none", flag.name, remedy)


def loss(args: Settings, given: set[str]) -> Iterator[Problem]:
    """The losses of `instep sft` and `instep dpo` belong to these commands."""
    for name, algorithm in OFFLINE.items():
        own = algorithm.loss.type
        if args.command == name and args.loss_type != own:
            yield Problem(f"is {args.loss_type}, but {name} trains {own}", "--loss-type", "leave it out")
        if args.command not in OFFLINE and args.loss_type == own:
            remedy = f"run `instep {name}` with the same flags"
            yield Problem(f"is what `instep {name}` sets", f"--loss-type {own}", remedy)


RULES = (loss, elsewhere, sampling)
