"""Convert the words of the command line to typed values, in one pass. Names cannot be abbreviated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from instep.arguments.all_flags import find, own_flags
from instep.arguments.concern import Problem
from instep.arguments.extra import find_on_path
from instep.arguments.flag import Flag
from instep.arguments.suggest import named_flags, of_others, remedy_of, setting, unknown
from instep.engines.kind import AUTO

_WORDS = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}


@dataclass
class Scan:
    """What the command line contains.

    Attributes:
        given, flags: values and records of the given flags, by attribute.
        broken: attributes whose value is invalid.
        meant: attributes of flags that a remedy names. They count as invalid, so that their absence is not a second
            problem.
        sglang: whether the engines are SGLang's.
        uses: each use of a flag: its name, its record and its words.
        places: the file and line of flags from a file, by name.
    """

    given: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Flag] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    meant: set[str] = field(default_factory=set)
    sglang: bool = False
    uses: list[tuple[str, Flag | None, list[str]]] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)


class Value(str):
    """A word that is not a flag, even if it begins with dashes."""


class FromFile(str):
    """The name of a flag that stands in a file, and the file with its line."""

    place: str

    def __new__(cls, name: str, place: str = "") -> FromFile:
        made = super().__new__(cls, name)
        made.place = place
        return made


def _shown(value: str) -> str:
    return repr(value if len(value) <= 200 else value[:200] + "...")


def is_flag(token: str) -> bool:
    """Return whether a token is the name of a flag; negative numbers are not."""
    return not isinstance(token, Value) and bool(re.match(r"--[A-Za-z]|-[A-Za-z]", token))


def scan(argv: Sequence[str], command: str = "train") -> Scan:
    """Split `argv` into flags and values, and convert the values by the flags' records. Mistakes become problems."""
    tokens = list(argv)
    result = Scan(sglang=for_sglang(tokens))
    while tokens:
        token = tokens.pop(0)
        if not is_flag(token):
            remedy = "quote values that contain spaces"
            stray = Problem(f"{_shown(token)} belongs to no flag", "the command line", remedy)
            _reject(result, setting(token, command) or stray)
            continue
        name, equals, value = token.partition("=")
        values, flag = [value] if equals else [], find(name, sglang=result.sglang) or find_on_path(name)
        takes_one = flag and flag.status == "acts" and not (flag.nargs or flag.together or flag.is_switch)
        while tokens and not is_flag(tokens[0]) and not (takes_one and values):
            values.append(tokens.pop(0))
        if isinstance(token, FromFile):
            result.places |= dict.fromkeys([name] if flag is None else [name, flag.name], token.place)
        result.uses.append((name, flag, values))
        _take(result, name, flag, values, command)
    result.broken |= result.meant - result.given.keys()
    return result


def for_sglang(tokens: Sequence[str]) -> bool:
    """Return whether the engines are SGLang's: it is named, or a `--sglang-*` flag is given and no kind is named."""
    named, names = AUTO, [token.partition("=")[0].replace("_", "-") if is_flag(token) else "" for token in tokens]
    for i in (i for i, name in enumerate(names) if name == "--rollout-backend"):
        named = tokens[i].partition("=")[2] or "".join(tokens[i + 1 : i + 2])
    return named == "sglang" or named == AUTO and any(name.startswith("--sglang-") for name in names)


def _reject(result: Scan, problem: Problem) -> None:
    result.problems.append(problem)
    flags = (find(name, sglang=result.sglang) for name in named_flags(problem.remedy))
    result.meant.update(flag.attribute for flag in flags if flag is not None)


def _take(result: Scan, name: str, flag: Flag | None, values: list[str], command: str) -> None:
    if flag is None:
        _reject(result, unknown(name, values[0] if values else "", command, result.sglang))
        return
    if "_" in name and flag.choices and not {*map(str, flag.choices)} & {*map(str.lower, values)}:  # `--loss_type dapo`
        if found := of_others(name, "".join(values[:1]), command, name):
            _reject(result, found)
            return
    if " ".join(values) in flag.neutral:
        return
    if flag.status == "accepted":
        what = f"is read as {flag.read_as}: {flag.note}" if flag.read_as else f"changes nothing: {flag.note}"
        result.problems.append(Problem(what, name, refused=False))
        if flag.read_as:
            read_as, *fixed = flag.read_as.split()
            _take(result, read_as, find(read_as, sglang=result.sglang), fixed or values, command)
        return
    result.flags[flag.attribute] = flag
    if flag.status != "acts":
        _reject(result, Problem(f"{flag.status}: {flag.note}", name, remedy_of(flag, command)))
        return
    try:
        _store(result, flag, values)
    except ValueError as error:
        result.broken.add(flag.attribute)
        result.problems.append(Problem(str(error), name, f"its meaning: {flag.help}" if flag.help else ""))


def _store(result: Scan, flag: Flag, values: list[str]) -> None:
    if flag.is_switch:
        is_on = _WORDS.get(values[0].strip().lower()) if values else True
        if is_on is None or len(values) > 1:
            raise ValueError(f"takes only true or false as value, but got {_shown(' '.join(values))}")
        result.given.pop(flag.attribute, None)
        if meant := flag if is_on else opposite(flag, result.sglang):
            result.flags[meant.attribute] = meant
            result.given[meant.attribute] = meant.constant
        return
    if not values and flag.nargs != "*":
        raise ValueError(f"needs a value ({flag.type_label})")
    if flag.nargs == "2":
        if len(values) > 2:
            raise ValueError(f"takes {flag.type_label}, but got {len(values)} values")
        values = [".".join(values)]
    if flag.together:
        values = flag.together(values)
    if flag.splits:
        values = [part for value in values for part in value.replace(",", " ").split() or [value]]
    converted = []
    for value in values:
        try:
            converted.append(flag.convert(value))
        except ValueError as error:
            raise ValueError(f"{'its value' if flag.secret else _shown(value)} {error}") from None
    if adds(flag):
        result.given[flag.attribute] = result.given.get(flag.attribute, []) + converted
    else:
        result.given[flag.attribute] = converted[0] if flag.nargs in (None, "2") else converted


def adds(flag: Flag) -> bool:
    """Return whether each use of the flag adds to a list."""
    return flag.append or (flag.nargs == "+" and flag.name in own_flags())


def opposite(switch: Flag, sglang: bool) -> Flag | None:
    """Return the switch that means the opposite of `switch`; None if leaving out `switch` means that."""
    package, no, name = re.fullmatch(r"(--(?:vllm-|router-|sglang-)?)(no-)?(.*)", switch.name).groups()  # type: ignore[union-attr]
    other = find(f"{package}{'' if no else 'no-'}{name}", sglang=sglang)
    means = other is not None and other.status == "acts" and (not no or other.attribute == switch.attribute)
    return other if means else None
