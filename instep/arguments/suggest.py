"""What a word means that is no flag of the command: another framework's name of a setting, or a misspelt flag."""

from __future__ import annotations

import difflib
import re

from instep.arguments.all_flags import find, own_flags, passed_through
from instep.arguments.concern import Problem
from instep.arguments.engine_flags import family, nearest_engine_flag
from instep.arguments.flag import Flag
from instep.arguments.offline import without_meaning
from instep.arguments.other_names import look_up
from instep.engines.flags import PREFIXES, flag_table

_NAMED = re.compile(r"--[a-z][\w.-]*\w\b(?!-)")  # not `--vllm-`, a family
_SETTING = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=.*", re.DOTALL)


def named_flags(text: str) -> list[str]:
    """The flags that a text names."""
    return _NAMED.findall(text)


def acts_in(command: str, flag: Flag | None) -> bool:
    """Whether a flag acts in `instep <command>`."""
    if flag is None or flag.status != "acts":
        return False
    if command == "serve":
        return flag.served or flag.passed_to != ""
    return flag.attribute not in without_meaning(command)


def remedy_of(flag: Flag, command: str) -> str:
    """What to do instead of giving a flag that does not act: what it names must act in the command."""
    instead, names = flag.instead, named_flags(flag.instead)
    if not _all_act(command, names):
        return "leave it out"
    return f"use {instead}" if names or instead.startswith(("instep ", "the ")) else instead or "leave it out"


def setting(token: str, command: str) -> tuple[Problem, list[str]] | None:
    """What is wrong with `data.train_files=...`, the form of verl's settings; None for any other word."""
    if not _SETTING.fullmatch(token):
        return None
    name, _, value = token.partition("=")
    found = of_others(name, value, command, token)
    remedy = "a flag is two words, its name with two dashes and its value"
    return found or (Problem("is no flag", f"'{token}'", remedy), [])


def unknown(name: str, value: str, command: str) -> tuple[Problem, list[str]]:
    """What is wrong with an unknown flag, and the flags that may have been meant.

    Args:
        value: the first word after it.
    """
    wanted = "--" + name.lower().replace("_", "-").lstrip("-")
    known, other = find(wanted), of_others(name, value, command, name)
    if acts_in(command, known):
        return Problem("unknown flag", name, f"did you mean {wanted}?"), [wanted]
    found = _negated(wanted, name, command) or other or _of_vllm(wanted, name, command)
    return found or _near(wanted, name, command)


def of_others(name: str, value: str, command: str, where: str) -> tuple[Problem, list[str]] | None:
    """What is wrong with another framework's setting, and the flags that it means; None if there is no such setting."""
    found = look_up(name, value, command)
    if found is None:
        return None
    what, names = f"is no flag of instep, but {found.whose}'s {found.name}", named_flags(found.here)
    if names and _all_act(command, names):
        note = f" ({found.note})" if found.note and _all_act(command, named_flags(found.note)) else ""
        return Problem(what, where, f"use {found.here}{note}"), names
    why = [flag.note for n in names if (flag := find(n)) is not None and flag.status != "acts"]
    if names and not why:
        why = [f"it has no meaning for `instep {command}`"]
    note = next(iter(why), found.note)
    return Problem(what, where, note if note.startswith("docs/") else f"leave it out: {note}"), []


def _all_act(command: str, names: list[str]) -> bool:
    return all(acts_in(command, find(name)) for name in names)


def _of_vllm(wanted: str, name: str, command: str) -> tuple[Problem, list[str]] | None:
    """A flag of `vllm serve` without the prefix that it has here."""
    prefixed = PREFIXES["vllm"] + wanted.removeprefix("--")
    flag = find(prefixed)
    if flag is None:
        return None
    if acts_in(command, flag):
        return Problem("is no flag of instep, but vLLM's, which has a prefix here", name, f"use {prefixed}"), [prefixed]
    return Problem(f"is vLLM's; {_why_not(flag, command)}", name, remedy_of(flag, command)), []


def _negated(wanted: str, name: str, command: str) -> tuple[Problem, list[str]] | None:
    """`--no-x`, where `--x` is a switch: it is off unless it is given."""
    flag = find("--" + wanted.removeprefix("--no-")) if wanted.startswith("--no-") else None
    if flag is None or not flag.is_switch and flag.status == "acts":
        return None
    if acts_in(command, flag):
        return Problem(f"{flag.name} is off unless it is given", name, f"leave it out, and {flag.name}"), []
    return Problem(f"unknown flag; {flag.name} is {_why_not(flag, command)}", name, "leave it out: it is off"), []


def _near(wanted: str, name: str, command: str) -> tuple[Problem, list[str]]:
    package = family(wanted)
    what = "unknown flag" if package is None else f"unknown flag of {flag_table(package).describe}"
    if package is not None:
        like = nearest_engine_flag(wanted, [n for n, f in own_flags().items() if acts_in(command, f)])
        names = [like] if like else []
    else:
        every = own_flags() if command == "serve" else {**passed_through(), **own_flags()}
        names = difflib.get_close_matches(wanted, every, n=3, cutoff=0.75)
    like = next((n for n in names if acts_in(command, find(n))), "")
    flag = find(names[0]) if names else None
    alike = difflib.SequenceMatcher(None, wanted, names[0]).ratio() > 0.9 if names else False
    if alike and flag is not None and flag.status != "acts":
        what = f"unknown flag; {names[0]}, which is like it, is {_why_not(flag, command)}"
        return Problem(what, name, remedy_of(flag, command)), []
    topic = {"vllm": " vllm", "vllm-router": " router"}.get(package or "", "")
    shown = "train" if command == "plan" else command  # which takes its flags
    lists = f"`instep {shown} --help{topic}` lists the flags; docs/migration.md has those of other frameworks"
    return Problem(what, name, f"did you mean {like}?" if like else lists), [like] if like else []


def _why_not(flag: Flag, command: str) -> str:
    if flag.status == "acts":
        return f"without meaning for `instep {command}`"
    return f"refused: {flag.note}" if flag.status == "refused" else f"not there: {flag.note}"
