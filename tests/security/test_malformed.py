"""Checkpoints as others write them, wrong in a hundred ways: one error each, at once, and without much memory."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from instep.checkpoints.adapter import TENSORS, read_adapter
from instep.checkpoints.convert import _shape
from instep.checkpoints.dist_checkpoint import load_tensors, read_index
from instep.checkpoints.megatron import MegatronCheckpoint, _steps
from instep.checkpoints.megatron_files import full_shape
from instep.checkpoints.torch_files import load_data
from instep.cli import main
from instep.errors import CheckpointError
from tests.distributed.megatron_layouts import MODELS, random_model
from tests.security import malformed

# Nothing of them is read by this conversion; or it is kept as it is, bit by bit.
HARMLESS = {"weights of another type", "a number for the text's config"}
CASES = [pytest.param(kind, damage, name, id=f"{kind}: {name}") for kind, name, damage in malformed.all_of()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    random_model(MODELS["untied"]).save_pretrained(root / "hf")
    (root / "hf" / "tokenizer.json").write_text("{}")
    words = ["--hf-checkpoint", str(root / "hf"), "--save", str(root / "torch_dist")]
    assert main(["convert", "hf-to-megatron", *words]) == 0
    there = MegatronCheckpoint(root / "torch_dist" / "release", _shape(root / "hf", False))
    weights = {entry.megatron: there.local(entry, 0, 1, full_shape(entry)[0]).clone() for entry in there.entries}
    rank = root / "torch" / "iter_0000001" / "mp_rank_00"
    rank.mkdir(parents=True)
    torch.save({"model": weights, "iteration": 1}, rank / "model_optim_rng.pt")
    (root / "torch" / "latest_checkpointed_iteration.txt").write_text("1")
    return root


@pytest.fixture
def bounded() -> Iterator[None]:
    def late(*_: object) -> None:
        pytest.fail("it waits for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("kind", "damage", "name"), CASES)
def test_one_error_each(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], bounded: None, kind: str, damage: malformed.Damage,
    name: str,
) -> None:  # fmt: skip
    for part in ("hf", kind):
        shutil.copytree(whole / part, tmp_path / part, dirs_exist_ok=True)
    place = {"hf": "hf", "torch": "torch/iter_0000001", "torch_dist": "torch_dist/release"}[kind]
    damage(tmp_path / place)
    hf, memory = ["--hf-checkpoint", str(tmp_path / "hf")], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = ["hf-to-megatron", *hf] if kind == "hf" else ["megatron-to-hf", "--load", str(tmp_path / kind), *hf]
    capsys.readouterr()
    code = main(["convert", *words, "--save", str(tmp_path / "new")])
    said = capsys.readouterr().err
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) // 1024
    assert grown < 300, f"{grown} MiB more"
    if name in HARMLESS:
        return
    assert code in (1, 2) and said.startswith(("CheckpointError: ", "ConfigError: ")), said
    assert "  where:" in said and "  remedy:" in said and "Traceback" not in said
    assert not (tmp_path / "new").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", malformed.TORCH_DIST)
def test_a_checkpoint_of_torch_gives_its_tensors_or_one_error(tmp_path: Path, bounded: None, name: str) -> None:
    """As `--load` reads it with the backend `hf`."""
    folder, saved = tmp_path / "a" / "b", {malformed.QKV: torch.randn(6, 4), "scalar": torch.tensor(2.0)}
    dcp.save(saved, checkpoint_id=folder)
    (folder / "metadata.json").write_text("{}")
    malformed.TORCH_DIST[name](folder)
    read = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    try:
        load_tensors(read, folder, read_index(folder))
    except CheckpointError as error:
        assert error.remedy and len(error.what) < 1000
    else:
        assert all(torch.equal(read[key], saved[key]) for key in saved)


@pytest.mark.parametrize("name", ["a", "a" * 1001, "a\x1b[2J"])
@pytest.mark.parametrize("shape", [[0, 2**63], [2**32, 0, 2**32], [1] * 64 + [0], [0, 2**62]])
def test_a_weight_has_a_shape_and_a_name_that_a_tensor_can_have(tmp_path: Path, name: str, shape: list[int]) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / TENSORS).write_bytes(struct.pack("<Q", len(header)) + header)
    if name == "a" and shape == [0, 2**62]:
        assert [*read_adapter(tmp_path)] == ["a"]
        return
    wrong = "a has the shape .*, which no tensor can have" if name == "a" else "the name of a tensor is not a text"
    with pytest.raises(CheckpointError, match=wrong) as caught:
        read_adapter(tmp_path)
    assert len(caught.value.what) < 200


def test_what_contains_itself_is_looked_through_once(tmp_path: Path, bounded: None) -> None:
    groups: list[object] = [{"step": 3}]
    for _ in range(60):
        groups = [*groups, groups, groups]  # 2 ** 60 steps, if each is counted
    groups[1:1] = [groups]
    torch.save({"optimizer": groups}, tmp_path / "common.pt")
    assert set(_steps(load_data(tmp_path / "common.pt"), set())) == {3.0}
