"""Environments of the package `verifiers` (docs/neighbours/verifiers.md)."""

from __future__ import annotations

from collections.abc import Iterator

from instep.arguments.concern import Given, Problem, Settings, flag_name
from instep.arguments.flag import Flag, FlagGroup, Number, json_object, path_flag

PACKAGE = "instep_neighbours.verifiers"
ROLLOUT = f"{PACKAGE}.generate_rollout"
GENERATE = f"{PACKAGE}.generate"
TASKS = f"{PACKAGE}.Tasks"

ENVIRONMENT = FlagGroup(
    "Environments of verifiers (docs/neighbours/verifiers.md)",
    (
        Flag(
            "--env",
            help="name of a taskset of verifiers, whose tasks, turns and rewards a run trains on; means "
            f"--rollout-function-path {ROLLOUT}",
        ),
        Flag(
            "--env-args",
            json_object,
            {},
            "what verifiers calls [env], such as "
            '{"taskset": {"num_tasks": 100}, "agent": {"runtime": {"type": "subprocess"}}}, and its [select]',
        ),
        Flag(
            "--env-eval-args",
            json_object,
            None,
            "the same for evaluations, over --env-args: {} evaluates on the tasks that are trained on",
        ),
        Flag("--env-renderer", help="name of the renderer of the package `renderers`; default: by the model's name"),
        path_flag("--env-python", "a Python that has verifiers and the environment; default: instep's own"),
        Flag("--env-num-servers", Number(int, 1, 256), 1, "processes that share the episodes of the environment"),
        Flag("--env-address", help="tcp://HOST:PORT of an env server of verifiers that runs already, for training"),
    ),
)


def rollout_function_path(args: Settings, given: Given) -> str:
    return ROLLOUT if args.env and "rollout_function_path" not in given else args.rollout_function_path


def custom_generate_function_path(args: Settings, given: Given) -> str | None:
    return args.custom_generate_function_path or (GENERATE if args.env else None)


def data_source_path(args: Settings, given: Given) -> str:
    return TASKS if args.env and "data_source_path" not in given else args.data_source_path


GROUPS = (ENVIRONMENT,)
RESOLVERS = (rollout_function_path, custom_generate_function_path, data_source_path)

_OWN = {  # what an environment does itself
    "data": ("prompt_data", "data_source_path", "eval_prompt_data", "eval_config"),
    "turns": ("custom_generate_function_path", "eval_function_path"),
    "rewards": ("rm_type", "custom_rm_path", "group_rm"),
}
_REFUSED = {
    "partial_rollout": ("an episode cannot be continued", "leave it out: what is left at a rollout's end is dropped"),
    "rollout_max_context_len": ("the length of an episode is the environment's", "--env-args agent.max_total_tokens"),
    "eval_max_context_len": ("the length of an episode is the environment's", "--env-eval-args agent.max_total_tokens"),
    "rollout_stop_token_ids": (
        "the renderer names the tokens that end a turn",
        "give --rollout-stop, or --env-renderer",
    ),
    "use_rollout_routing_replay": ("verifiers reads routed experts in another form than vLLM's", "leave it out"),
}


def environment(args: Settings, given: set[str]) -> Iterator[Problem]:
    """What goes with `--env`, and what goes with nothing else."""
    if args.env is None:
        for name in sorted({flag.attribute for flag in ENVIRONMENT.flags} & given):
            yield Problem("acts only with --env", flag_name(name), "name an environment, or leave it out")
        if args.rollout_function_path == ROLLOUT:
            yield Problem("needs the name of an environment", f"--rollout-function-path {ROLLOUT}", "give --env NAME")
        return
    if args.rollout_function_path != ROLLOUT:
        what = "has a rollout function of its own"
        yield Problem(what, "--env", f"leave --rollout-function-path out, or give {ROLLOUT}")
    for whose, names in _OWN.items():
        for name in names:
            if name in given:
                yield Problem(f"the {whose} are the environment's", f"{flag_name(name)} with --env", "leave one out")
    for name, (what, remedy) in _REFUSED.items():
        if name in given and getattr(args, name):
            yield Problem(what, f"{flag_name(name)} with --env", remedy)
    if args.env_address is not None and not args.env_address.startswith(("tcp://", "ipc://")):
        yield Problem("is no address of ZeroMQ", f"--env-address {args.env_address}", "such as tcp://127.0.0.1:5000")
    if args.env_address is not None and args.env_num_servers > 1:
        yield Problem("starts servers, and there is one already", "--env-num-servers with --env-address", "give one")


RULES = (environment,)
