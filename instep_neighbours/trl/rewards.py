"""`reward_funcs` as one reward of a run, and TRL's changes of rewards that have no flag here."""

from __future__ import annotations

import inspect
import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from instep.errors import ConfigError
from instep.rollout.rewards.several import SUM, Function, name_of, names_of, settled
from instep.types import Group, Sample, reward_of

STD_EPS = 1e-4  # TRL's
_ABSENT = ("trainer_state", "log_extra", "log_metric", "environments")  # further arguments that TRL gives to a function


def flags_of(reward_funcs: Any, weights: Sequence[float] | None) -> dict[str, Any]:
    """Return the flags of one function or several.

    Raises:
        ConfigError: they are not functions in TRL's form, or the number of weights differs.
    """
    given = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    functions = [_function(each) for each in given]
    if not functions:
        raise ConfigError("it is empty", where="reward_funcs", remedy="give a function")
    if len(weights or functions) != len(functions):
        what = f"there are {len(functions)} functions"
        raise ConfigError(what, where="reward_weights", remedy="give one number for each")
    if len(functions) == 1 and weights is None:
        return {"custom_rm_path": given[0], "group_rm": True}
    hook = together(dict(zip(names_of(functions), functions, strict=True)), list(weights or [1.0] * len(functions)))
    return {"custom_rm_path": hook, "reward_key": SUM, "group_rm": True}


def _function(given: Any) -> Function:
    from instep.system.hooks import load_function

    if isinstance(given, str) and ("/" in given or "." not in given):
        remedy = "call the model in a function; for built-in rewards use reward='math'"
        raise ConfigError(f"{given!r} is not the dotted path of a function", where="reward_funcs", remedy=remedy)
    function = load_function(given) if isinstance(given, str) else given
    if not callable(function) or inspect.isclass(function):
        what = f"{type(function).__name__} is not a function"
        raise ConfigError(what, where="reward_funcs", remedy="call the model or the class in a function")
    parameters = inspect.signature(function).parameters
    if "completions" not in parameters:
        what = f"{name_of(function)} has no parameter completions"
        remedy = "name it, as in f(prompts, completions, **columns); reward= takes f(args, sample)"
        raise ConfigError(what, where="reward_funcs", remedy=remedy)
    if wrong := [n for n in _ABSENT if n in parameters and parameters[n].default is inspect.Parameter.empty]:
        what = f"{name_of(function)} needs {wrong[0]}, which only TRL's trainer has"
        raise ConfigError(what, where="reward_funcs", remedy="give it a default, such as None")
    return function


def together(functions: dict[str, Function], weights: Sequence[float]) -> Function:
    """Return a function in TRL's form that calls all: it gives each sample a dict of rewards, and their weighted sum.

    A function may return None for a sample, whose sum is then over the others, as in TRL.
    """

    def rewards(completions: list[Any], **columns: Any) -> Any:
        found = {name: f(completions=completions, **columns) for name, f in functions.items()}
        return settled(found, partial(_summed, weights=weights))

    return rewards


def _summed(found: dict[str, Any], weights: Sequence[float]) -> list[dict[str, Any]]:
    columns = {name: list(values) for name, values in found.items()}
    rewards = []
    for row in zip(*columns.values(), strict=True):
        known = [weight * value for weight, value in zip(weights, row, strict=True) if value is not None]
        rewards.append(dict(zip(columns, row, strict=True)) | {SUM: sum(known) if known else None})
    return rewards


def normalize_then_sum(reward_funcs: Any, weights: Sequence[float] | None) -> Function:
    """Apply TRL's `multi_objective_aggregation="normalize_then_sum"` as a `--custom-reward-post-process-path`.

    Each function's rewards are normalized within their group, weighted, added up, and normalized over the rollout:
    x = sum_k w_k (r_k - mean_G) / (std_G + 1e-4), A = (x - mean) / (std + 1e-4), std unbiased.
    """
    if not isinstance(reward_funcs, (list, tuple)) or len(reward_funcs) < 2:
        remedy = "give several, or remove it"
        raise ConfigError("it needs several reward_funcs", where="multi_objective_aggregation", remedy=remedy)
    names = names_of([_function(each) for each in reward_funcs])
    factors = dict(zip(names, weights or [1.0] * len(names), strict=True))

    def post_process(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
        total = [0.0] * len(samples)
        for name, weight in factors.items():
            for members in _groups(samples).values():
                values = {i: samples[i].reward[name] for i in members}  # type: ignore[index]
                known = [value for value in values.values() if value is not None]
                for i, value in values.items():
                    total[i] += weight * (value - statistics.mean(known)) / _std(known) if value is not None else 0.0
        mean, std = statistics.mean(total), _std(total)
        return _raw(args, samples), [(x - mean) / std for x in total]

    return post_process


def scaled_by_batch(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Apply TRL's `scale_rewards="batch"`: A_i = (r_i - mean_G) / (std + 1e-4), std unbiased, over the rollout."""
    raw = _raw(args, samples)
    std, advantages = _std(raw), [0.0] * len(raw)
    for members in _groups(samples).values():
        mean = statistics.mean(raw[i] for i in members)
        for i in members:
            advantages[i] = (raw[i] - mean) / std
    return raw, advantages


def remove_truncated(args: Any, groups: list[Group]) -> None:
    """Apply TRL's `mask_truncated_completions`: responses at the length limit only count in their group."""
    for sample in (s for group in groups for s in group):
        sample.remove_sample = sample.remove_sample or sample.truncated


def _groups(samples: list[Sample]) -> dict[Any, list[int]]:
    groups = defaultdict(list)
    for number, sample in enumerate(samples):
        groups[sample.group_index].append(number)
    return groups


def _raw(args: Any, samples: list[Sample]) -> list[float]:
    return [reward_of(sample, args.reward_key) for sample in samples]


def _std(values: Sequence[float]) -> float:
    return (statistics.stdev(values) if len(values) > 1 else 0.0) + STD_EPS
