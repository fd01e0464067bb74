"""Suggestions for a word that is not a flag of the command: a setting of another framework, or a misspelled flag.

A flag that a remedy names counts as meant: its absence is not a second problem.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from instep.arguments.all_flags import find, own_flags, passed_through
from instep.arguments.commands import acts_in
from instep.arguments.concern import Problem
from instep.arguments.engine_flags import family, prefixed
from instep.arguments.flag import Flag
from instep.engines.flags import PREFIXES, TITLES, Package, flag_table
from instep.system.hooks.neighbours import added

_NAMED = re.compile(r"--[a-z][\w.-]*\w\b(?!-)")  # not a prefix like `--vllm-`
_SETTING = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=.*", re.DOTALL)


@dataclass(frozen=True)
class Found:
    """A setting of another framework that a user has typed: the framework, and the equivalent in instep."""

    whose: str
    name: str
    here: str
    note: str


def named_flags(text: str) -> list[str]:
    """Return the names of flags in a text."""
    return _NAMED.findall(text)


def _all_act(command: str, names: list[str]) -> bool:
    return all(acts_in(command, find(name)) or acts_in(command, find(name, sglang=True)) for name in names)


def remedy_of(flag: Flag, command: str) -> str:
    """Return what to do instead of giving a flag that does not act. Flags in the remedy must act in the command."""
    instead, names = flag.instead, named_flags(flag.instead)
    if not _all_act(command, names):
        return "leave it out"
    return f"use {instead}" if names or instead.startswith(("instep ", "the ")) else instead or "leave it out"


def setting(token: str, command: str) -> Problem | None:
    """Return what is wrong with a word like `data.train_files=...` (verl's settings); None for other words."""
    if not _SETTING.fullmatch(token):
        return None
    name, _, value = token.partition("=")
    remedy = "write a flag as two words: its name with two dashes, and its value"
    return of_others(name, value, command, token) or Problem("is not a flag", f"'{token}'", remedy)


def unknown(name: str, value: str, command: str, sglang: bool = False) -> Problem:
    """Return what is wrong with an unknown flag.

    Args:
        value: the first word after it.
        sglang: whether the engines are SGLang's.
    """
    wanted = "--" + name.lower().replace("_", "-").lstrip("-")
    if acts_in(command, find(wanted, sglang=sglang)):
        return Problem("unknown flag", name, f"did you mean {wanted}?")
    found = _negated(wanted, name, command) or of_others(name, value, command, name)
    return found or _of_engine(wanted, name, command, sglang) or _near(wanted, name, command, sglang)


def of_others(name: str, value: str, command: str, where: str) -> Problem | None:
    """Return what is wrong with another framework's setting; None if there is no such setting."""
    found = _look_up(name, value, command)
    if found is None:
        return None
    what, names = f"is not a flag of instep, but {found.whose}'s {found.name}", named_flags(found.here)
    if names and _all_act(command, names):
        note = f" ({found.note})" if found.note and _all_act(command, named_flags(found.note)) else ""
        return Problem(what, where, f"use {found.here}{note}")
    why = [flag.note for n in names if (flag := find(n)) is not None and flag.status != "acts"]
    note = why[0] if why else f"it has no meaning for `instep {command}`" if names else found.note
    return Problem(what, where, note if note.startswith("docs/") else f"leave it out: {note}")


def _look_up(typed: str, value: str, command: str) -> Found | None:
    """Return the setting of another framework that a word names: in full, or by the end of its dotted name.

    If several settings have this end, return None, unless they mean the same in instep.
    """
    settings = [setting for named in added("settings") for setting in named(command)]
    wanted = re.sub(r"[-_]+", "_", typed.strip("-+").lower())
    for same in (wanted.__eq__, lambda name: len(wanted) > 2 and name.endswith("." + wanted)):
        named = [(of_value, found) for name, of_value, found in settings if same(name)]
        exact = [found for of_value, found in named if of_value == value] if value else []
        some = exact or [found for of_value, found in named if not of_value]
        if len({found.here or found.note for found in some}) == 1:
            return some[0]
        if named and not some and len({found.name for _, found in named}) == 1:
            found = named[0][1]
            return Found(found.whose, found.name, "", "docs/migration.md lists the equivalents of its values")
    return None


def _of_engine(wanted: str, name: str, command: str, sglang: bool) -> Problem | None:
    """Return what is wrong with a flag of the engine that lacks instep's prefix; None for other words."""
    package: Package = "sglang" if sglang else "vllm"
    flag = find(prefixed(package, wanted), sglang=sglang)
    if flag is None:
        return None
    if acts_in(command, flag):
        return Problem(f"is a flag of {TITLES[package]}, which needs a prefix in instep", name, f"use {flag.name}")
    return Problem(f"is {TITLES[package]}'s; {_why_not(flag, command)}", name, remedy_of(flag, command))


def _negated(wanted: str, name: str, command: str) -> Problem | None:
    """Return what is wrong with `--no-x` if `--x` is a switch: it is off by default. None for other words."""
    flag = find("--" + wanted.removeprefix("--no-")) if wanted.startswith("--no-") else None
    if flag is None or not flag.is_switch and flag.status == "acts":
        return None
    if acts_in(command, flag):
        return Problem(f"{flag.name} is off by default", name, f"leave out both it and {flag.name}")
    return Problem(f"unknown flag; {flag.name} is {_why_not(flag, command)}", name, "leave it out: it is off")


def _near(wanted: str, name: str, command: str, sglang: bool) -> Problem:
    """Return what is wrong with an unknown flag, with the most similar known one.

    A flag with a package's prefix is compared with the flags of that package.
    """
    package, what, own = family(wanted, sglang=sglang), "unknown flag", own_flags(sglang=sglang)
    known = list(own if command == "serve" else {**passed_through(), **own})
    if package is not None:
        what = f"unknown flag of {flag_table(package).describe}"
        known = [n for n in known if n.startswith(PREFIXES[package])]
        known += [prefixed(package, n) for n in flag_table(package).by_name]
    names = difflib.get_close_matches(wanted, known, n=3, cutoff=0.75)
    if like := next((n for n in names if acts_in(command, find(n, sglang=sglang))), ""):
        return Problem(what, name, f"did you mean {like}?")
    alike = difflib.get_close_matches(wanted, names, n=1, cutoff=0.9)
    if alike and (flag := find(alike[0], sglang=sglang)) is not None:
        what = f"unknown flag; the similar {alike[0]} is {_why_not(flag, command)}"
        return Problem(what, name, remedy_of(flag, command))
    topic = {None: "", "vllm-router": " router"}.get(package, f" {package}")
    lists = f"`instep {command} --help{topic}` lists the flags; docs/migration.md lists those of other frameworks"
    return Problem(what, name, lists)


def _why_not(flag: Flag, command: str) -> str:
    if flag.status == "acts":
        return f"without meaning for `instep {command}`"
    return f"refused: {flag.note}" if flag.status == "refused" else f"not available: {flag.note}"
