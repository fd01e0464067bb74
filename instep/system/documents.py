"""Read files, JSON, YAML and words from users; errors are one line that says what is wrong and where."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

MAX_DEPTH = 100  # of lists and objects; Python copies and prints only a few hundred levels
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; unlike the open of a pipe, do not wait for a writer. Raises: OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(None, "it is not a regular file")
    return os.fdopen(handle, "rb")


def read_text(path: Path) -> str:
    """Return the text of a regular UTF-8 file. Raises: OSError, ValueError."""
    with open_regular(path) as file:
        return file.read().decode("utf-8")


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises: OSError, ValueError as in `parse_json`."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: not JSON, a number with too many digits, lists nested too deep, or half of a surrogate pair.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"is not JSON: {error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise ValueError(f"is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError:  # raised when Python converts a very large whole number
        most = sys.get_int_max_str_digits()
        found = re.search(rf"\d{{{most + 1}}}", text)
        at = f" at column {found.start() + 1}" if found else ""
        raise ValueError(f"has a whole number of more than {most} digits{at}") from None
    if _HALF.search(text) or text.count("[") + text.count("{") > MAX_DEPTH:
        for key, part in value.items() if isinstance(value, dict) else [("", value)]:
            if wrong := _wrong(key, part):
                printable = key.encode("utf-8", "backslashreplace").decode()[:60]
                raise ValueError(f"{wrong} (in {printable!r})" if key else wrong)
    return value


def _wrong(key: str, value: Any) -> str:
    """Return what no process can handle in one value; empty if there is nothing."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [v for values in inner for v in values if isinstance(v, (dict, list))]
    if level:
        return f"is nested more than {MAX_DEPTH} levels deep"
    try:
        json.dumps([key, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"has \\u{ord(error.object[error.start]):04x}, half of a surrogate pair, not a character"
    return ""


def parse_whole(text: str) -> int:
    """Return the whole number in a word, such as 100, 1e2 or 10.0. Raises: ValueError."""
    with contextlib.suppress(ValueError):
        return int(text)
    if not (value := float(text)).is_integer():
        raise ValueError("is not a whole number")
    return int(value)


def parse_choice(text: str, choices: Sequence[Any]) -> Any:
    """Return the one of `choices` that a word names, in any case of letters. Raises: ValueError."""
    same = [c for c in choices if str(c) == text] or [c for c in choices if str(c).lower() == text.lower()]
    if not same:
        raise ValueError(f"is not one of {', '.join(map(str, choices))}")
    return same[0]


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: not YAML, or a value that Python cannot represent.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
