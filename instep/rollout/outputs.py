"""The results of rollout functions in the form that the controller reads: flat groups of checked samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from instep.errors import RolloutError
from instep.system.hooks import Hook
from instep.system.hooks.user_code import said
from instep.types import (
    Group,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    Sample,
    Status,
    VersionSpan,
    as_number,
    name_of,
)

DONE = (Status.COMPLETED, Status.TRUNCATED, Status.FAILED)


def flatten(group: Any, where: str = "a group of samples") -> Iterator[Sample]:
    """Yield the samples of a group in order. A group may nest lists (fan-out). `where` names its maker in errors."""
    if isinstance(group, Sample):
        yield group
    elif isinstance(group, (list, tuple)):
        for item in group:
            yield from flatten(item, where)
    else:
        what = f"a group holds {type(group).__name__}, not Sample"
        raise RolloutError(what, where=where, remedy="return groups of Sample")


def taken_from(data_source: Any, num_groups: int) -> list[Group]:
    """Return the next groups of a data source. Raises: RolloutError, it has no more."""
    groups = list(data_source.get_samples(num_groups))
    if not groups:
        what, remedy = "the data source has no more groups", "add data, or lower --num-rollout"
        raise RolloutError(what, remedy=remedy, where="--data-source-path")
    return groups


def check_sample(sample: Sample, hook: Hook) -> None:
    """Raise RolloutError, which names `hook`, unless the sample's columns fit together as the trainer needs them."""
    check_versions(sample, hook)
    n = sample.response_length
    problem = ""
    if not 0 <= n < max(1, len(sample.tokens)):
        problem = f"response_length {n} with {len(sample.tokens)} tokens (prompt and response)"
    elif sample.loss_mask is not None and len(sample.loss_mask) != n:
        problem = f"loss_mask has {len(sample.loss_mask)} entries for {n} response tokens"
    elif sample.rollout_log_probs is not None and len(sample.rollout_log_probs) != n:
        problem = f"rollout_log_probs has {len(sample.rollout_log_probs)} entries for {n} response tokens"
    elif sample.rollout_log_probs is not None and not _are_finite(sample.rollout_log_probs):
        problem = "rollout_log_probs are not all finite"
    elif sample.weight_versions and sample.weight_versions[-1].end > n:
        problem = f"weight versions reach {sample.weight_versions[-1].end} of {n} response tokens"
    elif sample.status is Status.PENDING:
        problem = "status is still PENDING"
    if problem:
        remedy = "use sample.append_response_tokens; set sample.status"
        raise RolloutError(problem, where=f"{hook.place()}: {name_of(sample)}", remedy=remedy)


def check_versions(sample: Sample, hook: Hook) -> None:
    """Make spans of `weight_versions` where a function has added numbers, as slime's functions do ("3" or 3).

    A number is the version of the tokens after the last span. Several numbers do not say which tokens are whose, so
    they go into `extra`.

    Raises:
        RolloutError: an entry is something else.
    """
    given: Any = sample.weight_versions
    if isinstance(given, list) and all(isinstance(one, VersionSpan) and isinstance(one.version, str) for one in given):
        return
    given = given if isinstance(given, (list, tuple)) else [given]
    whole = [one for one in given if isinstance(one, VersionSpan) and isinstance(one.version, (str, int))]
    spans, names = [VersionSpan(str(v.version), v.start, v.end) for v in whole], [v for v in given if v not in whole]
    for name in names:
        if type(name) is not int and not (isinstance(name, str) and name.isdecimal()):
            what = f"weight_versions holds {said(name, 60)}, neither a VersionSpan nor the number of a version"
            remedy = "use sample.append_response_tokens, or append the weight_version of the engine's meta_info"
            raise RolloutError(what, where=f"{hook.place()}: {name_of(sample)}", remedy=remedy)
    numbers, start = {int(name) for name in names}, spans[-1].end if spans else 0
    if len(numbers) == 1 and start < sample.response_length:
        spans.append(VersionSpan(str(numbers.pop()), start, sample.response_length))
    elif len(numbers) > 1:
        sample.extra["weight_versions"] = names
    sample.weight_versions = spans


def _are_finite(values: list[float]) -> bool:
    try:
        return math.isfinite(sum(values)) or all(map(math.isfinite, values))  # a sum may be too large
    except TypeError:  # None is right for a token that is not trained on, which `build_batch` checks
        return all(value is None or as_number(value) is not None for value in values)


_COLUMN = (list, tuple, type(None))
_ROLLOUT, _EVALUATION = Hook("--rollout-function-path", ""), Hook("--eval-function-path", "")


