"""Thousands of hostile pickles are each refused, or read as the data that they are, and nothing else happens."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from instep.checkpoints import inert
from instep.checkpoints.inert import Made, Name, NoData, Ours
from instep.checkpoints.plain import _named
from tests.security import hostile


def honest() -> bytes:
    size = torch.Size((4, 2))
    tensors = {f"w{i}": TensorStorageMetadata(TensorProperties(torch.bfloat16), size, []) for i in range(3)}
    for about in tensors.values():
        about.chunks.append(ChunkStorageMetadata(torch.Size((0, 0)), size))
    places = {MetadataIndex(name, (0, 0), 0): _StorageInfo("__0_0.distcp", 99, 1000) for name in tensors}
    return pickle.dumps(Metadata(dict(tensors), planner_data={"w0": ("w", 0)}, storage_data=places))


class Oracle(pickle.Unpickler):
    """Python's own, whose names are classes that only note what they are given."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return lambda numbers: torch.Size(numbers)
        if (module, name) == ("builtins", "getattr"):
            return lambda owner, member: owner(member)
        if isinstance(found := _named(module, name), torch.dtype):
            return found
        return type(f"{module}.{name}", (Seen,), {})


class Seen:
    def __new__(cls, *args: Any) -> Seen:
        made = object.__new__(cls)
        made.__dict__["seen"] = [args, None]
        return made

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.__dict__["seen"][1] = state


def shape_of(value: Any, depth: int = 0) -> Any:
    """What both readers must agree on."""
    if depth > 50:
        return "deep"
    inner = depth + 1
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [shape_of(v, inner) for v in value]
    if isinstance(value, dict):
        return "dict", [(shape_of(k, inner), shape_of(v, inner)) for k, v in value.items()]
    if isinstance(value, Made) and value.of is None:  # a key that is no plain value
        return shape_of(value.args[0], depth)
    if isinstance(value, Made):
        return str(value.of), shape_of(value.args, inner), shape_of(value.state, inner)
    if isinstance(value, Name):
        return str(value)
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, Ours) or callable(value):
        return "a function of ours"
    if isinstance(value, Seen):
        args, state = value.__dict__["seen"]
        return type(value).__name__, shape_of(args, inner), shape_of(state, inner)
    return repr(value)


def test_what_is_read_is_what_python_itself_would_read() -> None:
    ends: Counter[str] = Counter()
    kinds = (hostile.of_opcodes(), hostile.of_states(), hostile.of_names(), hostile.of_damage(honest(), 2000))
    for content in (honest(), *(one for kind in kinds for one in kind)):
        try:
            value = inert.read(content, _named)
        except NoData:
            ends["refused"] += 1
            continue
        try:
            wanted = Oracle(io.BytesIO(content)).load()
        except Exception as error:  # noqa: BLE001
            ends["python refuses"] += 1
            assert not isinstance(value, Metadata), error
            continue
        assert shape_of(value) == shape_of(wanted), content
        ends["equal"] += 1
    assert ends["refused"] > 15_000 and ends["equal"] > 1_000 and ends["python refuses"] < 600, ends


@pytest.mark.parametrize("content", list(hostile.of_sizes()), ids=lambda content: repr(content[:12]))
def test_a_few_bytes_take_no_memory_and_no_time(content: bytes) -> None:
    try:
        value = inert.read(content, _named)
    except NoData:
        return
    with pytest.raises(NoData):  # nested without end: whoever walks through values is told
        inert.check_plain(value)


@pytest.mark.parametrize(
    ("every", "refused"), [((7, 29), (3_700, 690)), pytest.param((2, 10), (13_000, 2_000), marks=pytest.mark.slow)]
)
def test_nothing_runs_opens_or_changes_while_they_are_read(
    tmp_path: Path, every: tuple[int, int], refused: tuple[int, int]
) -> None:
    """Of the pickles of an index every so many, and of those in a file; the test above reads all, without a file."""
    words = [sys.executable, "-m", "tests.security.read_hostile", str(tmp_path), *map(str, every)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["events"] == [] and found["changed"] == []
    assert set(found["ends"]) == {"index read", "index refused", "file read", "file refused"}, found["ends"]
    assert found["ends"]["index refused"] > refused[0] and found["ends"]["file refused"] > refused[1]
    assert found["megabytes"] < 300
