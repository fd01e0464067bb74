"""Which flags act in which command, and the rules about flags that do not act."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from instep.algorithms.catalog import OFFLINE
from instep.arguments.all_flags import own_flags, passed_through
from instep.arguments.colocation import OFFLOAD
from instep.arguments.concern import Problem, Settings
from instep.arguments.engine import ENGINE
from instep.arguments.evaluation import EVAL
from instep.arguments.flag import Flag
from instep.arguments.reward import REWARD
from instep.arguments.rollout import ROLLOUT

_NOT_IN_DPO = {"calculate_per_token_loss", "constant_loss_length", "label_key"}
# These flags of rollouts and engines also act in `instep sft` and `instep dpo`.
_ACTS = {"rollout_function_path", "rollout_max_prompt_len", "custom_rollout_log_function_path", "vllm_max_model_len"}
_ENGINES = {"rollout_num_gpus", "rollout_num_gpus_per_engine", "colocate"}
_ENGINES |= OFFLOAD
_LENGTHS = {"rollout_max_context_len", "rollout_max_response_len"}
_READ = {flag.attribute for part in (ROLLOUT, REWARD) for flag in part.flags} - _ACTS  # by a rollout function
_SAMPLING = _READ | _ENGINES | {flag.attribute for part in (EVAL, ENGINE) for flag in part.flags} - _ACTS


@cache
def without_meaning(command: str) -> frozenset[str]:
    """Return the attributes of flags that have no meaning for `instep <command>`, which must be one that trains."""
    here = {"", command, "rl" if command not in OFFLINE else ""}
    names = {flag.attribute for flag in own_flags().values() if flag.only not in here}
    if command in OFFLINE:
        names |= _SAMPLING | {"n_samples_per_prompt", "apply_chat_template"}
    return frozenset(names | _NOT_IN_DPO if command == "dpo" else names)


def acts_in(command: str, flag: Flag | None) -> bool:
    """Return whether a flag acts in `instep <command>`."""
    if flag is None or flag.status != "acts":
        return False
    if command == "serve":
        return flag.served or flag.passed_to != ""
    return flag.attribute not in without_meaning(command)


def elsewhere(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Report flags that act only in another command, except `--update-weights-interval 1`: every run does that."""
    command, own = args.command, own_flags(sglang=args.rollout_backend == "sglang")
    flags = {f.attribute: f for f in (*passed_through().values(), *own.values())}
    for flag in (flag for name, flag in flags.items() if name in given and not acts_in(command, flag)):
        what = f"has no meaning for `instep {command}`"
        if command == "serve":
            yield Problem(what, flag.name, "leave it out; `instep serve --help` lists what it takes")
        elif flag.only not in ("", "rl"):
            if flag.attribute != "update_weights_interval" or args.update_weights_interval != 1:
                yield Problem(f"acts in `instep {flag.only}` only", flag.name, "use that command, or leave it out")
        elif flag.only == "rl" or flag.attribute in _NOT_IN_DPO:
            yield Problem(what, flag.name, "leave it out")


def sampling(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Report flags of rollouts, rewards, evaluations and engines in commands that sample nothing.

    The user's own rollout function may read the flags of rollouts and rewards.
    """
    if args.command not in OFFLINE:
        return
    if args.n_samples_per_prompt != 1:
        yield Problem(f"{args.command} reads the responses from the data", "--n-samples-per-prompt", "leave it out")
    if args.apply_chat_template:
        yield Problem(f"{args.command} reads the messages themselves", "--apply-chat-template", "leave it out")
    own = args.rollout_function_path != OFFLINE[args.command].defaults["rollout_function_path"]
    for flag in {f.attribute: f for f in own_flags().values() if f.attribute in given & _SAMPLING}.values():
        if own and flag.attribute in _READ:
            continue
        remedy = "leave it out"
        if flag.attribute in _LENGTHS:
            what = "conversations of" if args.command == "sft" else "pairs whose prompts have"
            remedy += f"; --rollout-max-prompt-len leaves out {what} more tokens"
        yield Problem(f"acts on an engine's samples, but `instep {args.command}` samples nothing", flag.name, remedy)


def loss(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that the losses of `instep sft` and `instep dpo` are used only there."""
    for name, algorithm in OFFLINE.items():
        own = algorithm.loss.type
        if args.command == name and args.loss_type != own:
            yield Problem(f"is {args.loss_type}, but {name} trains {own}", "--loss-type", "leave it out")
        if args.command not in OFFLINE and args.loss_type == own:
            remedy = f"run `instep {name}` with the same flags"
            yield Problem(f"is what `instep {name}` sets", f"--loss-type {own}", remedy)


RULES = (loss, elsewhere, sampling)
