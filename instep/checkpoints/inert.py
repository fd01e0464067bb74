"""Reads a pickle as data: what it names stays a name, and nothing is imported, called or asked for an attribute.

A pickle is a program for a machine with a stack (`pickletools` explains its opcodes). The machine here knows those that
data is written with, and refuses the others. What a pickle would make by a call becomes a `Made`, which says what would
be called. Where the result is needed, a function of ours (`Ours`) is called instead.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from typing import Any

MAX_BYTES = 512 * 2**20  # of a pickle; a million chunks of tensors in an index have 160 MB and 73 million opcodes
MAX_STEPS = 10**8  # opcodes, each of which may make an empty dict or a tuple of one: 7.5 GB of memory
MAX_KEY = 2**32  # larger integers can be chosen to collide, so that a dict of them takes for ever
MAX_DEPTH, MAX_VALUES = 100, 10**8  # of `check_plain`
MAX_DIMENSIONS, MAX_SIZE, MAX_NAME = 64, 2**62, 1000  # of a tensor; the last in characters


class NoData(ValueError):
    """Says what in a pickle is no data, or damaged."""


class Name:
    """What a pickle names: a class or a function, which stays unknown to Python."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str):
        self.module, self.name = module, name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Made:
    """What a pickle would have made: of which name, by which arguments, with which state."""

    __slots__ = ("args", "of", "state")

    def __init__(self, of: Name | None, args: tuple[Any, ...]):
        self.of, self.args, self.state = of, args, None


class Ours:
    """Our own function in the place of the one that a pickle names; it checks the arguments that it is given."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[tuple[Any, ...]], Any]):
        self.call = call


Names = Callable[[str, str], Any]  # a module and a name -> a `Name`, an `Ours` or a constant; raises NoData


def check_size(num_bytes: int, most: int = MAX_BYTES) -> None:
    """Refuse a pickle of so many bytes before it is read. Raises NoData."""
    if num_bytes > most:
        raise NoData(f"it has {num_bytes:,} bytes, more than {most:,}")


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Collect no garbage: many values are made in this block, and looking through them takes as long as making them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def read(data: bytes, names: Names, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The value of a pickle: numbers, texts, bytes, tuples, lists and dicts, and in them `Name`, `Made` and constants.

    A dict's key that is no plain value becomes a `Made`, which equals nothing else.

    Args:
        persistent: makes what the pickle has left outside (BINPERSID).

    Raises:
        NoData: it has an opcode or a name that no data needs, or is cut off.
    """
    try:
        with collecting_nothing():
            return _Machine(data, names, persistent).run()
    except (IndexError, struct.error) as error:
        raise NoData("it ends too early, or takes from an empty stack") from error
    except UnicodeDecodeError as error:
        raise NoData("a text in it is none") from error


class _Machine:
    def __init__(self, data: bytes, names: Names, persistent: Callable[[Any], Any] | None):
        self.data, self.pos = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []  # where on the stack a mark is
        self.memo: list[Any] = []
        self.named: dict[tuple[str, str], Any] = {}
        self.names, self.persistent = names, persistent

    def run(self) -> Any:
        """Go through the opcodes. The frequent ones are here, the most frequent first."""
        data, pos, stack, marks, memo = self.data, 0, self.stack, self.marks, self.memo
        push, pop, memoize, rare = stack.append, stack.pop, memo.append, _RARE
        for _ in repeat(None, MAX_STEPS):
            op = data[pos]
            pos += 1
            if op == 0x94:  # MEMOIZE
                memoize(stack[-1])
            elif op == 0x68:  # BINGET
                push(memo[data[pos]])
                pos += 1
            elif op == 0x6A:  # LONG_BINGET
                push(memo[int.from_bytes(data[pos : pos + 4], "little")])
                pos += 4
            elif op == 0x28:  # MARK
                marks.append(len(stack))
            elif op == 0x29:  # EMPTY_TUPLE
                push(())
            elif op == 0x4B:  # BININT1
                push(data[pos])
                pos += 1
            elif op in (0x81, 0x52):  # NEWOBJ, REDUCE
                args = pop()
                stack[-1] = _made(stack[-1], args)
            elif op == 0x62:  # BUILD
                state = pop()
                if type(made := stack[-1]) is Made and made.state is None:
                    made.state = state
                elif type(made) is not dict:  # an OrderedDict may have attributes: a state_dict's _metadata
                    raise NoData("it changes what it has not made")
            elif op == 0x86:  # TUPLE2
                last = pop()
                stack[-1] = (stack[-1], last)
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x75:  # SETITEMS
                items = self.above_mark()
                _set_items(stack[-1], items[::2], items[1::2])
            elif op == 0x7D:  # EMPTY_DICT
                push({})
            elif op == 0x4D:  # BININT2
                push(int.from_bytes(data[pos : pos + 2], "little"))
                pos += 2
            elif op == 0x8C:  # SHORT_BINUNICODE
                start = pos + 1
                pos = start + data[pos]
                push(data[start:pos].decode("utf-8", "surrogatepass"))
            elif (step := rare.get(op)) is not None:
                self.pos = pos
                step(self)
                pos = self.pos
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or marks or pos != len(data):
                    raise NoData("it goes on after its end, or leaves something open")
                return stack[0]
            else:
                raise NoData(f"it has the opcode {bytes([op])!r}, which no data needs")
        raise NoData(f"it has more than {MAX_STEPS:,} opcodes")

    def above_mark(self) -> list[Any]:
        """Take what lies above the last mark."""
        start = self.marks.pop()
        if start > len(self.stack):
            raise NoData("it takes from below a mark")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def take(self, count: int) -> bytes:
        start, self.pos = self.pos, self.pos + count
        if self.pos > len(self.data):
            raise NoData(f"it says that {count:,} bytes follow, and there are {len(self.data) - start:,}")
        return self.data[start : self.pos]

    def number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def line(self) -> str:
        end = self.data.find(b"\n", self.pos, self.pos + 1000)
        if end < 0:
            raise NoData("a name in it has no end")
        return self.take(end + 1 - self.pos)[:-1].decode("utf-8")

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise NoData("a name in it is no text")
        if (module, name) not in self.named:
            self.named[module, name] = self.names(module, name)
        self.stack.append(self.named[module, name])

    def put(self, index: int) -> None:
        if index > len(self.memo):  # picklers count up; room for any other number may be more than there is
            raise NoData(f"it remembers something as number {index:,} that is number {len(self.memo):,}")
        self.memo[index : index + 1] = [self.stack[-1]]

    def stack_global(self) -> None:
        name = self.stack.pop()
        self.name(self.stack.pop(), name)

    def tuple3(self) -> None:
        last, middle = self.stack.pop(), self.stack.pop()
        self.stack[-1] = (self.stack[-1], middle, last)

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is not Made:  # a list of another class, of which nothing is needed
            raise NoData("it appends to what is no list")

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _set_items(self.stack[-1], [key], [value])

    def frame(self) -> None:
        size = self.number(8)
        if size > len(self.data) - self.pos:
            raise NoData(f"it says that {size:,} bytes follow, and there are {len(self.data) - self.pos:,}")

    def outside(self) -> None:
        if self.persistent is None:
            raise NoData("it names something outside of it")
        self.stack[-1] = self.persistent(self.stack[-1])


