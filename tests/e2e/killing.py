"""Kill a run at random instants and start it again with the same command, until it has reached its end."""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from instep.checkpoints.folders import latest_iteration
from tests.e2e.commands import ENVIRONMENT, gone_within, words_of

VICTIMS = {"engine": "instep.engines.embedded", "worker": "instep.cluster", "critic": "instep.cluster"}
WAYS = ("tree", "controller", "worker", "engine")  # and of PPO "critic", whose process is started after the actor's


@dataclass
class Session:
    """One life of a run: where it began, how it ended, and its metrics up to there by step."""

    start: int
    killed: str
    metrics: dict[int, dict]
    exit_code: int
    stderr: str = field(repr=False, default="")


class Run:
    """`arguments` of one command; `run_dir/ckpt` is where it saves and resumes."""

    def __init__(self, arguments: list[str], run_dir: Path):
        self.run_dir = run_dir
        self.arguments = [*arguments, "--save", str(run_dir / "ckpt"), "--load", str(run_dir / "ckpt")]
        self.sessions: list[Session] = []

    def finish(self) -> Session:
        """The last session: nobody disturbs it."""
        process, _ = self._start()
        stderr = process.communicate(timeout=600)[1]
        return self._ended("", process.returncode, stderr)

    def kill(self, rng: random.Random, phase: str, way: str) -> Session:
        """A session that is killed in `phase` of its third step (its first save), at a random instant of it."""
        target = self._next_rollout() + (1 if phase == "save" else 2)
        process, diary = self._start()
        self._await(process, diary, f"{phase} {target} ")
        time.sleep(rng.random() * _typical_seconds(diary, phase))
        family = psutil.Process(process.pid).children(recursive=True)
        for victim in _victims(psutil.Process(process.pid), family, way):
            with contextlib.suppress(psutil.NoSuchProcess):  # children die with their parent
                victim.kill()
        stderr = process.communicate(timeout=240)[1]
        assert gone_within(family, 10), f"outlived the {way} killed in {phase}: {family}"
        return self._ended(f"{way} in {phase} of rollout {target}", process.returncode, stderr)

    def _start(self) -> tuple[subprocess.Popen[str], Path]:
        self._began_at = self._next_rollout()
        diary = self.run_dir.with_name(f"{self.run_dir.name}-diary-{len(self.sessions)}")
        command = [sys.executable, "-m", "tests.e2e.observed", str(diary), *self.arguments]
        out = subprocess.DEVNULL
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=out, stderr=subprocess.PIPE, text=True), diary

    def _ended(self, killed: str, exit_code: int, stderr: str) -> Session:
        rows = metrics(self.run_dir)
        mine = {step: row for step, row in rows.items() if step >= self._began_at}
        self.sessions.append(Session(self._began_at, killed, mine, exit_code, stderr))
        return self.sessions[-1]

    def _next_rollout(self) -> int:
        latest = latest_iteration(self.run_dir / "ckpt")
        return 0 if latest is None else latest + 1

    @staticmethod
    def _await(process: subprocess.Popen[str], diary: Path, line: str, timeout: float = 300) -> None:
        deadline = time.monotonic() + timeout
        while not (diary.exists() and line in diary.read_text()):
            assert process.poll() is None, f"the run ended by itself:\n{process.communicate()[1][-3000:]}"
            assert time.monotonic() < deadline, f"{line!r} did not come"
            time.sleep(0.003)


def _victims(parent: psutil.Process, family: list[psutil.Process], way: str) -> list[psutil.Process]:
    if way == "tree":
        return [parent, *family]
    if way == "controller":
        return [parent]
    chosen = [p for p in family if VICTIMS[way] in " ".join(words_of(p))]
    assert chosen, f"no {way} among {[words_of(p) for p in family]}"
    return [max(chosen, key=lambda p: p.pid)] if way == "critic" else chosen[:1]


def _typical_seconds(diary: Path, phase: str) -> float:
    """How long this phase took so far."""
    entries = [(p, float(at)) for p, _, at in (line.split() for line in diary.read_text().splitlines())]
    spans = [b - a for (p, a), (_, b) in zip(entries, entries[1:], strict=False) if p == phase]
    return statistics.median(spans) if spans else 0.05


def metrics(run_dir: Path) -> dict[int, dict]:
    """The rows of whole steps by step, without what a clock or a restart may change."""
    path = run_dir / "metrics.jsonl"
    out = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        row = json.loads(line) if line.endswith("\n") else {}
        if "train/loss" in row or "critic/value_loss" in row:
            kept = {k: v for k, v in row.items() if k.startswith(("rollout/", "train/", "critic/", "step"))}
            assert row["step"] not in out, f"step {row['step']} is there twice"
            out[row["step"]] = kept
    return out


def schedule(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """(phase, way) of each kill: every phase and every way comes about equally often."""
    phases = ["rollout", "train", "sync", "save"]
    out = []
    for i in range(count):
        if i % 4 == 0:
            rng.shuffle(phases)
        out.append((phases[i % 4], rng.choice(WAYS)))
    return out
