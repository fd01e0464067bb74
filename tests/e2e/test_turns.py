"""Trainer and engines that take turns (--offload), here on a CPU, where a run would say that nothing is to be freed."""

import json
import os
import signal
import time

import pytest

from instep.arguments.parse import parse
from instep.controller import device
from instep.controller.sync.weight_sync import WeightSync
from instep.engines.engine import Engine
from instep.errors import SyncError
from instep.train_sync import train
from tests.assets import make_checkpoint, make_prompts
from tests.e2e.commands import grpo_arguments


@pytest.fixture
def moves(monkeypatch, no_plots):
    """The moves of trainer and engines in their order, as the run makes them; and turns on a CPU."""
    from instep.controller.role import RoleTrainer

    monkeypatch.setattr(device, "FREED", {"cpu"})
    made = []

    def record(owner, name, tell):
        real = getattr(owner, name)

        def call(self, *args, **kwargs):
            made.append(tell(self, *args, **kwargs))
            return real(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    record(Engine, "sleep", lambda self, level, timeout: "" if self.asleep else f"sleep {level}")
    record(Engine, "wake", lambda self, tag, timeout: f"wake {tag}" if tag in self.asleep else "")
    record(Engine, "start_update", lambda self, *a, **k: "start_update")
    record(Engine, "prompt_log_probs", lambda self, *a, **k: "engine scores")
    record(RoleTrainer, "offload", lambda self, weights: f"offload {'all' if weights else 'states'}")
    record(RoleTrainer, "onload", lambda self, optimizer: f"onload {'all' if optimizer else 'weights'}")
    record(RoleTrainer, "train", lambda self, *a, **k: "train")
    record(RoleTrainer, "probe_log_probs", lambda self, *a, **k: "trainer scores")
    record(RoleTrainer, "begin_save", lambda self, *a, **k: "save")
    return made


def run(tiny, folder, *flags, backend="embedded"):
    words = grpo_arguments(tiny, folder, "--colocate", "--rollout-backend", backend, *flags)
    train(parse(words[1:], "train"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


START = ["sleep 1", "offload all", "wake weights", "wake kv_cache"]
FIRST_SYNC = ["sleep 2", "onload weights", "wake weights", "start_update", "trainer scores", "offload all"]
PROOF = ["wake kv_cache", "engine scores", "engine scores"]
SYNC = ["offload states", "wake weights", "start_update", "trainer scores", "offload all", *PROOF]
SAVE = ["sleep 1", "onload all", "save", "offload all", "wake weights", "wake kv_cache"]


def test_one_side_leaves_before_the_other_comes(tiny, tmp_path, moves):
    flags = ["--save", str(tmp_path / "ckpt"), "--save-interval", "2", "--deterministic-mode"]
    taken = run(tiny, tmp_path / "turns", "--offload", *flags)
    step = ["sleep 2", "onload all", "train", *SYNC]
    assert [m for m in moves if m] == [*START, *FIRST_SYNC, *PROOF, *step, *step, *SAVE]
    for row in taken:
        assert all(row[f"turns/{name}_seconds"] > 0 for name in ("sleep", "wake", "offload", "onload"))
        assert row["memory/train/trainer_host_bytes"] > 1e8
    moves.clear()
    without = run(tiny, tmp_path / "beside", *flags, "--no-offload-train", "--save", str(tmp_path / "other"))
    assert not any("load" in m or "sleep" in m for m in moves)
    same = [name for name in taken[1] if name.startswith(("train/", "rollout/"))]
    assert [[row[n] for n in same] for row in taken] == [[row[n] for n in same] for row in without]
    for name in sorted(p.name for p in (tmp_path / "ckpt/iter_0000001").glob("*.distcp")):
        ours, theirs = (tmp_path / f"{root}/iter_0000001/{name}" for root in ("ckpt", "other"))
        assert ours.read_bytes() == theirs.read_bytes()


def alternate(moves):
    """Whether nobody takes memory that the other side still has."""
    has = {"engine": False, "trainer": True}  # when the trainer has been loaded
    for move in moves:
        if move.startswith(("sleep", "offload all")):
            has["engine" if "sleep" in move else "trainer"] = False
        elif move.startswith("onload") or move == "wake kv_cache":
            side, other = ("trainer", "engine") if "onload" in move else ("engine", "trainer")
            if has[other]:
                return False
            has[side] = True
    return True


def test_a_proof_that_fails_names_the_cause_within_turns(tiny, tmp_path, moves, monkeypatch):
    """The trainer comes back to score once more, for its digests and the golden path."""
    scores = Engine.prompt_log_probs
    monkeypatch.setattr(Engine, "prompt_log_probs", lambda *given, **how: [x + 0.1 for x in scores(*given, **how)])
    with pytest.raises(
        SyncError, match="compute differently, although its weights are the trainer's: .* by 0.1 nats in the mean"
    ):
        run(tiny, tmp_path, "--offload", "--num-rollout", "1")
    done = [m for m in moves if m]
    assert done[: len(START) + len(FIRST_SYNC)] == [*START, *FIRST_SYNC] and alternate(done[1:])
    assert done.count("trainer scores") == 2 and done.count("engine scores") == 6 and done[-1] == "engine scores"


@pytest.mark.slow
def test_a_run_goes_on_within_turns(tiny, tmp_path, moves):
    """The engines start, and sleep, before the trainer loads its checkpoint."""
    flags = ["--offload", "--deterministic-mode", "--rm-type", "random"]
    run(tiny, tmp_path / "first", *flags, "--num-rollout", "1", "--save", str(tmp_path / "ckpt"))
    moves.clear()
    resumed = run(tiny, tmp_path / "second", *flags, "--load", str(tmp_path / "ckpt"))
    step = ["sleep 2", "onload all", "train", *SYNC]
    assert [m for m in moves if m] == [*START, *FIRST_SYNC, *PROOF, *step]
    whole = run(tiny, tmp_path / "whole", *flags)
    same = [name for name in whole[1] if name.startswith(("train/", "rollout/"))]
    assert len(resumed) == 1 and [resumed[0][n] for n in same] == [whole[1][n] for n in same]


@pytest.mark.slow
def test_the_trainer_alone_leaves(tiny, tmp_path, moves, monkeypatch):
    """Requests wait for the proof, also with `keep`: until then the trainer may need its memory."""
    admit = WeightSync._open
    monkeypatch.setattr(WeightSync, "_open", lambda *given: (moves.append("admit"), admit(*given)))
    run(tiny, tmp_path, *"--offload-train --num-rollout 1 --weight-sync disk --pause-mode keep".split())
    first = [m for m in FIRST_SYNC if m.startswith(("start", "trainer"))]
    expected = ["offload all", "onload weights", *first, "offload all", *PROOF[1:], "admit", "onload all", "train"]
    assert [m for m in moves if m] == [*expected, *(m for m in SYNC if "wake" not in m), "admit"]


def test_the_engines_alone_sleep(tiny, tmp_path, moves):
    """What the trainer's passes needed leaves before they wake (`Worker.offload`)."""
    run(tiny, tmp_path, "--offload-rollout", "--num-rollout", "1", "--weight-sync", "disk")
    session = ["start_update", "trainer scores", "offload all"]
    first = ["sleep 1", *START[1:], "offload states", *session, *PROOF[1:], "sleep 2", "train"]
    assert [m for m in moves if m] == [*first, "offload states", "wake weights", *session, *PROOF]


@pytest.mark.slow
def test_with_an_adapter_the_engine_keeps_its_base(tiny, tmp_path, moves):
    run(tiny, tmp_path, "--offload", "--num-rollout", "1", "--lora-rank", "4", "--weight-sync", "lora")
    expected = [*START, *FIRST_SYNC, *PROOF, "sleep 2", "onload all", "train", *SYNC]
    assert [m for m in moves if m] == [m.replace("sleep 2", "sleep 1") for m in expected]


@pytest.mark.vllm
def test_vllm_takes_its_turns_by_its_own_routes(tmp_path, moves):
    """On a CPU vLLM frees nothing, but its scheduler pauses, and wakes in two stages. It waits for the trainer."""
    make_checkpoint(tmp_path / "hf", head_dim=32)
    make_prompts(tmp_path / "train.jsonl", 64)
    flags = ["--vllm-kv-cache-memory-bytes", str(128 << 20), "--save", str(tmp_path / "ckpt")]
    rows = run(tmp_path, tmp_path / "run", "--offload", *flags, backend="vllm")
    step = ["sleep 2", "onload all", "train", *SYNC]
    start = ["trainer scores", "offload all"]  # while vLLM imports
    assert [m for m in moves if m] == [*start, *FIRST_SYNC, *PROOF, *step, *step, *SAVE]
    assert all(row["train/log_prob_gap_max"] < 1e-4 for row in rows)


@pytest.mark.vllm
def test_vllm_waits_for_a_trainer_that_stays_and_nobody_moves_again(tmp_path, moves, monkeypatch):
    """As side by side on a GPU: vLLM measures the free memory when the trainer has what it keeps."""
    monkeypatch.setattr("instep.cluster.launch.can_take_turns", lambda args: True)
    make_checkpoint(tmp_path / "hf", head_dim=32)
    make_prompts(tmp_path / "train.jsonl", 64)
    flags = ["--vllm-kv-cache-memory-bytes", str(128 << 20), "--num-rollout", "1"]
    (row,) = run(tmp_path, tmp_path / "run", *flags, backend="vllm")
    assert [m for m in moves if m and m != "engine scores"][:4] == [
        "trainer scores",
        "offload all",
        "start_update",
        "trainer scores",
    ]
    assert moves.count("offload all") == 1 and not any(m.startswith(("sleep", "wake", "onload")) for m in moves)
    assert not any(name.startswith("turns/") for name in row)


@pytest.mark.slow
def test_an_engine_that_dies_asleep_comes_back_when_the_trainer_is_away(tiny, tmp_path, moves, monkeypatch, capsys):
    from instep.cluster.launch import LocalCluster
    from instep.controller.role import RoleTrainer

    clusters, train_step, restart = [], RoleTrainer.train, LocalCluster.restart_engine

    def note(self, index, *args):
        clusters.append(index)
        moves.append("restart")
        return restart(self, index, *args)

    def kill_first(self, *args, **kwargs):
        if not killed:
            engine = self.workers.watch.__self__.engines[1]
            assert engine.asleep
            killed.append(engine.process.pid)
            os.kill(engine.process.pid, signal.SIGKILL)
            time.sleep(2.0)  # the trainer has the memory: nothing may start
            assert "restart" not in moves
        return train_step(self, *args, **kwargs)

    killed: list[int] = []
    monkeypatch.setattr(LocalCluster, "restart_engine", note)
    monkeypatch.setattr(RoleTrainer, "train", kill_first)
    rows = run(tiny, tmp_path, "--offload", "--num-rollout", "4", "--actor-num-gpus-per-node", "2")
    assert len(rows) == 4 and clusters == [1]
    before = [m for m in moves[: moves.index("restart")] if m.startswith(("offload", "onload"))]
    after = [m for m in moves[moves.index("restart") :] if m.startswith(("offload", "onload"))]
    assert before[-1] == "offload all" and after[0] == "onload all"
    assert "engine 1 serves again" in capsys.readouterr().out
