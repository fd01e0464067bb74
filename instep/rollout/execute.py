"""One group from prompts to rewarded samples: the generate function, the sample hooks and the reward."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from instep.arguments.rollout import context_of_model
from instep.arguments.settings import HookSettings
from instep.data.sampling import Presumed, requests_noted, settle
from instep.engines.kind import kind_of
from instep.errors import DataError, RolloutError
from instep.rollout.client import to_vllm
from instep.rollout.kv_budget import SAMPLES_PER_ENGINE, KVBudget
from instep.rollout.outputs import DONE, check_sample, check_versions, flatten
from instep.rollout.request_gate import gate
from instep.rollout.rewards.dispatch import apply_rewards
from instep.rollout.runtime import gather
from instep.rollout.tokens import prompt_ids
from instep.system import spans
from instep.system.hooks import Hook, load_function
from instep.system.run_context import PerRun, cached_per_run
from instep.types import Group, Sample, Status, name_of

DEFAULT_GENERATE = "instep.rollout.vllm_rollout.generate"
SEEDS = 2**62  # engines take 63 bits; the samples of a group have consecutive seeds
# When the KV cache is short, one request may hold a whole group if its `Execution.spread` is at most this.
# A group of 8 with exponential lengths has 2.7.
WIDEST = 4.0
NO_BOUND = 2**30  # tokens, for a model whose context length is not known
MAX_CONTINUATIONS = 100  # of one sample whose requests are aborted from outside (a sync, the end of another rollout)


# Generates the samples of a group (arguments, group, sampling parameters with the first seed, evaluation).
# It returns None where one request cannot serve all samples.
Together = Callable[["HookSettings", Group, dict[str, Any], bool], Awaitable[None] | None]


@dataclass
class Execution:
    """The settings and the state that all samples of one rollout or evaluation share."""

    args: HookSettings
    rollout_id: int
    evaluation: bool
    kv_budget: KVBudget
    reward_key: str | None = None
    max_context_len: int | None = None
    seed_tag: str = ""  # keeps the sampling seeds of evaluation sets apart
    aborted: bool = False  # once it is True, nothing new is started
    num_tokens: int = 0
    expected_tokens: float = 0.0  # of a sample, with its prompt
    expected_prompt: float = 0.0  # the prompt's part of `expected_tokens`
    spread: float = math.inf  # the expected ratio of a group's longest response to the mean one
    lengths: Lengths = field(default_factory=lambda: Lengths())

    def tokens_of_group(self, num_samples: int) -> float:
        """Return the expected tokens of each sample of a group in a KV cache, which holds their prompt once."""
        return self.expected_tokens - self.expected_prompt * (1 - 1 / max(1, num_samples))

    def num_short(self, num_samples: int) -> int:
        """Return how many of a group's samples have ended on average, over the time until its longest one ends.

        The group's request is answered only then. This many samples leave the budget at once, so that as many run as if
        each left when it ends.
        """
        return min(num_samples - 1, round(num_samples * (1 - 1 / self.spread))) if self.spread <= WIDEST else 0

    def count(self, sample: Sample) -> None:
        """Count a generated sample."""
        self.num_tokens += sample.response_length
        self.lengths.num_samples += 1
        self.lengths.num_tokens += len(sample.tokens)
        self.lengths.num_prompt_tokens += len(sample.tokens) - sample.response_length

    def count_longest(self, group: Group) -> None:
        """Count the tokens that a group's responses would have if all were as long as the longest one."""
        lengths = [sample.response_length for sample in group if sample.status is not Status.ABORTED]
        self.lengths.num_longest += len(lengths) * max(lengths, default=0)


@dataclass
class Lengths:
    """The lengths of the samples of a rollout or evaluation, with their prompts."""

    num_samples: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_longest: int = 0  # response tokens, if all of a group had as many as its longest response


_last: PerRun[dict[bool, Lengths]] = PerRun(dict)  # of the last rollout, and of the last evaluation


def new_execution(
    args: HookSettings, rollout_id: int, *, evaluation: bool = False, is_trial: bool = False
) -> Execution:
    """Return the state of a new rollout or evaluation. Its samples are expected to be as long as those of the last one.

    The first one has no expectation: too high a guess keeps engines idle, and that costs more than a KV cache that
    overflows. The lengths of a trial are forgotten.
    """
    budget = KVBudget(SAMPLES_PER_ENGINE * max(1, len(args.rollout_engine_urls)), gate().num_cached_tokens)
    out = Execution(args, rollout_id, evaluation, budget, args.reward_key, args.rollout_max_context_len)
    before = _last().get(evaluation)
    if before is not None and before.num_samples:
        out.expected_tokens = before.num_tokens / before.num_samples
        out.expected_prompt = before.num_prompt_tokens / before.num_samples
        if before.num_longest:
            out.spread = max(1.0, before.num_longest / (before.num_tokens - before.num_prompt_tokens))
    if not is_trial:
        _last()[evaluation] = out.lengths
    return out


