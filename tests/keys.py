"""The key of this test process, for engines that a test starts by hand and for runs that use them."""

from __future__ import annotations

from pathlib import Path

from instep.engines import keys
from instep_engine.guard import KEY_VARIABLE

ENVIRONMENT = {KEY_VARIABLE: keys.run_key()}  # of an engine
HEADERS = {"Authorization": f"Bearer {keys.run_key()}"}


def knowing(url: str) -> str:
    """`url`, to which this process sends its key from now on."""
    keys.know(url, keys.run_key())
    return url


def key_file(folder: Path) -> list[str]:
    """The flag for a run whose engines, router or teacher this process has started."""
    return ["--api-key-file", str(keys.write(folder / "keys", keys.run_key()))]
