"""Reads a pickle as data: what it names stays a name, and nothing of it is imported, called or given an attribute.

A pickle calls and changes only what it names. Each name becomes a class here that keeps what it is given.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

MAX_NAME = 1000  # characters of a tensor's or a file's name
# What Python raises for a pickle that is damaged.
DAMAGED = (
    pickle.UnpicklingError, ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError,
    TypeError, ValueError,
)  # fmt: skip


class NoData(ValueError):
    """Says what in a pickle is no data, or damaged."""


class Made:
    """What a pickle would have made.

    Attributes:
        of: the name of its class, or of the function that would have been called.
        args: with which it would have been called.
        state: what it would have been given; None: nothing.
    """

    of = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> Made:
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    # Of lists and dicts of other classes nothing is needed.
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, item: Any) -> None: ...
    def extend(self, items: Any) -> None: ...


def class_for(name: str) -> type[Made]:
    """A class in the place of what a pickle names so. Raises ValueError: it is no name."""
    return type(name, (Made,), {"of": name})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return class_for(f"{module}.{name}")


def read(data: bytes) -> Any:
    """The value of a pickle: numbers, texts, bytes, tuples, lists and dicts, and in them `Made` and their classes.

    Raises NoData: it is damaged.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except DAMAGED as error:
        raise NoData(f"{error!s:.200}") from error
