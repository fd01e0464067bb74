"""The command line of `trl vllm-serve`, read as flags of `instep serve`. This file needs no torch."""

from __future__ import annotations

import argparse
import ipaddress
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.arguments.all_flags import find
from instep.arguments.engine_flags import find_engine_flag
from instep.arguments.parser import is_flag
from instep.engines.flags import PREFIXES
from instep.errors import ConfigError
from instep.system.options import OptionParser
from instep.system.ports import LOOPBACK

COMMAND = "instep vllm-serve"
LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="ascii"))
FLAGS = {name.replace("-", "_"): flag for table in ("trl", "vllm") for name, flag in _TABLES[table].items()}


def help_text() -> str:
    """Return the text of `--help`, from the table of flags."""
    shown = {}
    for table in ("trl", "vllm"):
        flags = ((f"  --{name} {flag['form']}", flag["help"]) for name, flag in _TABLES[table].items())
        lines = (f"{flag.ljust(38)} {text}".replace("\n", f"\n{'':39}") for flag, text in flags)
        shown[table] = "\n".join(lines)
    return str(_TABLES["help"]).format(**shown)


@dataclass
class Serving:
    """The result of a command line: words for `instep serve`, and values that it has no flag for."""

    words: list[str] = field(default_factory=list)
    host: str = LOOPBACK
    log_level: str = "info"
    sync_timeout: float = 600.0

    @property
    def on_loopback(self) -> bool:
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def read(argv: Sequence[str]) -> Serving:
    """Translate a command line. Raises ConfigError with all problems of TRL's own flags."""
    positional = list(argv[:1]) if argv and not is_flag(argv[0]) else []
    given, rest = _split(argv[len(positional) :])
    words, problems = list(rest), []
    if positional and "model" in given:
        problems.append(f"--model: the model is named already: {positional[0]}")
    elif positional:
        given["model"] = positional
    own: dict[str, Any] = {}
    for name, values in given.items():
        try:
            if (kind := FLAGS[name].get("kind")) is not None:
                own[name] = _KINDS[kind](_one(values))
            else:
                words += _words(FLAGS[name], values)
        except ValueError as error:
            problems.append(f"--{name}: {error}")
    named = [own.pop(name, "None") for name in ("model", "revision")]
    if named[0] != "None":
        words += ["--hf-checkpoint", "@".join(name for name in named if name != "None")]
    sizes = [own.pop(f"{name}_parallel_size", None) for name in ("tensor", "data")]
    if any(sizes):
        tensor, data = (size or 1 for size in sizes)
        words += ["--rollout-num-gpus", str(tensor * data), "--rollout-num-gpus-per-engine", str(tensor)]
    out = Serving(words, **own)
    open_or_keyed = any(w.partition("=")[0] in ("--no-api-key", "--api-key-file") for w in rest)
    if not out.on_loopback and not open_or_keyed:
        problems.append(
            f"--host {out.host}: other hosts could send weights and ask for texts: give --api-key-file FILE (clients "
            "then name the server http://user:KEY@HOST:PORT), or --no-api-key on a trusted network"
        )
    if problems:
        remedy = f"correct {'it' if len(problems) == 1 else 'all of them'}; `{COMMAND} --help` explains the flags"
        raise ConfigError("; ".join(problems), where=COMMAND, remedy=remedy)
    return out


def _split(argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the values of TRL's flags by name, and the other words."""
    parser = OptionParser(COMMAND, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in FLAGS:
        parser.add_argument(*{f"--{name}", f"--{name.replace('_', '-')}"}, dest=name, nargs="*")
    given, rest = parser.parse_known_args(argv)
    parts = (word.partition("=") for word in rest)
    return vars(given), [(_of_serve(name) if is_flag(name) else name) + more + value for name, more, value in parts]


def _of_serve(name: str) -> str:
    """Return the matching flag of `instep serve`: vLLM's flags may come without their prefix."""
    ours, prefixed = find(name), PREFIXES["vllm"] + name[2:].replace("_", "-")
    is_theirs = name.startswith("--") and (ours is None or ours.status in ("refused", "later"))
    return prefixed if is_theirs and find_engine_flag(prefixed) else name


def _one(values: list[str]) -> str:
    if len(values) != 1 or not values[0].strip():
        raise ValueError(f"needs one value, got {len(values)}")
    return values[0]


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number above 0")
    return int(text)


def _level(text: str) -> str:
    if text not in LEVELS:
        raise ValueError(f"{text!r} is not one of {', '.join(LEVELS)}")
    return text


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d*\.?\d+(e\d+)?", text) or not 0 < float(text) <= 1e6:
        raise ValueError(f"{text!r} is not a number of seconds above 0 and up to 1e6")
    return float(text)


_KINDS: dict[str, Callable[[str], Any]] = {"text": str, "count": _count, "level": _level, "seconds": _seconds}


def _words(flag: dict[str, Any], values: list[str]) -> list[str]:
    """Return the words of `instep serve` for a flag of the table. Raises ValueError for a refused value."""
    if [value.lower() for value in values] == ["none"]:
        return []
    if "on" in flag:
        return list(flag["on" if _truth(values) else "off"])
    refused = flag.get("refused", {})
    if "" in refused:
        raise ValueError(refused[""])
    value = given = _one(values)
    if value in refused:
        raise ValueError(refused[value])
    if "words" in flag and value not in flag["words"]:
        raise ValueError(f"{value!r} is not supported; use {', '.join(flag['words'])}")
    if "json" in flag:
        try:
            given = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"is not JSON: {error}") from error
    if given != flag.get("only", given):
        raise ValueError(flag["why"])
    if "words" in flag:
        return list(flag["words"][value])
    return [flag["to"], value] if "to" in flag and value != flag.get("unless") else []


def _truth(values: list[str]) -> bool:
    """Return a boolean as transformers' HfArgumentParser reads it."""
    text = " ".join(values).lower()
    if text not in (yes := ("", "true", "t", "yes", "y", "1")) and text not in ("false", "f", "no", "n", "0"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text in yes
