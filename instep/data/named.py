"""Data sets of the Hugging Face hub by name, `ORG/NAME[@REVISION][:CONFIG][:SPLIT]`: each becomes a parquet file."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path

from instep.data.index import cache_folder
from instep.data.rows import ENDINGS, NAMED, parse_path
from instep.errors import ConfigError, writing
from instep.models.hub import bound_waits
from instep.system.atomic import replacing
from instep.system.private import users_files

FOLDER = "named"  # in the cache of data


def is_named(path_spec: str) -> bool:
    """Return whether this names a data set of the hub, with or without a slice, and not a local file or folder."""
    name = path_spec.partition("@[")[0]
    return NAMED.fullmatch(name) is not None and not name.endswith(ENDINGS) and not os.path.lexists(name)


def file_of(path_spec: str, where: str, cache_path: str | None, kept: Iterable[str] = ()) -> str:
    """Return the file of a named data set, with the slice of `path_spec`. The path of a file is returned unchanged.

    Args:
        where: the flag, for errors.
        kept: the files of the resumed run. If one holds this data set, it is used, even if the hub has changed.

    Raises:
        ConfigError: the data set cannot be loaded. OutputError: the cache cannot be written.
    """
    if not is_named(path_spec):
        return path_spec
    name, at, part = path_spec.partition("@[")
    before = (parse_path(file)[0] for file in kept)
    same = (str(path) for path in before if path.name.rpartition("-")[0] == _stem(name) and path.is_file())
    return (next(same, None) or _fetched(name, where, cache_folder(cache_path) / FOLDER)) + at + part


def _stem(name: str) -> str:
    return name.replace("/", "--")


@functools.cache
def _fetched(name: str, where: str, folder: Path) -> str:
    """Load the data set as the hub has it now into a file, and return its path. A process asks the hub once."""
    found = NAMED.fullmatch(name)
    assert found is not None
    remedy = "give a jsonl or parquet file, or ORG/NAME:CONFIG:SPLIT as in openai/gsm8k:main:train"
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        what = f"no file {name} here, and a data set of the hub needs the package datasets: {error}"
        raise ConfigError(what, where=where, remedy=f"pip install datasets; or {remedy}") from error
    bound_waits()
    try:
        with users_files():
            kind = {"name": found["config"], "split": found["split"] or "train", "revision": found["revision"]}
            data = load_dataset(found["name"], **kind)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        what = f"no file {name} here, and the hub has no such data set: {' '.join(str(error).split())}"
        token = "a private or gated one needs your token: HF_TOKEN, or `hf auth login`"
        raise ConfigError(what, where=where, remedy=f"{remedy}; {token}") from error
    path = folder / f"{_stem(name)}-{data._fingerprint}.parquet"
    if not path.exists():
        with writing(path, where):
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with replacing(path) as part:
                data.to_parquet(part)
    return str(path)
