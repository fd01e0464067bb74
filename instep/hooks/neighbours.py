"""What packages beside the core add to it. The core names none of them: each is an entry point of `GROUP`."""

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
        main: `module:function`, which takes the words after the command and returns the exit code or None.
        starts: whether it starts workers or engines, which may be forked.
    """

    help: str
    main: str
    starts: bool = False

    def run(self, words: list[str]) -> int:
        return imported(self.main)(words) or 0


@dataclass(frozen=True)
class Addition:
    """What one neighbour adds. Its texts `module:name` are imported when they are needed.

    Attributes:
        commands: by name.
        flags: a tuple of `FlagGroup`, whose flags every command that trains has.
        families: a tuple of families of flags that it refuses: prefix, note, and what to use instead.
        resolvers, rules: tuples, as those of a concern (`arguments.concern`).
        settings: a function of the command that returns the names of other frameworks' settings, and what they are here
            (`arguments.suggest.Found`).
        modules: by name of another project's module the one here, and what of it there is (`arguments.aliases`).
        call: a function that makes flags and rows of what `train(reward_funcs=..., args=...)` gives (`api.Run`).
        before_engines: a function of the arguments that returns what `instep serve` puts before its engines, or None.
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
    """Return what `module:name` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


@cache
def _points() -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


@cache
def additions() -> tuple[Addition, ...]:
    """Return those of the installed packages, by the name of their entry point."""
    return tuple(point.load() for point in _points())


@cache
def packages() -> frozenset[str]:
    """Return the names of the packages whose functions are no user's."""
    return frozenset({"instep", "instep_engine"} | {point.module.partition(".")[0] for point in _points()})


def is_own(path: str) -> bool:
    """Return whether a dotted path names a function of these packages, not one of the user's."""
    return path.partition(".")[0] in packages()


def added(part: str) -> list[Any]:
    """Return a part of each addition that has it, imported."""
    return [imported(name) for addition in additions() if (name := getattr(addition, part))]


def commands(own: Mapping[str, Command]) -> dict[str, Command]:
    """Return the commands of the core, and after them those of its neighbours."""
    return dict(own) | {name: command for addition in additions() for name, command in addition.commands.items()}
