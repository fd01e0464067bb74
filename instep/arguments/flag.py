"""One record per command-line flag. All code about flags reads these records.

A flag *acts*, is *accepted*, comes *later*, or is *refused*. A flag of the last two kinds is an error, which says why
and what to use instead. An *accepted* flag is not an error: a note says what it is read as, or why it changes nothing.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from instep.data.rows import split_files
from instep.engines.topology import MAX_GPUS
from instep.system.documents import parse_choice, parse_json, parse_whole
from instep.system.hooks.aliases import instep_hook, is_aliased, is_installed
from instep.system.hooks.user_code import functions_of_run

FlagStatus = Literal["acts", "accepted", "later", "refused"]


@dataclass(frozen=True)
class Number:
    """A number type with its range. Calling it converts text, or raises a ValueError that says what is expected.

    Every range is finite, to refuse values that were meant for another flag or that no process could handle.
    """

    kind: type
    low: float
    high: float
    above: bool = False  # `low` itself is excluded

    @property
    def label(self) -> str:
        return "INT" if self.kind is int else "FLOAT"

    @property
    def range(self) -> str:
        """The range in words, for the documentation."""
        return f"{'above ' if self.above else ''}{_plain(self.low)} to {_plain(self.high)}"

    def __call__(self, text: str) -> Any:
        try:
            value = parse_whole(text) if self.kind is int else float(text)
        except ValueError:
            raise ValueError(f"is not a {'whole ' if self.kind is int else ''}number") from None
        self.check(value)
        return value

    def check(self, value: float) -> None:
        """Check that a number is in the range. Raises: ValueError, with the range, if it is not."""
        if not math.isfinite(value):
            raise ValueError("is not a finite number")
        if value < self.low or value > self.high or (self.above and value == self.low):
            lowest = f"{'above' if self.above else 'at least'} {_plain(self.low)}"
            raise ValueError(f"must be {lowest} and at most {_plain(self.high)}")


def _plain(bound: float) -> str:
    short = f"{bound:g}".replace("e+", "e").replace("e0", "e")
    return short if float(short) == bound else str(bound)


COUNT = Number(int, 1, 10**9)
INDEX = Number(int, 0, 10**9)
BATCH = Number(int, 1, 10**6)  # samples, or groups of samples, in memory at a time
GPUS = Number(int, 1, MAX_GPUS)
GPUS_PER_NODE = Number(int, 1, 4096)  # processes, if there are no GPUs
SEED = Number(int, 0, 2**31 - 1)  # numpy takes 32 bits; ranks and epochs are added to it
POSITIVE = Number(float, 0, 1e6, above=True)
NON_NEGATIVE = Number(float, 0, 1e6)
FRACTION = Number(float, 0, 1)
COEFFICIENT = Number(float, -1000, 1000)
RATE = Number(float, 0, 1)  # a learning rate
SECONDS = Number(float, 0.001, 1e6)
PORT = Number(int, 1024, 65535)


def size(value: str) -> int:
    """Return a whole number above 0. As in vLLM, 2k and 1.5m are powers of 1000, 4K and 1M are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])|(\d+)([KMG])", value)
    try:
        decimal, small, binary, large = found.groups() if found else ("", "", parse_whole(value), " ")
    except ValueError:
        raise ValueError("is neither a whole number nor one like 2k (of 1000) or 4K (of 1024)") from None
    number = float(decimal) * 1000 ** ("kmg".index(small) + 1) if decimal else int(binary) * 1024 ** " KMG".index(large)
    COUNT.check(number)
    return int(number)


def literal(value: str) -> str:
    """Return any text, also white space. Refuse the empty text, which an unset shell variable leaves."""
    if not value:
        raise ValueError("is empty (an unset shell variable?)")
    if not value.isascii() and value.encode("utf-8", "replace").decode() != value:
        raise ValueError("is not UTF-8 text")
    return value


def text(value: str) -> str:
    """Return a text that is more than white space. In a list, commas separate texts."""
    literal(value.strip())
    return value


def path(value: str) -> str:
    """Return a path. `~` is the home folder; white space around the path is removed."""
    return os.path.expanduser(literal(value.strip()))


def files(value: str) -> str:
    """Return FILE[,FILE ...]. Each file is a `path`."""
    return ",".join(path(file) for file in split_files(literal(value.strip().rstrip(","))))


def in_one_word(values: list[str]) -> list[str]:
    """Return the words if there is only one: several files are one word, joined by commas."""
    if len(values) > 1:
        raise ValueError(f"got {len(values)} words: join the files by commas: {','.join(values)[:200]}")
    return values


