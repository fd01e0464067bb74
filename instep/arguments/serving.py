"""`instep serve`: the flags of `instep train` that act in it, and its port."""

from __future__ import annotations

from collections.abc import Iterator

from instep.arguments.concern import Given, Problem, Settings

DEFAULT_PORT = 8000  # vLLM's own


def debug_rollout_only(args: Settings, given: Given) -> bool:
    """`instep serve` has no trainer, so the plan must keep no place for one."""
    return args.debug_rollout_only or args.command == "serve"


def port(args: Settings, given: Given) -> int | None:
    return args.port or (DEFAULT_PORT if args.command == "serve" else None)


RESOLVERS = (debug_rollout_only, port)


def half_precision(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.vllm_dtype == "float16" and args.command != "serve":
        what = "gradients in float16 need a loss scale, which the trainer has not, and engines have its dtype"
        yield Problem(what, "--vllm-dtype float16", "use bfloat16 or float32")
    elif args.vllm_dtype == "float16" and args.rollout_backend == "embedded":
        what = "the embedded engine computes in float32 or bfloat16"
        yield Problem(what, "--vllm-dtype float16", "use one of these, or --rollout-backend vllm")


def own_router(args: Settings, given: set[str]) -> Iterator[Problem]:
    if "port" in given and args.vllm_router_ip is not None:
        yield Problem("requests go to the router of yours", "--port and --vllm-router-ip", "give one of the two")


RULES = (own_router, half_precision)
