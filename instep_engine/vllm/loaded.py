"""The adapter that `/lora/load` (`atropos.py`) has loaded; it serves requests that name none."""

from typing import Any


class Loaded:
    """Of this server: `request` is vLLM's, None without one; `count` is of all loads."""

    request: Any = None
    count = 0
