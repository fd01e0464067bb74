"""Read a pickle as data: names in it stay names. Nothing in it is imported, called or given an attribute.

A pickle calls and changes only objects that it names. Here each name becomes a class that keeps its arguments.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

MAX_NAME = 1000  # characters of a tensor's or a file's name
# What Python raises for a damaged pickle.
DAMAGED = (
    pickle.UnpicklingError, ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError,
    TypeError, ValueError,
)  # fmt: skip


class NoData(ValueError):
    """Says what in a pickle is not data, or damaged."""


class Made:
    """What a pickle would have made.

    Attributes:
        of: the name of its class, or of the function that would have been called.
        args: the arguments of that call.
        state: the state that the object would have got; None if there is none.
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

    # The content of other classes of lists and dicts is not needed.
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, item: Any) -> None: ...
    def extend(self, items: Any) -> None: ...


def class_for(name: str) -> type[Made]:
    """Return a class that replaces the object of this name in a pickle. Raises ValueError if it is not a name."""
    return type(name, (Made,), {"of": name})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return class_for(f"{module}.{name}")


def read(data: bytes) -> Any:
    """Return the value of a pickle: numbers, texts, bytes, tuples, lists and dicts, and in them `Made` and their
    classes.

    Raises NoData if it is damaged.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except DAMAGED as error:
        raise NoData(f"{error!s:.200}") from error
