"""Ask an installed engine or router for its flags: `python extract_flags.py PACKAGE VERSION > TABLE.json`.

PACKAGE is vllm, or one of CLASSES. This program imports nothing of instep, only its stand-ins for packages that SGLang
imports. It runs in a separate process, because importing the package has costs and side effects. It reads the actions
of the package's own argparse parser.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import sys
from typing import Any

# The class of each package that adds its flags to a parser. vLLM builds its parser by a subcommand.
CLASSES = {
    "vllm-router": ("vllm_router.router_args", "RouterArgs"),
    "sglang": ("sglang.srt.server_args", "ServerArgs"),
    "sglang-router": ("sglang_router.router_args", "RouterArgs"),
}


def parser_of(package: str) -> argparse.ArgumentParser:
    """Return the parser of `vllm serve`, `vllm-router`, `sglang.launch_server` or sglang-router."""
    if package == "vllm":
        from vllm.entrypoints.cli.serve import ServeSubcommand  # type: ignore[import-not-found]
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

        return ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    if package == "sglang":
        with contextlib.suppress(ImportError):  # without them SGLang needs CUDA's packages
            from instep_engine.sglang.stand_ins import prepare

            prepare()
    module, name = CLASSES[package]
    parser = argparse.ArgumentParser()
    getattr(importlib.import_module(module), name).add_cli_args(parser)
    return parser


def rows(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Return for each optional argument the fields of an `instep.engines.flags.EngineFlag`, sorted by its name."""
    found = [_row(action) for action in parser._actions if action.option_strings and action.dest != "help"]
    return sorted((row for row in found if row), key=lambda row: row["names"][0])


def _row(action: argparse.Action) -> dict[str, Any]:
    long = [name for name in action.option_strings if name.startswith("--")]
    negative = long if isinstance(action, argparse._StoreFalseAction) and long[0].startswith("--no-") else []
    if isinstance(action, argparse.BooleanOptionalAction):
        negative = [name for name in long if name.startswith("--no-") and name.replace("--no-", "--", 1) in long]
    names = [name for name in long if name not in negative] or long
    row: dict[str, Any] = {"names": names, "field": action.dest, "kind": _kind(action)}
    if row["kind"] == "boolean":
        row["negations"] = negative
    if action.choices and "cpu" not in action.choices:  # the kinds of devices depend on this build
        row["choices"] = [str(choice) for choice in action.choices]
    if action.nargs not in (None, 0):
        row["nargs"] = str(action.nargs)
    if isinstance(action, argparse._AppendAction):
        row["append"] = True
    if _closure_name(action.type) == "_optional_type":
        row["optional"] = True
    if getattr(action.type, "__name__", "") == "human_readable_int_or_auto":
        row["auto"] = True
    row["default"] = _default(action.default)
    return {key: value for key, value in row.items() if value not in ("", [])}


def _kind(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "boolean"
    if action.nargs == 0:
        return "switch"
    kind = action.type
    while _closure_name(kind) in ("_optional_type", "_parse_type"):
        kind = inspect.getclosurevars(kind).nonlocals["return_type"]  # type: ignore[arg-type]
    name = str(getattr(kind, "__name__", kind))
    if kind in (int, float):
        return name
    if name.startswith("human_readable_int"):
        return "si_size" if str(getattr(kind, "__module__", "")).startswith("sglang") else "size"
    if kind is json.loads or name in ("parse_dataclass", "json_list_type", "parse_cuda_graph_config_arg"):
        return "json"
    if "valid JSON string or JSON keys" in (action.help or ""):
        return "json"
    return "json_or_text" if name == "union_dict_and_str" else "text"


def _closure_name(kind: Any) -> str:
    return str(getattr(kind, "__name__", ""))


def _default(value: Any) -> str:
    if value is None or value is argparse.SUPPRESS or isinstance(value, bool) and not value:
        return ""
    if isinstance(value, bool | int | float | str):
        return str(value)
    if isinstance(value, list | tuple | dict) and len(value) < 4:
        return json.dumps(value, default=str) if value else ""
    return ""  # a whole configuration


if __name__ == "__main__":
    package, version = sys.argv[1:]
    sys.argv = [package]
    out, sys.stdout = sys.stdout, sys.stderr  # the package's own output does not belong into the table
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    found = rows(parser_of(package))
    if package.startswith("sglang"):  # some of its choices come from sets, in another order in each process
        found = [row | {"choices": sorted(row["choices"])} if "choices" in row else row for row in found]
    flags = ",\n  ".join(json.dumps(row, sort_keys=True) for row in found)
    print(f'{{"package": "{package}", "version": "{version}", "flags": [\n  {flags}\n]}}', file=out)
