"""Imports that take seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_import(module: str) -> Iterator[None]:
    """In this block the large `module` is imported, unless it is there: then the block is as any other.

    Python does not collect garbage meanwhile, nor looks through what there is by then later (`gc.freeze`): torch and
    transformers make a million objects, which all stay, and looking through them again and again takes an eighth of the
    time of their import.
    """
    if module in sys.modules:
        yield
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
