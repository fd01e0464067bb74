"""Models of the Hugging Face hub by name, in the cache of `huggingface_hub`.

A snapshot is the folder CACHE/models--ORG--NAME/snapshots/COMMIT: the path gives the model and the commit.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.errors import ConfigError
from instep.models.files import INDEX, SINGLE, weight_map
from instep.models.sizes import shape_of
from instep.system.private import users_files

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_WITHOUT_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
HUB_SECONDS = 30.0  # the longest wait for an answer of the hub, or for its next part
HOW = "give a folder, or a model of the hub as ORG/NAME or ORG/NAME@REVISION"
_of_names: set[str] = set()  # snapshots given by name in this process


def is_name(given: str) -> bool:
    """Return whether `given` is ORG/NAME or ORG/NAME@REVISION, and neither a file nor a folder here."""
    return _NAME.fullmatch(given) is not None and not os.path.lexists(given)


def name_of(folder: str) -> tuple[str, str] | None:
    """Return name and commit of a snapshot, from its path; None for another folder."""
    repo, snapshots, commit = ("", "", "", *Path(folder).parts)[-3:]
    return (repo[8:].replace("--", "/"), commit) if repo[:8] == "models--" and snapshots == "snapshots" else None


def at_commit(given: str, folder: str | None) -> str:
    """Add the commit of `folder` to the name `given`, if `folder` is its snapshot and `given` has no revision."""
    known = name_of(folder or "")
    return f"{given}@{known[1]}" if known and known[0] == given else given


def folder_of(given: str, flag: str, *, weights: bool = True) -> str:
    """Return the folder for `given`: a name is downloaded, anything else is already a folder.

    Raises:
        ConfigError: the download failed.
    """
    folder = snapshot(given, flag) if is_name(given) else given
    if weights:
        fetch_weights(folder, flag)
    return folder


@functools.cache
def snapshot(given: str, flag: str) -> str:
    """Download a model without its weights. Return the folder of the snapshot. A process asks the hub once.

    Raises:
        ConfigError: the download failed.
    """
    found = _NAME.fullmatch(given)
    assert found is not None
    folder = _fetched(found[1], found[2], _WITHOUT_WEIGHTS, ["config.json"], f"{flag} {given}")
    _of_names.add(folder)
    return folder


def gets_weights(folder: str) -> bool:
    """Return whether `fetch_weights` completes this folder: a snapshot that was given by name."""
    return folder in _of_names


def fetch_weights(folder: str, flag: str) -> None:
    """Download the weights of a snapshot that was given by name; other folders stay unchanged. Raises ConfigError."""
    if not gets_weights(folder) or (known := name_of(folder)) is None:
        return
    try:
        names = sorted(set(weight_map(Path(folder)).values())) if (Path(folder) / INDEX).exists() else [SINGLE]
    except (OSError, ValueError):  # `check_hf_checkpoint` reports what is wrong with the index
        return
    if _missing(folder, names):
        _fetched(*known, names, names, f"{flag} {'@'.join(known)}", Path(folder).parents[2])
        shape_of.cache_clear()  # it reads the weight files


def _missing(folder: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if not os.path.exists(os.path.join(folder, name))]


def _fetched(
    repo: str, revision: str | None, files: Sequence[str], needed: Sequence[str], where: str, cache: Path | None = None
) -> str:
    """Download the files of a model that match the patterns `files`; if the hub does not answer, use the cache.

    Raises:
        ConfigError: a file of `needed` is missing, or the download failed.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # HTTPError of httpx or httpx2, and OSError; ValueError for a wrong name; RuntimeError for a transfer by Xet.
    expected: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, ValueError, RuntimeError)
    refused: Exception | None = None
    bound_waits()
    with users_files():
        try:
            HfApi().model_info(repo, revision=revision)
        except expected as error:
            refused = error
        try:
            folder = snapshot_download(
                repo,
                revision=revision,
                cache_dir=cache,
                allow_patterns=list(files),
                local_files_only=refused is not None,
            )
        except expected as error:
            what, remedy = _told(repo, revision, refused or error)
            raise ConfigError(what, where=where, remedy=remedy) from error
    if missing := _missing(folder, needed):
        what, remedy = f"this model has no {missing[0]}", "give one with config.json and all its weights in safetensors"
        if refused is not None:
            what, remedy = _told(repo, revision, refused)
        raise ConfigError(what, where=where, remedy=remedy)
    return folder


@functools.cache
def bound_waits() -> None:
    """Limit requests of `huggingface_hub` and `datasets` without a timeout to `HUB_SECONDS`."""
    from huggingface_hub import get_session

    def bound(request: Any) -> None:
        waits = request.extensions["timeout"]
        waits.update({what: HUB_SECONDS for what, seconds in waits.items() if seconds is None})

    get_session().event_hooks["request"].append(bound)


def _told(repo: str, revision: str | None, error: Exception) -> tuple[str, str]:
    """Return why a download failed, and the remedy."""
    from huggingface_hub import constants, errors

    at, token = f"{constants.ENDPOINT}/{repo}", "give your token: HF_TOKEN, or `hf auth login`"
    if isinstance(error, errors.GatedRepoError):
        return f"{at} is gated", f"ask for access on that page, and {token}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no folder {repo} here, and no such model at {constants.ENDPOINT}", f"{HOW}; for a private one {token}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{at} has no revision {revision}", "name a branch, a tag or a commit after the @"
    if isinstance(error, OSError) and error.errno:
        remedy = "free space there, set another cache in HF_HOME, or use its content with HF_HUB_OFFLINE=1"
        return f"{repo} cannot be stored: {error}", remedy
    asked = f"{constants.ENDPOINT} does not answer: {' '.join(str(error).split()) or type(error).__name__}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        asked = "HF_HUB_OFFLINE is set"
    command = f"`hf download {repo}{f' --revision {revision}' if revision else ''}`"
    return (
        f"no folder {repo} here, not all of that model in {constants.HF_HUB_CACHE}, and {asked}",
        f"{HOW}; {command} fills the cache where there is a network",
    )