def hook(value: str) -> str:
    """Return a dotted path `package.module.function`. The top-level module must exist; it is not imported.

    A function of a project that is not installed becomes instep's equivalent, if there is one (`aliases.py`).
    """
    if file := re.fullmatch(r"(?:.*/)?(\w+)\.py(?:::?(\w+))?", value):
        form = f"{file[1]}.{file[2] or 'my_function'}"
        raise ValueError(f"is a file: write {form}, and add its folder to PYTHONPATH unless instep starts there")
    if "." not in value or not all(part.isidentifier() for part in value.split(".")):
        raise ValueError("is not a dotted path like my_module.my_function (no file name, no colon)")
    top = value.partition(".")[0]
    if value not in functions_of_run() and not is_installed(top):
        if ours := instep_hook(value):
            return ours
        here = "; docs/migration.md, 'Hooks', lists instep's equivalents" if is_aliased(top) else ""
        raise ValueError(f"names the module '{top}', which is neither in this folder nor on PYTHONPATH{here}")
    return value


def pattern(value: str) -> str:
    """Return a regular expression."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return value


def json_object(value: str) -> dict[str, Any]:
    """Return a JSON object, such as '{"enable_thinking": false}'."""
    parsed = parse_json(value)
    if not isinstance(parsed, dict):
        raise ValueError("is JSON, but not an object like '{\"key\": 1}'")
    return parsed


def http_address(value: str) -> str:
    """Return `http://HOST:PORT` of a server, from an address with or without `http://` and a path."""
    parts = urlsplit(value if "//" in value else f"http://{value}")
    try:
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # the port is not a number
        known = False
    if not known:
        raise ValueError("is not an address like http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"


def attribute_name(flag: str) -> str:
    """Return the default attribute of a flag."""
    return flag.lstrip("-").replace("-", "_")


# Types by their names in the TOML files. Other numbers are written there as `int -1 to 100`, `float above 0 to 1`.
TYPES: dict[str, Any] = {
    **{"count": COUNT, "index": INDEX, "batch": BATCH, "gpus": GPUS, "gpus_per_node": GPUS_PER_NODE, "seed": SEED},
    **{"positive": POSITIVE, "non_negative": NON_NEGATIVE, "fraction": FRACTION, "coefficient": COEFFICIENT},
    **{"rate": RATE, "seconds": SECONDS, "port": PORT, "size": size, "literal": literal, "text": text, "path": path},
    **{"files": files, "hook": hook, "json": json_object, "regex": pattern, "url": http_address},
    **{"bool": bool, "switch": bool},
}
# What the help shows for a value that is not a number.
TYPE_LABELS: dict[Any, str] = {kind: name.upper() for name, kind in TYPES.items() if not isinstance(kind, Number)}
TYPE_LABELS |= {literal: "TEXT", hook: "MODULE.NAME", bool: ""}


@dataclass(frozen=True, eq=False)
class Flag:
    """One flag.

    Attributes:
        type: a converter from text. `bool` makes a switch without a value.
        nargs: None (one value), "+" (one or more values in a list; each use of one of instep's flags adds to it), "*"
            (zero or more values) or "2" (Megatron's MODULE NAME, or both in one word; the value is a dotted path).
        together: reads the words of one use before they are converted. Raises ValueError, with what is wrong.
        append: each use adds one value to a list.
        dest: the attribute of `Args`; if empty, it is made from the name.
        note, instead: why a flag does not act, and what to use instead.
        read_as: for an accepted flag, the flag that takes its values; empty if it changes nothing.
        neutral: accepted values of a flag that does not act: they ask for what instep does anyway.
        whose: the programs that have the flag: V vime's guide, R vime's readme, S slime's guide, C slime's command
            line (its code), A Atropos' trainer, T TRL's server, M Megatron; empty: only instep has it.
        secret: never printed, saved or shown to hooks.
        passed_to: the package that has the flag: `vllm` or `vllm-router`, which get the value as typed; or `megatron`
            for a flag that only the Megatron on PYTHONPATH has.
        needs: flags; at least one must be on or set. lacks: the error text if none of them is.
        megatron_only: why `--train-backend hf` refuses it, and what to do.
        only: the only command in which it acts; `rl`: the commands that sample.
        served: it also acts in `instep serve`.
        config: for a flag of the model's shape, the key of config.json with its value.
    """

    name: str
    type: Callable[[str], Any] = text
    default: Any = None
    help: str = ""
    choices: tuple[Any, ...] = ()
    nargs: str | None = None
    append: bool = False
    together: Callable[[list[str]], list[str]] | None = None
    dest: str = ""
    aliases: tuple[str, ...] = ()
    status: FlagStatus = "acts"
    note: str = ""
    instead: str = ""
    read_as: str = ""
    neutral: tuple[str, ...] = ()
    whose: str = ""
    secret: bool = False
    constant: Any = True  # what a switch sets
    passed_to: str = ""
    needs: tuple[str, ...] = ()
    lacks: str = ""
    megatron_only: tuple[str, ...] = ()
    only: str = ""
    served: bool = False
    config: str = ""

    @property
    def attribute(self) -> str:
        return self.dest or attribute_name(self.name)

    @property
    def is_switch(self) -> bool:
        return self.type is bool

    @property
    def splits(self) -> bool:
        """Whether commas separate its values, as blanks do. Text values must then contain no comma."""
        numbers = getattr(self.type, "kind", "") in (int, float, "int", "float")
        several = self.nargs in ("+", "*") or self.append
        return several and bool(numbers or self.choices or self.type in (text, hook))

    @property
    def type_label(self) -> str:
        if self.choices:
            return "|".join(str(c) for c in self.choices) + (" ..." if self.nargs else "")
        if self.nargs == "2":
            return "MODULE NAME"
        label = getattr(self.type, "label", "") or TYPE_LABELS.get(self.type, "VALUE")
        return f"{label} ..." if self.nargs else label

    @property
    def range(self) -> str:
        """The range of a number in words; empty for other values."""
        number = COUNT if self.type is size else self.type
        return number.range if isinstance(number, Number) else ""

    def convert(self, value: str) -> Any:
        """Return `value` in the flag's type. Raises: ValueError, with what is wrong."""
        converted = self.type(literal(value))
        return parse_choice(str(converted), self.choices) if self.choices else converted


@dataclass(frozen=True)
class FlagGroup:
    """The flags of one concern, under the title that `--help` shows."""

    title: str
    flags: tuple[Flag, ...]


def refused(note: str, whose: str, *names: str, instead: str = "") -> tuple[Flag, ...]:
    """Return flags that instep refuses for one common reason."""
    return tuple(Flag(n, status="refused", note=note, instead=instead, whose=whose) for n in names)


def read_flags(file: str, **here: Any) -> FlagGroup:
    """Read the flags of a concern from the TOML file next to its Python file.

    A section describes one flag, or several flags that do not act. Its keys are the fields of `Flag`. The keys
    `refused`, `later` and `accepted` set both status and note. A switch is off by default.

    Args:
        file: the Python file: `data.py` for `data.toml`.
        here: the values of `${name}` in the TOML file: types and choices that Python knows, and parts of texts.
    """
    sections = tomllib.loads(Path(file).with_suffix(".toml").read_text(encoding="ascii"))
    title = sections.pop("title")
    flags = [_flag(name, section, here) for names, section in sections.items() for name in names.split()]
    return FlagGroup(title, tuple(flags))


def _flag(name: str, section: dict[str, Any], here: Mapping[str, Any]) -> Flag:
    fields = {key: _filled(value, here) for key, value in section.items()}
    fields |= {
        key: tuple(fields[key]) for key in ("choices", "aliases", "neutral", "needs", "megatron_only") if key in fields
    }
    for status in {"refused", "later", "accepted"} & fields.keys():
        fields |= {"status": status, "note": fields.pop(status)}
    kind = fields.get("type", "text")
    if kind == "switch":
        fields["default"] = False
    if isinstance(kind, str):
        fields["type"] = TYPES.get(kind) or _number(kind)
    return Flag(name, **fields)


def _number(range_in_words: str) -> Number:
    """Return the type `int -1 to 100` or `float above 0 to 1`."""
    kind, *above, low, _, high = range_in_words.split()
    read = parse_whole if kind == "int" else float
    return Number(int if kind == "int" else float, read(low), read(high), above=bool(above))


def _filled(value: Any, here: Mapping[str, Any]) -> Any:
    """Return a value of a section, with `${name}` replaced by its value in `here`."""
    if not isinstance(value, str) or "${" not in value:
        return value
    whole = re.fullmatch(r"\$\{(\w+)\}", value)
    return here[whole[1]] if whole else re.sub(r"\$\{(\w+)\}", lambda found: here[found[1]], value)
