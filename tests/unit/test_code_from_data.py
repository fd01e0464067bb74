"""A checkpoint is data: code that one names, or brings along, does not run unless the user asks for it."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import random
from collections import defaultdict, deque
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from instep.checkpoints.dist_checkpoint import METADATA, load_tensors, random_state, read_index, set_random_state
from instep.checkpoints.safe_pickle import Made
from instep.checkpoints.torch_files import load_data
from instep.data.tokenizer import load_tokenizer
from instep.errors import CheckpointError
from tests.assets import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Evil:
    """What a stranger's pickle holds: to load it is to run a function on a name."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.fixture
def trace(tmp_path):
    return tmp_path / "was-here"


def load(state, folder):
    load_tensors(state, folder, read_index(folder))


def test_an_index_with_plans_of_ranks_and_of_older_versions_is_data(tmp_path):
    """As Megatron writes them: with the plans that its ranks have written by; with classes of torch before 2.3."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as Older
    from torch.distributed.checkpoint.planner_helpers import _create_write_items

    folder, state = tmp_path / "c", {"w": torch.randn(3), "extra": io.BytesIO(b"te")}
    dcp.save(state, checkpoint_id=folder)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    items = [item for name, value in state.items() for item in _create_write_items(name, value)]
    plan = SavePlan(items, storage_data=_StoragePrefix("__0_"), planner_data={"w": ("w",)})
    metadata.all_local_plans, metadata.older = [plan], Older()
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    out = {"w": torch.zeros(3)}
    load(out, folder)
    assert torch.equal(out["w"], state["w"])
    metadata.all_local_plans.append(Evil(tmp_path / "was-here"))
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    load(out, folder)
    assert torch.equal(out["w"], state["w"]) and not (tmp_path / "was-here").exists()


class EarlyPython(pickle.Pickler):
    """Writes members of enums as the first releases of Python 3.11 do: by `getattr`."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def written_early(content):
    file = io.BytesIO()
    EarlyPython(file).dump(content)
    return file.getvalue()


def test_an_index_that_an_early_python_3_11_has_written_is_data(tmp_path):
    state = {"w": torch.randn(3)}
    dcp.save(state, checkpoint_id=tmp_path)
    written = written_early(pickle.loads((tmp_path / METADATA).read_bytes()))
    assert b"getattr" in written
    (tmp_path / METADATA).write_bytes(written)
    out = {"w": torch.zeros(3)}
    load(out, tmp_path)
    assert torch.equal(out["w"], state["w"])


@pytest.mark.parametrize("owner, name", [(torch.Size, "count"), (_StoragePrefix, "__init__"), (Metadata, "mro")])
def test_an_index_that_is_an_attribute_of_a_class_is_refused(tmp_path, owner, name):
    class Asks:
        def __reduce__(self):
            return getattr, (owner, name)

    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    (tmp_path / METADATA).write_bytes(pickle.dumps(Asks()))
    with pytest.raises(CheckpointError, match="not the index of a checkpoint"):
        read_index(tmp_path)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/b", "..", ".", ""])
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path, name):
    index = Metadata({}, storage_data={MetadataIndex("w"): _StorageInfo(name, 0, 0)})
    (tmp_path / METADATA).write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"it names the file '.*', which is not in its folder"):
        read_index(tmp_path)


def test_an_index_that_names_a_function_is_refused(tmp_path, trace):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    (tmp_path / "c" / METADATA).write_bytes(pickle.dumps(Evil(trace)))
    with pytest.raises(CheckpointError, match="not the index of a checkpoint"):
        read_index(tmp_path / "c")
    assert not trace.exists()


@pytest.mark.parametrize("name", ["_generate_uuid", "os", "pickle"])
def test_an_index_that_is_a_name_is_refused(tmp_path, name):
    module = "torch.distributed.checkpoint.filesystem"
    (tmp_path / METADATA).write_bytes(b"c" + f"{module}\n{name}\n".encode() + b".")  # a pickle that is that object
    with pytest.raises(CheckpointError, match="not the index of a checkpoint"):
        read_index(tmp_path)


def test_the_index_of_a_rank_is_not_read_in_place_of_a_broken_one(tmp_path, trace):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    (tmp_path / "c" / METADATA).write_bytes(pickle.dumps(None))
    (tmp_path / "c" / "__0.metadata").write_bytes(pickle.dumps(Evil(trace)))
    with pytest.raises(CheckpointError, match="not the index of a checkpoint"):
        load({"w": torch.zeros(2)}, tmp_path / "c")
    assert not trace.exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(None), pickle.dumps(Metadata({}))[:-9]])
def test_an_index_that_is_none_is_named(tmp_path, content):
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(CheckpointError, match="not the index of a checkpoint"):
        read_index(tmp_path)


