"""Several rewards of a run as one reward: a dict of them by name, with their weighted sum."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from instep.errors import ConfigError
from instep.types import Sample

Function = Callable[..., Any]
SUM = "reward"  # the entry that is trained on


def name_of(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


def names_of(functions: Sequence[Function]) -> list[str]:
    """Return the functions' names. A name that occurs again gets its number, too."""
    names: list[str] = []
    for number, function in enumerate(functions):
        name = name_of(function)
        names.append(f"{name}_{number}" if name in names or name == SUM else name)
    return names


def one_of(functions: Sequence[Function], weights: Sequence[float] | None) -> Function:
    """Combine several rewards `(args, sample)` into one: a dict of them by name, with their weighted sum as `SUM`.

    Raises:
        ConfigError: one is not a function, or the number of weights differs.
    """
    named = dict(zip(names_of(functions), functions, strict=True))
    if not named or not all(map(callable, functions)) or len(weights or functions) != len(functions):
        what = f"one of these {len(functions)} rewards is not a function, or has no weight"
        remedy = "give functions (args, sample), and with reward_weights a number for each"
        raise ConfigError(what, where="reward=[...]", remedy=remedy)

    def total(found: dict[str, Any]) -> dict[str, Any]:
        return found | {SUM: sum(map(operator.mul, weights or [1.0] * len(found), found.values()))}

    def reward(args: Any, sample: Sample) -> Any:
        return settled({name: function(args, sample) for name, function in named.items()}, total)

    return reward


def settled(made: dict[str, Any], total: Callable[[dict[str, Any]], Any]) -> Any:
    """Return `total(made)`; where async functions have made parts of it, an awaitable of that."""

    async def awaited() -> Any:
        return total({name: await out if inspect.isawaitable(out) else out for name, out in made.items()})

    return awaited() if any(map(inspect.isawaitable, made.values())) else total(made)