def sampling_seed(*parts: int | str | None) -> int:
    """Return a 62-bit hash of `parts` (run seed, group, ...), the same in every process."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % SEEDS


def train_sampling_params(args: HookSettings) -> dict[str, Any]:
    """Return the sampling parameters of a training rollout that are set, with slime's names.

    `max_new_tokens` is always set: by default it is the context of the model, where engines end a response anyway.
    """
    params = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len or longest_response(args),
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
    }
    return {name: value for name, value in params.items() if value is not None}


def longest_response(args: HookSettings) -> int:
    """Return the bound of a response when no flag sets one."""
    return context_of_model(args) or NO_BOUND


async def run_group(
    execution: Execution, group: Group, params: dict[str, Any], together: Together | None = None
) -> Group:
    """Generate and reward all samples of a group. The result is flat: fan-out siblings are side by side.

    A sample that is ABORTED because the rollout ended early has no reward. With --group-rm its group has no reward
    either.

    Args:
        together: generates a group by one request where it can, so that samples need no separate tasks.
    """
    args = execution.args
    # All come in together, so that an engine may get one request for them.
    new = sum(not _is_generated(sample) for sample in group)
    tokens = execution.tokens_of_group(new)
    if new:
        await execution.kv_budget.enter(new, tokens)
    for sample in group:
        sample.execution_id = sample.execution_id or f"{sample.group_index}.{sample.index}"
    seed = sampling_seed(f"{execution.seed_tag}{args.rollout_seed}", group[0].group_index) if group else 0
    if together is not None and new == len(group) > 1:
        await asyncio.sleep(0)  # let all groups that begin now ask for it, so that it is known whether others wait
        if _may_go_together(execution, group):
            at_once = {**_within_context(execution, group[0], params), "seed": seed}
            await _at_once(execution, group, at_once, tokens, together)
    if together is not None and all(map(_is_generated, group)):
        out = group
        if not args.group_rm:
            await apply_rewards(args, out, execution.reward_key)
    else:
        jobs = [_timed_sample(execution, s, {**params, "seed": seed + i}, tokens) for i, s in enumerate(group)]
        out = [leaf for samples in await gather(jobs) for leaf in samples]
    if new:
        execution.count_longest(out)
    if args.group_rm and not any(s.status is Status.ABORTED for s in out):
        await apply_rewards(args, out, execution.reward_key)
    return out


def _may_go_together(execution: Execution, group: Group) -> bool:
    """Return whether no step between a group's prompts and its rewards needs a single sample.

    For example, a profile shows each sample by itself.
    """
    args = execution.args
    if args.custom_generate_function_path or args.rollout_sample_hook_path:
        return False
    if execution.aborted or spans.now() is not None or (execution.kv_budget.is_crowded and execution.spread > WIDEST):
        return False
    return not any(s.generate_function_path or s.response_length for s in group)


async def _at_once(
    execution: Execution, group: Group, params: dict[str, Any], tokens: float, together: Together
) -> None:
    """Let `together` generate the group. Samples that it has not generated, if any, still count."""
    budget, short = execution.kv_budget, 0
    try:
        if (work := together(execution.args, group, params, execution.evaluation)) is None:
            return
        short = execution.num_short(len(group))
        budget.leave(tokens, short)
        await work
    except BaseException:  # also a cancellation
        budget.leave(tokens, len(group) - short)
        raise
    generated = [sample for sample in group if _is_generated(sample)]
    budget.leave(tokens, len(generated) - short)
    for sample in generated:
        execution.count(sample)


async def _timed_sample(execution: Execution, sample: Sample, params: dict[str, Any], tokens: float) -> list[Sample]:
    def facts() -> dict[str, Any]:
        tokens = {"prompt_tokens": len(sample.tokens) - sample.response_length, "tokens": sample.response_length}
        return {"group": sample.group_index, "index": sample.index, "status": sample.status.value, **tokens}

    with spans.span("sample", spans.ROLLOUT, facts):
        return await _run_inside(execution, sample, params, tokens)


def _is_generated(sample: Sample) -> bool:
    """Return whether an earlier rollout has generated the sample: then it comes from the buffer."""
    return sample.status in DONE and sample.response_length > 0


async def _run_inside(execution: Execution, sample: Sample, params: dict[str, Any], tokens: float) -> list[Sample]:
    """Run the generate function, the sample hooks and the reward for one sample; fan-out makes several samples of it.

    The sample has come in with `tokens`, or is generated already.
    """
    args = execution.args
    are_siblings = False
    if _is_generated(sample):
        samples = [sample]
    else:
        try:
            if args.skip_failed_groups:
                await asyncio.sleep(0)  # all samples of the group must be here before one of them can fail
            if execution.aborted:
                sample.status = Status.ABORTED
                return [sample]
            samples, are_siblings = await _generate(execution, sample, params)
        finally:
            execution.kv_budget.leave(tokens)
        if any(s.status is Status.ABORTED for s in samples):
            return samples
        if args.rollout_sample_hook_path:
            samples = [await run_sample_hooks(execution, s) for s in samples]
        for done in samples:
            execution.count(done)
    if not args.group_rm:
        await apply_rewards(args, samples, execution.reward_key, are_siblings=are_siblings)
    return samples


async def _generate(execution: Execution, sample: Sample, params: dict[str, Any]) -> tuple[list[Sample], bool]:
    """Return what the generate function makes of `sample`, and whether it returned a list (fan-out)."""
    args = execution.args
    own = sample.generate_function_path
    path = own or args.custom_generate_function_path or DEFAULT_GENERATE
    of_run = own in (None, args.custom_generate_function_path)
    hook = Hook("--custom-generate-function-path" if of_run else "--eval-config, custom_generate_function_path", path)
    kwargs = _accepted(path, evaluation=execution.evaluation)
    params = _within_context(execution, sample, params)
    wanted, turns, before = to_vllm(params), sample.sampling_turns, sample.response_length
    sample.sampling_params = Presumed(wanted)
    samples = [sample]
    with requests_noted(lambda: kind_of(args.rollout_engine_kind).sampling_defaults(args)) as requests:
        for _ in range(MAX_CONTINUATIONS):
            output = await hook.acall(args, sample, dict(params), where=name_of(sample), **kwargs)
            try:
                samples = list(flatten(output))
            except RolloutError:
                raise hook.wrong(output, "a Sample, or a list of them", name_of(sample)) from None
            # Aborted from outside (a weight sync, the end of another rollout): the response is continued.
            if execution.aborted or path != DEFAULT_GENERATE or samples[0].status is not Status.ABORTED:
                break
            await asyncio.sleep(0.02)
    if not samples:
        raise hook.wrong(output, "a Sample, or a list of them: there is no sample", name_of(sample))
    for leaf in samples:
        leaf.group_index, leaf.index, leaf.execution_id = (sample.group_index, sample.index, sample.execution_id)
        leaf.prompt = leaf.prompt or sample.prompt
        leaf.label = sample.label if leaf.label is None else leaf.label
        check = check_versions if leaf.status is Status.ABORTED else check_sample
        check(leaf, hook)
        settle(leaf, requests, wanted, turns, before)
    return samples, not isinstance(output, Sample)


def _within_context(execution: Execution, sample: Sample, params: dict[str, Any]) -> dict[str, Any]:
    """Return `params` with at most as many new tokens as `max_context_len` leaves, the bound of prompt + response."""
    if (bound := execution.max_context_len) is None:
        return params
    num_prompt, wanted = len(prompt_ids(execution.args, sample)), params.get("max_new_tokens")
    if num_prompt >= bound:
        what = f"the prompt has {num_prompt} tokens and leaves no room for a response under {bound}"
        remedy = "set --rollout-max-prompt-len (--eval-max-prompt-len) to skip such prompts"
        raise DataError(what, where=f"max_context_len: {name_of(sample)}", remedy=remedy)
    return {**params, "max_new_tokens": bound - num_prompt if wanted is None else min(wanted, bound - num_prompt)}


def _accepted(path: str, **kwargs: Any) -> dict[str, Any]:
    """Return the keyword arguments that the function at `path` takes."""
    names = _parameters(path)
    return kwargs if names is None else {name: value for name, value in kwargs.items() if name in names}


@cached_per_run  # to read a signature takes longer than all other work here for a sample
def _parameters(path: str) -> frozenset[str] | None:
    parameters = inspect.signature(load_function(path)).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return None if takes_any else frozenset(parameters)


async def run_sample_hooks(execution: Execution, sample: Sample) -> Sample:
    """Apply the functions of --rollout-sample-hook-path; each may return another sample."""
    for path in execution.args.rollout_sample_hook_path or []:
        hook = Hook("--rollout-sample-hook-path", path)
        kwargs = _accepted(path, rollout_id=execution.rollout_id, evaluation=execution.evaluation)
        out = await hook.acall(execution.args, sample, where=name_of(sample), **kwargs)
        if out is not None and not isinstance(out, Sample):
            raise hook.wrong(out, "the sample, or None", name_of(sample))
        sample = out or sample
        check_sample(sample, hook)
    return sample
