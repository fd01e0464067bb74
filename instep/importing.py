"""Imports that take seconds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Import something large in this block: Python does not collect garbage meanwhile, nor looks through it later.

    torch and transformers make a million objects, which all stay: looking through them again and again takes an eighth
    of the time of their import. Enter it once, before there is anything large: cycles that are garbage by its end stay.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
