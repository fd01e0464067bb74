"""Check what transformers requires of a custom attention function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Unfit(Exception):
    """A model cannot run in some mode. The text gives the reason, to follow "because"."""


def check_plain(given: Mapping[str, Any]) -> None:
    """Raise Unfit if attention needs more than scaled products and a mask."""
    if given.get("softcap") is not None:
        raise Unfit(f"its attention caps scores (softcap {given['softcap']})")
    if given.get("s_aux") is not None:
        raise Unfit("its attention has sinks")
