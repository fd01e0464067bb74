"""A checkpoint whose bytes have changed is an error that names the file, never a run that goes on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from instep.arguments.args import Args
from instep.checkpoints.folders import read_state
from instep.checkpoints.integrity import check_whole
from instep.controller.round_metrics import evaluation_summary
from instep.controller.run_state import beginning, data_state, restore_data
from instep.data.ledger import Ledger, LedgeredDataSource
from instep.errors import CheckpointError, InstepError
from instep.types import VersionSpan
from tests.checkpoints import save_checkpoint
from tests.unit.test_data import rows, write
from tests.unit.test_data_source import source

NUM_FLIPS = 300
ARGS = Args(
    command="train",
    rollout_seed=42,
    deterministic_mode=False,
    ckpt_step=None,
    finetune=False,
    no_load_optim=True,
    start_rollout_id=None,
    load=None,
    run_dir="nowhere",
)


def going_on(root: Path) -> Args:
    return ARGS.replace(load=str(root))


@pytest.fixture
def saved(tmp_path) -> tuple[Path, str]:
    """A checkpoint with buffered, outstanding and consumed groups; and its data file."""
    path = str(write(tmp_path / "data.jsonl", rows(8)))
    data = LedgeredDataSource(source(path, rollout_shuffle=True), Ledger())
    kept, begun, *others = data.of_round(0).get_samples(5)
    for sample in begun:
        sample.append_response_tokens([1, 2], [-0.5, -0.25], weight_versions=[VersionSpan("3", 0, 2)])
    data.add_samples([kept, begun])
    data.ledger.consume(others)
    data.of_round(1).get_samples(3)
    state = {
        "rollout_id": 0,
        "num_steps": 1,
        "num_critic_steps": 0,
        "version": 2,
        **data_state(data, 0),
        "evaluations": [{"rollout_id": 0.0, "eval/held-out/reward_mean": 0.25}],
        "wandb_run_id": None,
        "args": ARGS.to_dict(),
    }

    def write_files(folder):
        (folder / "w").write_bytes(bytes(999))
        return {}

    return save_checkpoint(tmp_path / "ckpt", 0, write_files, state), path


def resume(folder: Path, path: str) -> None:
    """What a resume does with the state, as far as it needs no process."""
    state = beginning(going_on(folder.parent)).state
    assert state is not None
    data = LedgeredDataSource(source(path, rollout_shuffle=True), Ledger())
    restore_data(data, state, state["rollout_id"], folder)
    evaluation_summary(state["evaluations"], 1)
    data.get_samples(4)


def flips(content: bytes, seed: int):
    """`content` with a bit turned, or a byte changed or lost, at a random place."""
    rng = random.Random(seed)
    for _ in range(NUM_FLIPS):
        at, out = rng.randrange(len(content)), bytearray(content)
        way = rng.randrange(3)
        if way == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            out[at] = rng.randrange(256)
        else:
            del out[at]
        if bytes(out) != content:
            yield bytes(out)


def test_every_flip_is_found_and_named(saved):
    folder, _ = saved
    check_whole(folder)
    for name in ("run_state.json", "w"):
        content = (folder / name).read_bytes()
        for damaged in flips(content, seed=1):
            (folder / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=rf"{name} has (different content|[\d,]+ bytes instead)"):
                check_whole(folder)
        (folder / name).write_bytes(content)


def test_no_flip_is_an_error_without_a_name(saved):
    """Without digests (an earlier instep's checkpoint) a flip may be read, but what cannot be read is named."""
    folder, path = saved
    content = (folder / "run_state.json").read_bytes()
    resume(folder, path)
    named = 0
    for damaged in flips(content, seed=2):
        (folder / "run_state.json").write_bytes(damaged)
        try:
            resume(folder, path)
        except InstepError as error:
            named += 1
            assert error.what and error.where and error.remedy
    assert named > NUM_FLIPS / 3


def test_no_flip_of_the_list_of_files_is_an_error_without_a_name(saved):
    folder, _ = saved
    content, passed = (folder / "files.json").read_bytes(), 0
    for damaged in flips(content, seed=3):
        (folder / "files.json").write_bytes(damaged)
        try:
            check_whole(folder)
            passed += 1
        except CheckpointError as error:
            assert error.what and error.where
    assert passed < NUM_FLIPS / 10  # its own name, its spaces


@pytest.mark.parametrize("name", ["rollout_id", "num_steps", "version", "ledger", "evaluations", "args"])
def test_a_missing_or_changed_entry_is_named(saved, name):
    folder, _ = saved
    state = json.loads((folder / "run_state.json").read_text())
    value = state.pop(name)
    (folder / "run_state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        read_state(folder)
    (folder / "run_state.json").write_text(json.dumps({**state, name: None if value else "x"}))
    with pytest.raises(CheckpointError, match=f"{name} is no "):
        read_state(folder)


def test_what_is_not_as_usual_is_told(saved):
    folder, _ = saved
    assert beginning(going_on(folder.parent)).notes == []
    (folder.parent / "latest_checkpointed_iteration.txt").unlink()
    assert "is missing: this is the newest complete checkpoint" in beginning(going_on(folder.parent)).notes[0]
    sizes = {p.name: p.stat().st_size for p in folder.iterdir() if p.name != "files.json"}
    (folder / "files.json").write_text(json.dumps(sizes))
    assert "no digests" in beginning(going_on(folder.parent)).notes[1]
    for name in ("files.json", "run_state.json"):
        (folder / name).unlink()
    (folder / ".metadata").write_bytes(b"m")
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("0")
    begins = beginning(going_on(folder.parent))
    assert begins.state is None and "another framework" in begins.notes[0]
