"""Checkpoints that ran code, or wrote where they liked, when they were loaded: both change classes."""

from __future__ import annotations

import contextlib
import io
import pickle
from pathlib import Path, PosixPath

import torch.distributed.checkpoint as dcp

from instep.checkpoints.dist_checkpoint import METADATA
from instep.errors import CheckpointError
from tests.assets import make_prompts
from tests.distributed.helpers import RankPool
from tests.distributed.megatron_layouts import MODELS, random_model
from tests.security.hostile import named, slots, text
from tests.unit.test_other_checkpoints import worker

ENUM = named("torch.distributed.checkpoint.planner WriteItemType")
METADATA_CLASS = named("torch.distributed.checkpoint.metadata Metadata")


def index_with(planned: bytes) -> bytes:
    """An index without tensors, in which the opcodes `planned` make the data of a planner."""
    fields = b"(" + text("state_dict_metadata") + b"}" + text("storage_data") + b"}" + text("planner_data") + planned
    return b"\x80\4" + METADATA_CLASS + b")\x81}" + fields + b"ub."


def asks(owner: bytes, name: str) -> bytes:
    return named("builtins getattr") + owner + text(name) + b"\x86R"


def by_enums(code: str) -> bytes:
    """Code that runs when torch reads the index again: while it is checked, every attribute is the enum itself.

    In Python the attributes lead from the function `__new__` to `exec`, by the names that the module `enum` knows.
    """
    same = b"}(" + b"".join(text(name) + ENUM for name in ("__new__", "__globals__", "get", "exec")) + b"u"
    values = b"}(" + b"".join(text(name) + ENUM for name in ("bltns", code)) + b"u"
    changed = ENUM + b"N}" + text("_member_map_") + same + b"s\x86b"
    changed += b"N}" + text("_value2member_map_") + values + b"s\x86b"
    found = asks(asks(asks(ENUM, "__new__"), "__globals__"), "get") + text("bltns") + b"\x85R"
    return index_with(b"]" + changed + b"a" + asks(found, "exec") + text(code) + b"\x85Ra")


def loads(folder: Path) -> str:
    """The error of a worker that loads the checkpoint."""
    try:
        worker(folder, "hf", folder).load(folder / "iter_0000000", False)
    except CheckpointError as error:
        return error.what
    return ""


def converts(words: list[str]) -> tuple[int, str, bool]:
    """The exit code of a conversion, what it says, and whether a class has changed."""
    from instep.cli import main

    before = dict(vars(PosixPath))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(["convert", "megatron-to-hf", *words])
    return code, said.getvalue(), dict(vars(PosixPath)) != before


def test_an_enum_whose_members_are_replaced_runs_nothing(tmp_path: Path) -> None:
    make_prompts(tmp_path / "train.jsonl", 2)
    folder, trace = tmp_path / "iter_0000000", tmp_path / "was-here"
    dcp.save({}, checkpoint_id=folder)
    (folder / METADATA).write_bytes(by_enums(f"open({str(trace)!r}, 'w').close()"))
    with RankPool(1, group=False) as process:
        (what,) = process.run(loads, tmp_path)
    assert not trace.exists(), "the checkpoint has run code"
    assert what.startswith(".metadata is not the index"), what


def test_a_path_class_that_is_changed_changes_no_path(tmp_path: Path) -> None:
    """Pickle's BUILD would set an attribute of the class: all paths of the conversion would have another parent."""
    random_model(MODELS["untied"]).save_pretrained(tmp_path / "hf")
    words = ["--hf-checkpoint", str(tmp_path / "hf"), "--save", str(tmp_path / "m")]
    from instep.cli import main

    assert main(["convert", "hf-to-megatron", *words]) == 0
    place = tmp_path / "m" / "release" / METADATA
    content = pickle.loads(place.read_bytes())  # of our own
    content.planner_data = "PLANNED"
    raw = pickle.dumps(content, protocol=3)  # without frames, which count bytes
    changed = b"]" + named("pathlib PosixPath") + slots("name", text("elsewhere")) + b"ba"
    memo = raw.index(text("PLANNED")) + len(text("PLANNED"))
    assert raw[memo : memo + 1] in (b"q", b"r")
    place.write_bytes(raw.replace(text("PLANNED"), changed))
    words = ["--hf-checkpoint", str(tmp_path / "hf"), "--save", str(tmp_path / "new"), "--load", str(tmp_path / "m")]
    with RankPool(1, group=False) as process:
        ((code, said, changed),) = process.run(converts, words)
    assert not changed, "a class has changed"
    assert code == 1 and "CheckpointError: .metadata is not the index" in said, said
    assert "Traceback" not in said and not (tmp_path / "new").exists()
