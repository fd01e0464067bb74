"""Pickles as somebody would write them who wants their reader to run code or to change classes."""

from __future__ import annotations

import pickletools
import random
import struct
from collections.abc import Iterator

# Everything that an index may name, and what a stranger would like to name.
ALLOWED = [
    *(f"torch.distributed.checkpoint.metadata {name}" for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    *(f"torch.distributed.checkpoint.filesystem {name}" for name in ("_StorageInfo", "_StoragePrefix")),
    *(f"torch.distributed.checkpoint.planner {name}" for name in (
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
    *(f"torch.distributed._shard.sharded_tensor.metadata {name}" for name in (
        "MEM_FORMAT_ENCODING", "TensorProperties")),
    "collections OrderedDict", "pathlib Path", "pathlib PosixPath", "pathlib PurePosixPath", "torch Size",
    "torch device", "torch float32", "torch bfloat16", "torch.serialization _get_layout", "builtins getattr",
]  # fmt: skip
FORBIDDEN = [
    "builtins exec", "builtins eval", "os system", "posix system", "nt system", "subprocess Popen", "builtins setattr",
    "torch load", "torch.hub load", "torch.distributed.checkpoint.filesystem os", "pathlib os", "shutil rmtree",
    "builtins __import__", "functools partial", "operator attrgetter", "torch.distributed.checkpoint.metadata os",
    "torch.distributed.checkpoint.metadata Metadata.__init__.__globals__", "pathlib Path.home",
    "torch.distributed.checkpoint.planner reduce",
]  # fmt: skip
ENUMS = [name for name in ALLOWED if "ENCODING" in name or "Type" in name.split()[1][-4:]]
ATTRIBUTES = (
    *("_member_map_", "_value2member_map_", "__members__", "__setstate__", "__reduce__", "__class__", "__dict__"),
    *("__fspath__", "__truediv__", "__init__", "__new__", "__hash__", "__eq__", "parent", "name", "_flavour", "x"),
)


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def named(where: str, early: bool = True) -> bytes:
    module, name = where.split(" ", 1)
    return f"c{module}\n{name}\n".encode() if early else text(module) + text(name) + b"\x93"


def member(enum: str, name: str, call: bool) -> bytes:
    """A member of an enum as Python 3.11.2 writes it, by getattr; or else by its value."""
    return named("builtins getattr") + named(enum) + text(name) + b"\x86R" if call else named(enum) + b"K\0\x85R"


def slots(attribute: str, value: bytes) -> bytes:
    """The state that pickle sets by `setattr`."""
    return b"N}" + text(attribute) + value + b"s\x86"


def of_opcodes() -> Iterator[bytes]:
    """Every opcode of pickle on every name, with operands of several kinds below it."""
    below = [b"", b")", b"}", text("x"), slots("x", b"N"), b"(K\1K\2", b"]", b"(" + text("x") + b"N"]
    for where in ALLOWED + FORBIDDEN[:1]:
        for opcode in pickletools.opcodes:
            for operands in below:
                argument = {None: b"", "uint1": b"\0", "uint2": b"\0\0", "int4": b"\0\0\0\0", "uint4": b"\0\0\0\0"}
                kind = opcode.arg.name if opcode.arg else None
                raw = argument.get(kind, b"\0\0\0\0\0\0\0\0" if kind and "8" in kind else b"0\n0\n")
                yield b"\x80\4" + named(where) + operands + opcode.code.encode("latin1") + raw + b"."


def of_states() -> Iterator[bytes]:
    """BUILD with the state of slots, on classes, on what they make, and on data."""
    targets = [named(where) for where in ALLOWED]
    targets += [named(where) + b")\x81" for where in ALLOWED] + [named(where) + b")R" for where in ALLOWED]
    targets += [member(enum, "TENSOR", call) for enum in ENUMS for call in (True, False)]
    targets += [b"]", b"}", b")", b"K\1", b"N", text("x"), named("torch Size") + b")\x85R"]
    for target in targets:
        for attribute in ATTRIBUTES:
            for value in (b"}", named("pathlib Path"), named(ENUMS[0])):
                yield b"\x80\4" + target + slots(attribute, value) + b"b."
                yield b"\x80\4" + target + b"}" + text(attribute) + value + b"sb."


def of_names() -> Iterator[bytes]:
    for where in FORBIDDEN:
        for early in (True, False):
            for call in (b"", b")R", b")\x81", text("echo") + b"\x85R", b")}\x92", b")R}b"):
                yield b"\x80\4" + named(where, early) + call + b"."
    for owner in ALLOWED:
        for attribute in ("mro", "__init__", "__globals__", "__subclasses__", "TENSOR", "1", ""):
            yield b"\x80\4" + named("builtins getattr") + named(owner) + text(attribute) + b"\x86R."


def of_damage(honest: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """An honest pickle with bytes changed, left out, put in and moved."""
    draw = random.Random(seed)
    for _ in range(count):
        data = bytearray(honest)
        for _ in range(draw.choice((1, 1, 2, 4))):
            at, kind = draw.randrange(len(data)), draw.randrange(4)
            if kind == 0:
                data[at] = draw.randrange(256)
            elif kind == 1:
                del data[at : at + draw.randrange(1, 9)]
            elif kind == 2:
                data[at:at] = draw.choice(pickletools.opcodes).code.encode("latin1")
            else:
                start = draw.randrange(len(data))
                data[at:at] = data[start : start + draw.randrange(1, 60)]
        yield bytes(data)


def all_of(honest: bytes) -> Iterator[bytes]:
    yield from of_opcodes()
    yield from of_states()
    yield from of_names()
    yield from of_damage(honest, 3000)
