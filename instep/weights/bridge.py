"""`vllm_bridge_config.json`: where a vLLM that a user started by hand, with instep's plugin, shares its weights.

The plugin writes it (`instep_engine/vllm/bridge.py`). Its name, its keys and its places are those of Atropos' example
trainer.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from instep.errors import ConfigError
from instep_engine.place import lives

NAME = "vllm_bridge_config.json"
DEFAULT = Path("/tmp/atropos_bridge")
START = """start it with instep's plugin and --weight-transfer-config '{"backend": "instep_single_copy"}'"""


def shared_folder(given: str | None) -> Path:
    """Return the folder in which the workers of that server have recorded how to open their memory.

    Args:
        given: the path of the file; None: search for it.

    Raises:
        ConfigError: there is no such file, another user may have written it, or its server has ended.
    """
    path = Path(given) if given is not None else _found()
    config = _read(path)
    try:
        own = config["instep"]
        folder, nonce, process = Path(own["folder"]), str(own["nonce"]), str(own["process"])
    except (KeyError, TypeError) as error:
        what = "it is not a file of instep's plugin: some keys are missing"
        raise ConfigError(what, where=str(path), remedy=START) from error
    if not lives(process):
        raise ConfigError("it is stale: the server that wrote it has ended", where=str(path), remedy=START)
    try:
        now = json.loads((folder / "memory-0.json").read_text())["nonce"]
    except (OSError, ValueError, KeyError, TypeError):
        now = ""
    if now != nonce:
        what = "it is stale: its server now shares other memory, or none"
        raise ConfigError(what, where=str(path), remedy="give the file that the server's last start logged")
    return folder


def _found() -> Path:
    """Return the first such file."""
    folders = [*map(Path, filter(None, [os.environ.get("LOGDIR")])), Path(), DEFAULT]
    for folder in folders:
        if (folder / NAME).exists():
            return folder / NAME
    raise ConfigError(
        f"no {NAME} in {', '.join(str(folder.absolute()) for folder in folders)}",
        where="--weight-sync single-copy with --rollout-external-engine-addrs",
        remedy=f"{START}, or give its path with --vllm-config-path",
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise ConfigError(
                    f"it belongs to user {about.st_uid} and has mode {stat.S_IMODE(about.st_mode):04o}: another user "
                    "may have written it",
                    where=str(path),
                    remedy="run server and trainer as one user; the plugin writes it with mode 0600",
                )
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path), remedy=START) from error
    return config if isinstance(config, dict) else {}
