"""What the file of a concern (data, rollout, cluster, ...) is made of: a `FlagGroup`, resolvers and rules.

A resolver is named like the attribute that it resolves, and returns the attribute's value; what a flag is set to when
it is not given follows from it. A rule reads attributes and yields what is wrong with them. Neither of them writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from instep.arguments.args import Args


@dataclass
class Problem:
    """One thing that is wrong: what, at which flag, and what to do.

    Attributes:
        refused: False: the run starts all the same, and the problem is a note to the user.
    """

    what: str
    where: str
    remedy: str = ""
    refused: bool = True


Given = Mapping[str, Any]  # the values of the flags that were given, by attribute
Resolver = Callable[[Args, Given], Any]
Rule = Callable[[Args, set[str]], Iterator[Problem]]  # the set: the attributes of the flags that were given


class Unreadable(Exception):
    """An attribute was read whose value on the command line could not be read; that problem is reported already."""


class Draft(Args):
    """The arguments while they are resolved and checked: attributes can be set.

    Args:
        unreadable: the attributes whose value could not be read; the set may grow. Reading one raises `Unreadable`.
    """

    __slots__ = ("unreadable",)
    unreadable: set[str]

    def __init__(self, unreadable: set[str], **values: Any):
        object.__setattr__(self, "unreadable", unreadable)
        super().__init__(**values)

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "unreadable"):
            raise Unreadable(name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> Draft:
        return Draft(self.unreadable, **{**vars(self), **changes})