def test_an_entry_that_is_no_tensor_runs_nothing(tmp_path, trace):
    """The index is honest: where a tensor is looked for there is an object."""
    dcp.save({"model": {"w": Evil(trace)}}, checkpoint_id=tmp_path / "c")
    trace.unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="model.w is not a tensor"):
        load({"model": {"w": torch.zeros(2)}}, tmp_path / "c")
    assert not trace.exists()


def test_an_honest_checkpoint_is_read(tmp_path):
    state = {"model": {"w": torch.randn(3, 2), "b": torch.ones(4, dtype=torch.bfloat16)}, "step": torch.tensor(3)}
    dcp.save(state, checkpoint_id=tmp_path / "c")
    out = {"model": {"w": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16)}, "step": torch.tensor(0)}
    load(out, tmp_path / "c")
    assert torch.equal(out["model"]["w"], state["model"]["w"]) and out["step"] == 3


def test_what_is_no_data_is_left_out_and_never_called(tmp_path, trace):
    """As Megatron's arguments, which name classes of whoever wrote them."""
    state = {"step": 3, "args": argparse.Namespace(hook=find_spec), "w": torch.randn(2)}
    torch.save(state, tmp_path / "a.pt")
    read = load_data(tmp_path / "a.pt")
    assert read["step"] == 3 and torch.equal(read["w"], state["w"]) and isinstance(read["args"], Made)
    torch.save({"evil": Evil(trace)}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match=r"b\.pt cannot be read"):
        load_data(tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes(b"no file of torch's")
    with pytest.raises(CheckpointError, match=r"c\.pt cannot be read"):
        load_data(tmp_path / "c.pt")
    assert not trace.exists()


def test_containers_of_the_standard_library_keep_what_they_hold(tmp_path):
    sizes = argparse.Namespace(counts=defaultdict(int, {"a": 1}), last=deque([2, 3], maxlen=4))
    torch.save({"counts": sizes.counts, "last": sizes.last, "args": sizes, "w": torch.ones(2)}, tmp_path / "a.pt")
    read = load_data(tmp_path / "a.pt")
    assert read["counts"] == {"a": 1} and read["last"] == [2, 3] and torch.equal(read["w"], torch.ones(2))
    assert read["args"].state["counts"] == {"a": 1}


def test_random_states_are_plain_and_exact(tmp_path):
    random.gauss(0, 1), np.random.normal()
    torch.save(random_state(), tmp_path / "rng.pt")

    def drawn():
        return [random.random(), random.gauss(0, 1), *np.random.normal(size=3), *torch.rand(3).tolist()]

    expected = drawn()
    torch.manual_seed(9), random.seed(9), np.random.seed(9)
    assert drawn() != expected
    set_random_state(tmp_path / "rng.pt")
    assert drawn() == expected


@pytest.mark.parametrize("generator", ["torch", "numpy"])
def test_a_generator_at_a_place_that_it_does_not_have_is_refused(tmp_path, generator):
    """Its library would read beyond its words."""
    state = random_state()
    if generator == "numpy":
        state["numpy"][1] = 625
    else:
        state["torch"] = state["torch"].clone()
        state["torch"][8:12].view(torch.int32)[0] = 624
        state["torch"][16:24].view(torch.int64)[0] = 2
    torch.save(state, tmp_path / "rng.pt")
    with pytest.raises(CheckpointError, match="random state cannot be read"):
        set_random_state(tmp_path / "rng.pt")


def test_a_random_state_that_is_code_is_refused(tmp_path, trace):
    torch.save({"torch": torch.get_rng_state(), "python": Evil(trace)}, tmp_path / "rng.pt")
    trace.unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="rng.pt cannot be read: Trying to call reduce for unrecognized"):
        set_random_state(tmp_path / "rng.pt")
    assert not trace.exists()


@pytest.fixture
def coded(tmp_path, trace, monkeypatch):
    """A checkpoint whose tokenizer is a class of its own, in a file beside it."""
    folder = make_checkpoint(tmp_path / "coded")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "own.py").write_text(
        f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n"
        "from transformers import PretrainedConfig, PreTrainedTokenizerFast\n\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n\nclass OwnConfig(PretrainedConfig):\n    model_type = 'own'\n"
    )
    for name, more in {
        "tokenizer_config.json": {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}},
        "config.json": {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}},
    }.items():
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **more}))
    return folder


def test_a_tokenizer_that_is_code_is_refused_and_the_error_names_the_flag(coded, trace):
    with pytest.raises(CheckpointError, match="the tokenizer is Python code") as caught:
        load_tokenizer(str(coded), False)
    assert "--trust-remote-code" in caught.value.remedy and caught.value.where == str(coded) and not trace.exists()
    assert type(load_tokenizer(str(coded), True)).__name__ == "Own" and trace.exists()
