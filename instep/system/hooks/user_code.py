"""Errors and values of users' code, and how error texts show them."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from instep.system.hooks.neighbours import packages
from instep.system.run_context import PerRun

T = TypeVar("T")

functions_of_run: PerRun[dict[str, Callable[..., Any]]] = PerRun(dict)  # that `instep.Run` was given, by their paths
_CUT = " ..."  # the end of a shortened text


@functools.cache
def ours() -> tuple[str, ...]:
    """Return how the paths of instep's own files begin."""
    return tuple(f"{Path(__file__).parents[3] / package}{os.sep}" for package in packages())


def is_from_outside(error: BaseException) -> bool:
    """Return whether the error is not the user's: Ctrl-C, a cancellation by the caller, the end of a coroutine."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
        return task is not None and task.cancelling() > 0
    return is_interrupt(error) or isinstance(error, GeneratorExit)


def is_interrupt(error: BaseException) -> bool:
    """Return whether the error is Ctrl-C (or SIGTERM), which only the main thread gets."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def described(value: Any) -> str:
    """Return a value as an error shows it: the value itself if it is short, else its type and length."""
    text = said(value, 80)
    if not text.endswith(_CUT) and "\n" not in text:
        return text
    size = _answer(len, value)
    return f"a {type(value).__name__}" + ("" if size is None else f" of {size}")


def said(value: Any, limit: int = 400) -> str:
    """Return at most the first `limit` characters of `repr(value)`; the type if `__repr__` raises."""
    text = _answer(repr, value)
    if text is None:
        return f"a {type(value).__name__} (its __repr__ raises)"
    return text if len(text) <= limit else text[:limit] + _CUT


def _answer(function: Callable[[Any], T], value: Any) -> T | None:
    """Return what a special method of a user's object returns; None if it raises."""
    try:
        return function(value)
    except BaseException as error:  # the boundary to the user's code
        if is_interrupt(error):
            raise
        return None
