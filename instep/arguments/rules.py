"""A rule about flags that do not go together: one record, which the validator applies and the documentation shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from instep.arguments.args import Args
from instep.arguments.concern import Problem

# Names of --advantage-estimator by what they do; a test compares them with the registry in algorithms/advantages.
GRPO_LIKE = ("grpo", "gspo", "cispo", "sapo")  # the advantage is GRPO's
GROUP_RELATIVE = (*GRPO_LIKE, "dr_grpo", "rloo", "max_rl", "reinforce_plus_plus_baseline")
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
DISCOUNTED = ("reinforce_plus_plus", "ppo")  # --gamma acts
ALL = (*GROUP_RELATIVE, "reinforce_plus_plus", "ppo")

When = Callable[[Args, set[str]], bool]


def without(*names: str) -> tuple[str, ...]:
    return tuple(name for name in ALL if name not in names)


def attribute(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def given(*flags: str) -> When:
    """Whether one of them is on the command line."""
    names = {attribute(flag) for flag in flags}
    return lambda args, given: bool(given & names)


@dataclass(frozen=True)
class Rule:
    """A combination that makes no sense, or has a flag too many.

    Attributes:
        estimators: the values of --advantage-estimator it is about; empty: all, and SFT too.
        flags: the other flags of it, as one would type them.
        when: whether these flags are given so, from the arguments and the names of those that were given.
        what: why it makes no sense.
        remedy: what to do.
        reads: attributes without a value of their own are skipped by the validator, as their fault is reported already.
        refused: False: the run starts, with a note.
    """

    estimators: tuple[str, ...]
    flags: str
    when: When
    what: str
    remedy: str
    reads: str = ""
    refused: bool = True

    def applies(self, args: Args, given: set[str]) -> bool:
        if self.estimators and (args.command != "train" or args.advantage_estimator not in self.estimators):
            return False
        return self.when(args, given)

    def __call__(self, args: Args, given: set[str]) -> Iterator[Problem]:
        """As a rule of `validate`."""
        if not self.applies(args, given):
            return
        where = self.flags
        if self.estimators:
            where += f" with --advantage-estimator {args.advantage_estimator}"
        if self.refused:
            yield Problem(self.what, where, self.remedy)
        else:
            args.notes.append(f"{where}: {self.what}")


def only_with(needed: tuple[str, ...], *flags: str) -> list[Rule]:
    """Flags that act only where one of the switches `needed` is given."""

    def unused(flag: str) -> When:
        return lambda args, given: attribute(flag) in given and not any(getattr(args, attribute(n)) for n in needed)

    what = f"has no effect without {' or '.join(needed)}"
    return [Rule((), flag, unused(flag), what, "give both", reads=attribute(flag)) for flag in flags]
