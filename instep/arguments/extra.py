"""Flags that instep does not know: those of a user's `train.py`, and those of a modified Megatron on PYTHONPATH.

argparse defines both kinds. Hooks read them as `args.<name>`. A given flag also sets the field of the same name in a
configuration of megatron-core, if there is one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from instep.arguments.flag import Flag, text
from instep.errors import ConfigError

Provider = Callable[[argparse.ArgumentParser], Any]  # adds its flags to the parser, and may return the parser

IMPORT_SECONDS = 300.0  # Megatron's command line imports all of Megatron
ARGUMENTS = "megatron/training/arguments.py"
_TYPES: dict[str, Any] = {"int": int, "float": float}
_MARK = "flags: "  # marks the line of JSON in the output, because Megatron prints more

_of_user: dict[str, Flag] = {}


def add(provider: Provider, known: Callable[[str], Flag | None]) -> None:
    """Learn the flags that `provider` adds to a parser.

    Args:
        known: finds the record of one of instep's flags.

    Raises:
        ConfigError: instep already has the flag, or cannot read its form.
    """
    parser = argparse.ArgumentParser(add_help=False)
    for flag in map(_flag, _actions(provider(parser) or parser)):
        if any(known(name) is not None for name in (flag.name, *flag.aliases)):
            raise ConfigError(f"{flag.name} is a flag of instep", where="extra_args_provider", remedy="rename it")
        _of_user.update(dict.fromkeys((flag.name, *flag.aliases), flag))


def of_user() -> dict[str, Flag]:
    """Return the added flags, by each of their names."""
    return _of_user


def find_on_path(name: str) -> Flag | None:
    """Return the record of a flag of the `megatron.training` on `sys.path`, or None. Megatron is read only once.

    Raises:
        ConfigError: Megatron is there but cannot be imported, or the flag has a form that cannot be read.
    """
    folder = next((Path(p).absolute() for p in sys.path if Path(p, ARGUMENTS).is_file()), None)
    if folder is None:
        return None
    records, why = _of_megatron(folder)
    if why:
        what = f"is not a flag of instep, and the Megatron in {folder} cannot be imported: {why}"
        raise ConfigError(what, where=name, remedy="install what Megatron needs, or remove it from PYTHONPATH")
    return replace(_flag(records[name]), passed_to="megatron") if name in records else None


@cache
def _of_megatron(folder: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the flags of the Megatron in `folder`, by each of their names, and why they are unknown ("": known)."""
    path = os.pathsep.join([str(folder), *(p or "." for p in sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "instep.arguments.extra"]  # the import takes long and has side effects
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {}, f"its import takes over {IMPORT_SECONDS:.0f} s"
    line = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), None)
    if done.returncode or line is None:
        return {}, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    records = [{**r, "type": _TYPES.get(r["type"], text)} for r in json.loads(line.removeprefix(_MARK))]
    return {name: record for record in records for name in record["names"]}, ""


def _actions(parser: argparse.ArgumentParser) -> Iterator[dict[str, Any]]:
    keys = ("dest", "nargs", "const", "default", "required", "choices", "help", "type")
    for action in parser._actions:
        if action.option_strings and action.dest != "help":
            values = {key: getattr(action, key) for key in keys}
            yield {"names": action.option_strings, "kind": type(action).__name__, **values}


def _flag(record: dict[str, Any]) -> Flag:
    name, *aliases = record["names"]
    kind, nargs, read = record["kind"], record["nargs"], record["type"] or text
    common: dict[str, Any] = dict(dest=record["dest"], default=record["default"], help=record["help"] or "")
    if kind in ("_StoreTrueAction", "_StoreFalseAction", "_StoreConstAction"):
        return Flag(name, bool, aliases=tuple(aliases), constant=record["const"], **common)
    if kind not in ("_StoreAction", "_AppendAction") or nargs not in (None, "+", "*") or record["required"]:
        what = "has a form that instep cannot read (a custom action, nargs other than '+' and '*', or required)"
        raise ConfigError(what, where=f"the flag {name}", remedy="give it one value or a list of values, and a default")

    def convert(value: str) -> Any:
        try:
            return read(value)
        except (argparse.ArgumentTypeError, TypeError) as error:
            raise ValueError(str(error)) from None

    if isinstance(common["default"], str):  # as argparse does
        common["default"] = convert(common["default"])
    choices = tuple(record["choices"] or ())
    return Flag(
        name, convert, choices=choices, nargs=nargs, append=kind == "_AppendAction", aliases=tuple(aliases), **common
    )


def _print_flags() -> None:
    """Print the flags of the Megatron on PYTHONPATH as one line of JSON."""

    def print_and_exit(parser: argparse.ArgumentParser) -> NoReturn:
        records = [{**r, "type": getattr(r["type"], "__name__", "")} for r in _actions(parser)]
        print("\n" + _MARK + json.dumps(records, default=str))
        sys.exit()

    sys.argv[1:] = []
    importlib.import_module("megatron.training.arguments").parse_args(print_and_exit, ignore_unknown_args=True)


if __name__ == "__main__":
    _print_flags()
