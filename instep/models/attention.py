"""What attention computes beside queries, keys and values, as transformers hands it to an attention of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Unfit(Exception):
    """A model cannot be run in a certain way; the text says why, and goes on after "because"."""


def check_plain(given: Mapping[str, Any]) -> None:
    """Raise Unfit where the scores are more than scaled products with a mask."""
    if given.get("softcap") is not None:
        raise Unfit(f"its attention caps scores (softcap {given['softcap']})")
    if given.get("s_aux") is not None:
        raise Unfit("its attention has sinks")
