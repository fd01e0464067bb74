"""Rollouts beside the training: `instep train-async`."""

from __future__ import annotations

from collections.abc import Iterator

from instep.arguments.concern import Given, Problem, Settings, flag_name
from instep.arguments.flag import read_flags
from instep.arguments.rollout import DEFAULT_ROLLOUT
from instep.engines.backend_choice import tells_versions
from instep.engines.dialect import dialect_of
from instep.engines.kind import AUTO
from instep.weights.way import RESTART, SINGLE_COPY

ASYNCHRONOUS = read_flags(__file__)


def pause_mode(args: Settings, given: Given) -> str:
    """Return the pause mode; for `auto`, `keep` if `--max-staleness` is set and the engines report weight versions.

    Long responses then go on during syncs: to end and resend them would cost half the gain. In deterministic mode they
    end before each sync.
    """
    if args.pause_mode != AUTO:
        return args.pause_mode
    through_syncs = args.command == "train-async" and args.max_staleness and not args.deterministic_mode
    refused = args.weight_sync == RESTART or args.prefill_num_servers or args.vllm_config
    if not through_syncs or refused or args.rollout_external_engine_addrs:
        return "abort"
    return "keep" if tells_versions(args) else "abort"


def both_at_work(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that trainer and engines need no memory of each other: they work at the same time."""
    if args.command != "train-async":
        return
    asked = [flag_name(name) for name in ("offload", "offload_train", "offload_rollout") if name in given]
    if asked:
        what = "trainer and engines work at the same time, so neither can sleep"
        dialect = dialect_of(args)
        remedy = f"leave it out (both share the GPU's memory: {dialect.flag(dialect.memory)}), or use `instep train`"
        yield Problem(what, " and ".join(asked), remedy)
    if args.weight_sync == SINGLE_COPY:
        what = "the engines would compute with weights that a step is changing"
        yield Problem(what, f"--weight-sync {SINGLE_COPY}", "use another --weight-sync, or `instep train`")


def staleness(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check the bound on the age of tokens against the other flags."""
    bound, where = args.max_staleness, "--max-staleness"
    if args.command != "train-async":
        return
    if not bound and "stale_groups" in given:
        yield Problem("has no effect without --max-staleness of at least 1", "--stale-groups", "give both")
    if bound == 0 and args.update_weights_interval > 1:
        what = "between two syncs the trained weights are newer than all tokens"
        yield Problem(what, f"{where} 0 with --update-weights-interval", f"use {where} 1, or sync after every rollout")
    if bound == 0 and args.partial_rollout:
        what = "a continued response has older tokens"
        yield Problem(what, f"{where} 0 with --partial-rollout", f"leave one of them out, or use {where} 1")
    if bound and args.rollout_function_path != DEFAULT_ROLLOUT:
        what = "a custom rollout function generates whole rollouts"
        yield Problem(what, f"{where} with --rollout-function-path", f"leave {where} out: it then runs one round ahead")
    for name in ("over_sampling_batch_size", "partial_rollout"):
        if bound and name in given:
            what = f"has no effect with {where}: a new group starts when another ends, and goes on after each sync"
            yield Problem(what, flag_name(name), refused=False)


RESOLVERS = (pause_mode,)
RULES = (both_at_work, staleness)
