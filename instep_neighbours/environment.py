"""Environments of the package `verifiers` (docs/neighbours/verifiers.md)."""

from __future__ import annotations

from collections.abc import Iterator

from instep.arguments.concern import Given, Problem, Settings, flag_name
from instep.arguments.flag import read_flags

PACKAGE = "instep_neighbours.verifiers"
ROLLOUT = f"{PACKAGE}.generate_rollout"
GENERATE = f"{PACKAGE}.generate"
TASKS = f"{PACKAGE}.Tasks"

ENVIRONMENT = read_flags(__file__, rollout=ROLLOUT)


def rollout_function_path(args: Settings, given: Given) -> str:
    return ROLLOUT if args.env and "rollout_function_path" not in given else args.rollout_function_path


def custom_generate_function_path(args: Settings, given: Given) -> str | None:
    return args.custom_generate_function_path or (GENERATE if args.env else None)


def data_source_path(args: Settings, given: Given) -> str:
    return TASKS if args.env and "data_source_path" not in given else args.data_source_path


GROUPS = (ENVIRONMENT,)
RESOLVERS = (rollout_function_path, custom_generate_function_path, data_source_path)

_OWN = {  # handled by the environment itself
    "data": ("prompt_data", "data_source_path", "eval_prompt_data", "eval_config"),
    "turns": ("custom_generate_function_path", "eval_function_path"),
    "rewards": ("rm_type", "custom_rm_path", "group_rm"),
}
_LENGTH = "the length of an episode is the environment's"
_REFUSED = {
    "partial_rollout": ("an episode cannot be continued", "remove it: open episodes at a rollout's end are dropped"),
    "rollout_max_context_len": (_LENGTH, "--env-args agent.max_total_tokens"),
    "eval_max_context_len": (_LENGTH, "--env-eval-args agent.max_total_tokens"),
    "rollout_stop_token_ids": (
        "the renderer names the tokens that end a turn",
        "give --rollout-stop or --env-renderer",
    ),
    "use_rollout_routing_replay": ("verifiers reads routed experts in another format than vLLM's", "remove it"),
}


def environment(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Yield problems with flags that need `--env`, or that do not work with it."""
    if args.env is None:
        for name in sorted({flag.attribute for flag in ENVIRONMENT.flags} & given):
            yield Problem("acts only with --env", flag_name(name), "name an environment, or remove it")
        if args.rollout_function_path == ROLLOUT:
            yield Problem("needs the name of an environment", f"--rollout-function-path {ROLLOUT}", "give --env NAME")
        return
    if args.rollout_function_path != ROLLOUT:
        what = "has its own rollout function"
        yield Problem(what, "--env", f"remove --rollout-function-path, or give {ROLLOUT}")
    for whose, names in _OWN.items():
        for name in names:
            if name in given:
                yield Problem(
                    f"the {whose} are the environment's", f"{flag_name(name)} with --env", "remove one of them"
                )
    for name, (what, remedy) in _REFUSED.items():
        if name in given and getattr(args, name):
            yield Problem(what, f"{flag_name(name)} with --env", remedy)
    if args.env_address is not None and not args.env_address.startswith(("tcp://", "ipc://")):
        yield Problem(
            "is not an address of ZeroMQ", f"--env-address {args.env_address}", "such as tcp://127.0.0.1:5000"
        )
    if args.env_address is not None and args.env_num_servers > 1:
        yield Problem("starts servers, but one is running already", "--env-num-servers with --env-address", "give one")


RULES = (environment,)
