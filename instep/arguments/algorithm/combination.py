"""Combinations of flags that are refused or noted. Each record is a rule, and a line of docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from instep.algorithms.catalog import algorithm_of
from instep.arguments.concern import Problem, Settings
from instep.arguments.flag import Flag, FlagGroup, attribute_name

When = Callable[[Settings, set[str]], bool]


def given(*flags: str) -> When:
    """Return the condition that one of these flags is on the command line."""
    names = {attribute_name(flag) for flag in flags}
    return lambda args, given: bool(given & names)


@dataclass(frozen=True)
class Combination:
    """Flags whose combination makes no sense, or in which one flag has no effect.

    Attributes:
        flags: the flags as a user types them.
        when: returns whether the combination is present, from the arguments and the attributes of the given flags.
        what: why the combination makes no sense.
        remedy: what to do.
        refused: if False, the run starts with a note.
        algorithms: the values of `--advantage-estimator` that it applies to (`catalog.names_where`); empty: it applies
            to every algorithm, also SFT and DPO.
    """

    flags: str
    when: When
    what: str
    remedy: str
    refused: bool = True
    algorithms: tuple[str, ...] = ()

    def __call__(self, args: Settings, given: set[str]) -> Iterator[Problem]:
        """Act as a rule of the validator: yield one problem, or nothing."""
        name = algorithm_of(args).name
        if (self.algorithms and name not in self.algorithms) or not self.when(args, given):
            return
        where = self.flags + (f" with --advantage-estimator {name}" if self.algorithms else "")
        yield Problem(self.what, where, self.remedy, self.refused)


def needing(groups: Iterable[FlagGroup]) -> Iterator[Combination]:
    """Yield combinations for flags that have no effect if all flags that they need (`Flag.needs`) are 0 or unset."""
    for flag in (flag for group in groups for flag in group.flags if flag.needs):
        needed = " or ".join(flag.needs)
        what = flag.lacks or f"has no effect without {needed}"
        yield Combination(flag.name, partial(_unused, flag), what, f"give {needed}")


def _unused(flag: Flag, args: Settings, given: set[str]) -> bool:
    return flag.attribute in given and not any(getattr(args, attribute_name(other)) for other in flag.needs)
