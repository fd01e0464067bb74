"""The words of the command line become typed values, in one pass; names are never abbreviated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from instep.arguments.all_flags import find
from instep.arguments.concern import Problem
from instep.arguments.extra import find_on_path
from instep.arguments.flag import Flag
from instep.arguments.suggest import named_flags, remedy_of, setting, unknown


@dataclass
class Scan:
    """What the command line holds.

    Attributes:
        given, flags: values and records of the flags that are given, by attribute.
        broken: attributes whose value could not be read.
        meant: attributes of flags that a remedy names; they count as unreadable, so that their absence is no second
            problem.
    """

    given: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Flag] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    meant: set[str] = field(default_factory=set)


def _shown(value: str) -> str:
    return repr(value if len(value) <= 200 else value[:200] + "...")


def is_flag(token: str) -> bool:
    """Whether a token starts a flag; negative numbers do not."""
    return bool(re.match(r"--[A-Za-z]|-[A-Za-z]", token))


def scan(argv: Sequence[str], command: str = "train") -> Scan:
    """Split `argv` into flags and their values, which the flags' records convert. What is wrong becomes a problem."""
    result = Scan()
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if not is_flag(token):
            _reject(result, setting(token, command) or (_stray(token), []))
            continue
        name, equals, value = token.partition("=")
        values = [value] if equals else []
        while tokens and not is_flag(tokens[0]):
            flag = find(name) or find_on_path(name)
            if flag and flag.status == "acts" and not flag.nargs and not flag.is_switch and values:
                break
            values.append(tokens.pop(0))
        _take(result, name, values, command)
    result.broken |= result.meant - result.given.keys()
    return result


def _stray(token: str) -> Problem:
    return Problem(f"{_shown(token)} belongs to no flag", "the command line", "quote values that contain blanks")


def _reject(result: Scan, found: tuple[Problem, list[str]]) -> None:
    problem, meant = found
    result.problems.append(problem)
    result.meant.update(flag.attribute for name in meant if (flag := find(name)) is not None)


def _take(result: Scan, name: str, values: list[str], command: str) -> None:
    flag = find(name) or find_on_path(name)
    if flag is None:
        _reject(result, unknown(name, values[0] if values else "", command))
        return
    if " ".join(values) in flag.neutral:
        return
    if flag.status == "accepted":
        what = f"is read as {flag.read_as}: {flag.note}" if flag.read_as else f"changes nothing: {flag.note}"
        result.problems.append(Problem(what, name, refused=False))
        if flag.read_as:
            _take(result, flag.read_as, values, command)
        return
    result.flags[flag.attribute] = flag
    if flag.status != "acts":
        remedy = remedy_of(flag, command)
        _reject(result, (Problem(f"{flag.status}: {flag.note}", name, remedy), named_flags(remedy)))
        return
    try:
        _store(result, flag, values)
    except ValueError as error:
        result.broken.add(flag.attribute)
        result.problems.append(Problem(str(error), name, f"its meaning: {flag.help}" if flag.help else ""))


def _store(result: Scan, flag: Flag, values: list[str]) -> None:
    if flag.is_switch:
        if values:
            raise ValueError(f"takes no value, but got {_shown(values[0])}")
        result.given[flag.attribute] = flag.constant
        return
    if not values and flag.nargs != "*":
        raise ValueError(f"needs a value ({flag.type_label})")
    if flag.nargs == "2":
        if len(values) > 2:
            raise ValueError(f"takes {flag.type_label}, but got {len(values)} values")
        values = [".".join(values)]
    converted = []
    for value in values:
        try:
            converted.append(flag.convert(value))
        except ValueError as error:
            raise ValueError(f"{'its value' if flag.secret else _shown(value)} {error}") from None
    if flag.append:
        result.given[flag.attribute] = result.given.get(flag.attribute, []) + converted
    else:
        result.given[flag.attribute] = converted[0] if flag.nargs in (None, "2") else converted
