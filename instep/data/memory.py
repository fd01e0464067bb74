"""Rows that a script has in memory, as a list, a frame, columns or a data set, and the file made of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from instep.errors import ConfigError, DataError

_FORMS = "give a list of texts, of conversations or of dicts, a dict of columns, a data frame or one data set"


def listed(given: Any, name: str) -> list[Any]:
    """Return the rows of any object that has rows. Raises: ConfigError, which names the keyword."""
    for method, *how in (("to_dicts",), ("to_pylist",), ("to_dict", "records")):  # of polars, pyarrow and pandas
        if hasattr(given, method) and hasattr(given, "columns"):
            return list(getattr(given, method)(*how))
    if isinstance(given, Mapping):
        if sets := [str(key) for key, value in given.items() if hasattr(value, "column_names")]:
            what = f"it holds {len(sets)} data sets: {', '.join(sets)}"
            raise ConfigError(what, where=name, remedy=f"give one: {name}=data[{sets[0]!r}]")
        columns = {key: value for key, value in given.items() if hasattr(value, "__len__") and type(value) is not str}
        if columns.keys() != given.keys() or len({len(column) for column in columns.values()}) != 1:
            raise ConfigError("it is a dict, but not of columns of one length", where=name, remedy=_FORMS)
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if isinstance(given, (str, bytes, Path, set, frozenset)) or not isinstance(given, Iterable):
        raise ConfigError(f"it is a {type(given).__name__}, which has no rows in order", where=name, remedy=_FORMS)
    return list(given)


def as_lines(rows: list[Any]) -> tuple[str, str, list[dict[str, Any]]]:
    """Return the rows as JSON lines, the name of their file, which depends on their content, and the rows as dicts.

    Raises:
        DataError: there are no rows, or one is not a row; it names the row.
    """
    if not rows:
        raise DataError("there are no rows", where="prompts or a data set", remedy="give at least one")
    dicts, lines = [], []
    for number, row in enumerate(rows):
        dicts.append(dict(row) if isinstance(row, Mapping) else {"prompt": row})
        try:
            if not isinstance(row, (str, list, tuple, Mapping)):
                raise TypeError(f"{type(row).__name__} {row!r:.60}")
            lines.append(json.dumps(dicts[-1], default=_plain) + "\n")
        except (TypeError, ValueError) as error:
            remedy = "give texts, lists of messages, or dicts of what JSON can hold"
            raise DataError(f"the prompt is no JSON: {error}", where=f"prompts[{number}]", remedy=remedy) from error
    text = "".join(lines)
    return text, f"prompts-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl", dicts


def _plain(value: Any) -> Any:
    """Return a numpy value or a path as JSON writes it."""
    if not isinstance(value, Path) and not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} {value!r:.60}")
    return str(value) if isinstance(value, Path) else value.tolist()
