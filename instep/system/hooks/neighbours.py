"""Additions to the core from other packages. The core does not name them: each is an entry point of `GROUP`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

GROUP = "instep.neighbours"


@dataclass(frozen=True)
class Command:
    """A command of `instep`.

    Attributes:
        help: one line.
        main: `module:function`. It takes the words after the command, and returns the exit code or None.
        starts: whether it starts workers or engines; these may be forked.
    """

    help: str
    main: str
    starts: bool = False

    def run(self, words: list[str]) -> int:
        return imported(self.main)(words) or 0


@dataclass(frozen=True)
class Addition:
    """The additions of one neighbour. Texts `module:name` are imported when they are needed.

    Attributes:
        commands: by name.
        flags: a tuple of `FlagGroup`; every command that trains has these flags.
        families: a tuple of refused families of flags: prefix, note, and what to use instead.
        resolvers, rules: tuples, as in a concern (`arguments.concern`).
        settings: a function of the command. It returns names of other frameworks' settings and their equivalents
            (`arguments.suggest.Found`).
        modules: by name of another project's module, instep's module and its names (`hooks.aliases`).
        call: a function that makes flags and rows from `train(reward_funcs=..., args=...)` (`api.Run`).
        before_engines: a function of the arguments. It returns the server that `instep serve` puts before its engines,
            or None.
    """

    commands: Mapping[str, Command] = field(default_factory=dict)
    flags: str = ""
    families: str = ""
    resolvers: str = ""
    rules: str = ""
    settings: str = ""
    modules: str = ""
    call: str = ""
    before_engines: str = ""


def imported(name: str) -> Any:
    """Return the object `module:name`."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


@cache
def _points() -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


@cache
def additions() -> tuple[Addition, ...]:
    """Return the additions of installed packages, in the order of their entry points' names."""
    return tuple(point.load() for point in _points())


@cache
def packages() -> frozenset[str]:
    """Return the names of the packages whose functions are not the user's."""
    return frozenset({"instep", "instep_engine"} | {point.module.partition(".")[0] for point in _points()})


def is_own(path: str) -> bool:
    """Return whether a dotted path names a function of these packages, not of the user."""
    return path.partition(".")[0] in packages()


def added(part: str) -> list[Any]:
    """Return one part of each addition that has it, imported."""
    return [imported(name) for addition in additions() if (name := getattr(addition, part))]


def commands(own: Mapping[str, Command]) -> dict[str, Command]:
    """Return the commands of the core, then those of its neighbours."""
    return dict(own) | {name: command for addition in additions() for name, command in addition.commands.items()}