def as_train_output(output: Any, hook: Hook = _ROLLOUT) -> RolloutFnTrainOutput:
    """Return the result of a rollout function (RolloutFnTrainOutput or a list of groups) as flat, checked groups.

    Samples in nested lists are fan-out siblings and get a common `execution_id`. Any other sample without an id gets
    its own. Samples of one group with the same `execution_id` are siblings, too.

    Args:
        hook: the rollout function, for errors.

    Raises:
        RolloutError: another type, an empty group, a group given twice, an `execution_id` in two groups, or a sample
            whose columns do not fit.
    """
    if isinstance(output, list):
        output = RolloutFnTrainOutput(output)
    expected = "RolloutFnTrainOutput, or a list of groups (lists of Sample)"
    if not isinstance(output, RolloutFnTrainOutput) or not isinstance(output.samples, (list, tuple)):
        raise hook.wrong(output, expected)
    groups = [_as_group(group, hook.place()) for group in output.samples]
    seen: set[int | None] = set()
    group_of: dict[str | None, int | None] = {}  # by execution id
    for group in groups:
        indices = {sample.group_index for sample in group}
        if len(indices) != 1 or indices & seen or None in indices:
            what = f"the group indices {sorted(map(str, indices))} of a group are mixed, missing or given twice"
            remedy = "return the groups of data_source.get_samples, each once, with their group_index"
            raise RolloutError(what, where=hook.place(), remedy=remedy)
        seen |= indices
        for sample in group:
            check_sample(sample, hook)
            if group_of.setdefault(sample.execution_id, sample.group_index) != sample.group_index:
                raise RolloutError(
                    f"execution_id {said(sample.execution_id)} is in two groups, but an execution has only one",
                    where=f"{hook.place()}: {name_of(sample)}, and group {group_of[sample.execution_id]}",
                    remedy="leave execution_id unset, or give each run of a generate function its own id, such "
                    'as f"{sample.group_index}.{sample.index}"',
                )
    return RolloutFnTrainOutput(groups, _metrics(output.metrics, hook))


def _metrics(metrics: Any, hook: Hook) -> dict[str, float]:
    """Return the metrics of a rollout function as numbers by name. None means no metrics."""
    metrics = {} if metrics is None else metrics
    if not isinstance(metrics, Mapping):
        raise hook.wrong(metrics, "metrics as a dict of numbers, or None", "metrics")
    out = {}
    for name, value in metrics.items():
        with hook.reading(value, "metrics that are numbers", f"metrics[{said(name, 60)}]"):
            out[str(name)] = float(value)  # NaN, too: it is shown as such
    return out


def _as_group(group: Any, where: str) -> Group:
    if not isinstance(group, (list, tuple)) or not group:
        raise RolloutError(f"a group is {said(group, 80)}", where=where, remedy="a group is a list of Sample")
    out: Group = []
    for position, item in enumerate(group):
        siblings = list(flatten(item, where))
        named = {s.execution_id for s in siblings if s.execution_id is not None}
        if len(named) > 1:
            what = f"fan-out siblings have several execution ids: {sorted(named)}"
            raise RolloutError(what, where=where, remedy="set one id for all, or leave all unset")
        for sample in siblings:
            sample.execution_id = next(iter(named), f"{sample.group_index}.{position}")
        out.extend(siblings)
    return out


def as_eval_output(output: Any, hook: Hook = _EVALUATION) -> RolloutFnEvalOutput:
    """Check the result of an evaluation function (RolloutFnEvalOutput, or a dict by data set name) and return it.

    Missing `rewards` (of samples whose reward is a number) and `truncated` are read from `samples`.

    Args:
        hook: the evaluation function, for errors.

    Raises:
        RolloutError: another type, a data set without rewards, or rewards that are no finite numbers.
    """
    if isinstance(output, dict):
        output = RolloutFnEvalOutput(output)
    if not isinstance(output, RolloutFnEvalOutput) or not isinstance(output.data, Mapping) or not output.data:
        raise hook.wrong(output, "RolloutFnEvalOutput, or a dict by data set name")
    data: dict[str, dict[str, Any]] = {}
    for name, result in output.data.items():
        where, columns = f"data set {said(name, 60)}", ("samples", "rewards", "truncated")
        lists = isinstance(result, Mapping) and all(isinstance(result.get(c), _COLUMN) for c in columns)
        if not lists:
            raise hook.wrong(result, 'for each data set a dict of lists "rewards", "truncated" and "samples"', where)
        samples = [leaf for item in result.get("samples") or [] for leaf in flatten(item, hook.place(where))]
        result = {**result, "samples": samples}
        if result.get("rewards") is None:
            result["rewards"] = [s.reward for s in samples]
        if result.get("truncated") is None:
            result["truncated"] = [s.truncated for s in samples]
        bad = [r for r in result["rewards"] if as_number(r) is None]
        if bad or not result["rewards"]:
            what = f"{where} has no rewards" if not bad else f"reward {said(bad[0], 60)} is no finite number"
            remedy = 'return for each data set the list "rewards" (numbers), or samples with rewards'
            raise RolloutError(what, where=hook.place(), remedy=remedy)
        data[str(name)] = result
    return RolloutFnEvalOutput(data, _metrics(output.metrics, hook))
