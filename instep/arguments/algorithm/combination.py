"""Flags that do not go together: each combination is a record, which is a rule and a line of docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from instep.algorithms.catalog import algorithm_of
from instep.arguments.concern import Problem, Settings
from instep.arguments.flag import attribute_name

When = Callable[[Settings, set[str]], bool]


def given(*flags: str) -> When:
    """The condition that one of these flags is on the command line."""
    names = {attribute_name(flag) for flag in flags}
    return lambda args, given: bool(given & names)


@dataclass(frozen=True)
class Combination:
    """Flags whose combination makes no sense, or has one flag too many.

    Attributes:
        algorithms: the values of `--advantage-estimator` for which it holds (`catalog.names_where`); empty: it holds
            for every algorithm, SFT and DPO too.
        flags: the other flags, as a user types them.
        when: whether the combination is there, from the arguments and the attributes of the flags that were given.
        what: why the combination makes no sense.
        remedy: what to do.
        refused: False: the run starts, with a note.
    """

    algorithms: tuple[str, ...]
    flags: str
    when: When
    what: str
    remedy: str
    refused: bool = True

    def __call__(self, args: Settings, given: set[str]) -> Iterator[Problem]:
        """The combination as a rule of the validator: it yields one problem, or nothing."""
        name = algorithm_of(args).name
        if (self.algorithms and name not in self.algorithms) or not self.when(args, given):
            return
        where = self.flags + (f" with --advantage-estimator {name}" if self.algorithms else "")
        yield Problem(self.what, where, self.remedy, self.refused)


def only_with(needed: tuple[str, ...], *flags: str) -> list[Combination]:
    """Flags that have an effect only where one of the attributes of the flags `needed` is neither 0 nor unset."""
    others = [attribute_name(flag) for flag in needed]

    def unused(name: str) -> When:
        return lambda args, given: name in given and not any(getattr(args, other) for other in others)

    what = f"has no effect without {' or '.join(needed)}"
    return [Combination((), flag, unused(attribute_name(flag)), what, "give both") for flag in flags]
