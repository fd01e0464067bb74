"""Where Python keeps the bytecode of large packages that were installed without.

vLLM with torch is some 6,000 modules: 16 s of imports without bytecode, 6 s with it, in each process of an engine.
Container images often have none: pip with --no-compile, and PYTHONDONTWRITEBYTECODE in the environment.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

LARGE = ("torch", "transformers", "vllm")  # what a run imports most of


def keep_bytecode(packages: Iterable[str] = LARGE) -> Path | None:
    """Let this process and its children keep bytecode in the user's cache folder, where one of `packages` has none and
    Python would write none beside it.

    Returns:
        The folder; None where Python goes on as before, also because PYTHONPYCACHEPREFIX says where, or because no such
        folder can be had that is this user's alone: what lies there is executed.
    """
    if sys.pycache_prefix is not None or not any(map(_lacks, packages)):
        return None
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "instep" / "bytecode"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError:
        return None
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022 or not os.access(folder, os.W_OK):
        return None
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return folder


def _lacks(package: str) -> bool:
    """Whether it is installed here without bytecode, and stays so."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    if Path(importlib.util.cache_from_source(spec.origin)).exists():
        return False
    return sys.dont_write_bytecode or not os.access(Path(spec.origin).parent, os.W_OK)
