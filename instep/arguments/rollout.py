"""Generation: sampling, lengths, filters and hooks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from instep.algorithms.catalog import DEFAULT_ROLLOUT
from instep.arguments.concern import Given, Problem, Settings, flag_name
from instep.arguments.flag import read_flags
from instep.arguments.model import known_config
from instep.engines.dialect import dialect_of
from instep.engines.topology import max_model_lens
from instep.models.rope import context_length, rope_by_layer

ROLLOUT = read_flags(__file__, default_rollout=DEFAULT_ROLLOUT)


def context_of_model(args: Settings) -> int | None:
    """Return the most tokens of prompt + response that the trainer and all engines with its weights support.

    The limit comes from flags, groups of `--vllm-config` and config.json; None if they have no limit.
    """
    return min((length for length in _contexts(args) if length is not None), default=None)


def _contexts(args: Settings) -> list[int | None]:
    config = known_config(args)
    return [context_length(config, length) for length in max_model_lens(args)]


# ---- what follows from the flags -------------------------------------------------------------------------------------


def over_sampling_batch_size(args: Settings, given: Given) -> int | None:
    return args.over_sampling_batch_size or args.rollout_batch_size


def rollout_max_prompt_len(args: Settings, given: Given) -> int | None:
    """Return the limit; by default, a prompt that instep renders leaves room for one token of the response."""
    known = [n for n in (context_of_model(args), args.rollout_max_context_len) if n is not None]
    if args.rollout_max_prompt_len is None and known and args.apply_chat_template:
        return min(known) - 1
    return args.rollout_max_prompt_len


RESOLVERS = (over_sampling_batch_size, rollout_max_prompt_len)

# ---- rules -----------------------------------------------------------------------------------------------------------


def prompt_length(args: Settings, given: set[str]) -> Iterator[Problem]:
    longest, whole, model = args.rollout_max_prompt_len, args.rollout_max_context_len, context_of_model(args)
    if longest is not None and whole is not None and longest >= whole:
        what = f"leaves no room for a response in {whole} tokens"
        yield Problem(what, "--rollout-max-prompt-len", f"use less than {whole}")
    if longest is not None and model is not None and longest >= model:
        what = f"{longest} leaves no room for a response in the model's context of {model} tokens"
        yield Problem(what, "--rollout-max-prompt-len", f"use at most {model - 1}")


def response_length(args: Settings, given: set[str]) -> Iterator[Problem]:
    response, whole = args.rollout_max_response_len, args.vllm_max_model_len
    if whole is not None and response is not None and response >= whole:
        what = f"leaves no room for a prompt in {dialect_of(args).flag(dialect_of(args).length)} {whole}"
        yield Problem(what, f"--rollout-max-response-len {response}", "raise the former or lower the latter")
        return
    context = context_of_model(args)
    for name in ("rollout_max_response_len", "eval_max_response_len", "rollout_max_context_len"):
        most = getattr(args, name)
        if context is not None and most is not None and most >= context + (name == "rollout_max_context_len"):
            what = f"{most} exceeds the model's context of {context} tokens, where every response ends"
            yield Problem(what, flag_name(name), f"use less than {context}", refused=False)


def one_context(args: Settings, given: set[str]) -> Iterator[Problem]:
    """Check that trainer and engines of a model with longrope use the same factors: all short or all long."""
    config = known_config(args)
    original = context_length(config, None)
    if original is not None and any(rope["rope_type"] == "longrope" for rope in rope_by_layer(config).values()):
        contexts = sorted({length for length in _contexts(args) if length is not None})
        if contexts and contexts[0] <= original < contexts[-1]:
            what = f"engines of {contexts[0]} and of {contexts[-1]} tokens have different rotary factors (longrope)"
            remedy = f"give all of them at most {original} tokens, or all of them more"
            dialect = dialect_of(args)
            yield Problem(what, f"{dialect.length} of the groups in {dialect.file_flag}", remedy)


def stop_tokens(args: Settings, given: set[str]) -> Iterator[Problem]:
    size = known_config(args).get("vocab_size")
    for token in args.rollout_stop_token_ids or ():
        if isinstance(size, int) and token >= size:
            what = f"the model has {size} tokens, but not {token}"
            yield Problem(what, "--rollout-stop-token-ids", f"give ids below {size}")


def stop_strings(args: Settings, given: set[str]) -> Iterator[Problem]:
    for stop in args.rollout_stop or ():
        if re.search(r"\\[nrt]", stop):
            what = f"{stop} has a backslash and a letter, not a newline or tab"
            yield Problem(what, "--rollout-stop", "for a newline, write $'\\n' in bash", refused=False)


def top_k(args: Settings, given: set[str]) -> Iterator[Problem]:
    if args.rollout_top_k == 0 or args.rollout_top_k < -1:
        yield Problem(f"{args.rollout_top_k} keeps no token", "--rollout-top-k", "use -1 (off) or at least 1")


def over_sampling(args: Settings, given: set[str]) -> Iterator[Problem]:
    asked, needed = args.over_sampling_batch_size, args.rollout_batch_size
    if asked is not None and needed is not None and asked < needed:
        what = f"{asked} is less than --rollout-batch-size {needed}"
        yield Problem(what, "--over-sampling-batch-size", f"use at least {needed}")


RULES = (prompt_length, response_length, one_context, stop_tokens, stop_strings, top_k, over_sampling)