def _made(of: Any, args: Any) -> Any:
    if type(args) is not tuple:
        raise NoData("arguments in it are no tuple")
    if type(of) is Name:
        return Made(of, args)
    if type(of) is Ours:
        return of.call(args)
    raise NoData("it calls what is no name")


def _set_items(target: Any, keys: list[Any], values: list[Any]) -> None:
    if len(keys) != len(values):
        raise NoData("a key in it has no value")
    if type(target) is dict:
        if set(map(type, keys)) - _KEYS:
            keys = [_key(key) for key in keys]
        target.update(zip(keys, values, strict=True))
    elif type(target) is not Made:  # a dict of another class, of which nothing is needed
        raise NoData("it sets items of what is no dict")


def _key(key: Any) -> Any:
    """The key itself, or what equals nothing else: tuples may be nested so deep that their hash ends the process."""
    plain = type(key) in _KEYS or type(key) in (bool, float, type(None)) or (type(key) is int and abs(key) < MAX_KEY)
    return key if plain else Made(None, (key,))


_KEYS = {str, Made}
_RARE: Mapping[int, Callable[[_Machine], None]] = {
    ord(op): step
    for op, step in {
        "\x80": lambda m: m.take(1),  # PROTO
        "\x95": _Machine.frame,
        "c": lambda m: m.name(m.line(), m.line()),  # GLOBAL
        "\x93": _Machine.stack_global,
        "N": lambda m: m.stack.append(None),
        "\x88": lambda m: m.stack.append(True),
        "\x89": lambda m: m.stack.append(False),
        "J": lambda m: m.stack.append(m.number(4, signed=True)),  # BININT
        "\x8a": lambda m: m.stack.append(m.number(m.number(1), signed=True)),  # LONG1
        "G": lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),  # BINFLOAT
        "X": lambda m: m.stack.append(m.take(m.number(4)).decode("utf-8", "surrogatepass")),  # BINUNICODE
        "C": lambda m: m.stack.append(m.take(m.number(1))),  # SHORT_BINBYTES
        "B": lambda m: m.stack.append(m.take(m.number(4))),  # BINBYTES
        "t": lambda m: m.stack.append(tuple(m.above_mark())),
        "\x87": _Machine.tuple3,
        "]": lambda m: m.stack.append([]),
        "a": lambda m: m.append([m.stack.pop()]),
        "e": lambda m: m.append(m.above_mark()),
        "s": _Machine.set_item,
        "q": lambda m: m.put(m.number(1)),  # BINPUT
        "r": lambda m: m.put(m.number(4)),  # LONG_BINPUT
        "Q": _Machine.outside,  # BINPERSID
    }.items()
}  # fmt: skip


def check_plain(value: Any) -> None:
    """Refuse what others cannot walk through: what contains itself, is nested too deep, or holds a `Made`.

    Raises:
        NoData: it does, or it holds too many values, each counted as often as it stands there.
    """
    sizes: dict[int, int] = {}  # of lists, tuples and dicts that have been gone through, with all in them
    open_now: set[int] = set()
    level: list[tuple[Any, list[Any]]] = [([value], [value])]  # a container, and what is to be seen of it
    while level:
        container, left = level[-1]
        while left:
            inner = left[-1]
            if type(inner) in (Made, Name, Ours):
                raise NoData(f"it holds {getattr(inner, 'of', None) or 'something'}, which is no data")
            if type(inner) not in (list, tuple, dict) or id(inner) in sizes:
                left.pop()
                continue
            if id(inner) in open_now or len(level) > MAX_DEPTH:
                raise NoData(f"it is nested more than {MAX_DEPTH} levels deep")
            open_now.add(id(inner))
            level.append((inner, [*inner, *inner.values()] if type(inner) is dict else list(inner)))
            break
        else:
            level.pop()
            values = container.values() if type(container) is dict else container
            sizes[id(container)] = size = 1 + sum(sizes.get(id(v), 1) for v in values)
            open_now.discard(id(container))
            if size > MAX_VALUES:
                raise NoData(f"it holds more than {MAX_VALUES:,} values")
