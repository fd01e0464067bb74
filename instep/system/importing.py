"""Imports that take seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_import(module: str) -> Iterator[None]:
    """Import the large `module` in this block; if it is already imported, the block runs as usual.

    Python collects no garbage meanwhile, and later does not search the objects that exist by then (`gc.freeze`). torch
    and transformers make a million objects, which all stay. Searching them again and again takes an eighth of the
    import time.
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
