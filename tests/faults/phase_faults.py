"""Each process is killed or stopped in each phase, when the phase begins, whether it is at work in it or idle."""

from __future__ import annotations

import signal
from functools import partial

from instep.checkpoints.integrity import check_whole
from tests.faults.harness import Place
from tests.faults.registry import scenario, unindent

# In the controller, when PHASE begins for the second time (the start: when the processes have been started).
SIGNAL = """
    import psutil, signal
    from instep.cluster.launch import LocalCluster
    from instep.observability.run_logger import RunLogger
    phase, start, seen = RunLogger.phase, LocalCluster.start, []
    def signal_it(cluster):
        process = {"worker": cluster.workers.processes[0], "engine": cluster.engines[0].process}.get(WHO)
        pid = process.pid if process is not None else 0
        while not pid:  # the engine's HTTP process
            pid = next((p.pid for p in psutil.Process(cluster.engines[0].process.pid).children()), 0)
        mark()
        os.kill(pid, NUMBER)
    def start_and_signal(self):
        global cluster
        cluster = self
        start(self)
        if PHASE == "start":
            signal_it(cluster)
    def phase_and_signal(self, name, *args):
        seen.append(name)
        if name == PHASE and seen.count(name) == 2:
            signal_it(cluster)
        return phase(self, name, *args)
    LocalCluster.start, RunLogger.phase = start_and_signal, phase_and_signal
    """
PHASES = {
    "start": "the processes start",
    "rollout": "responses are generated",
    "train": "the trainer works",
    "sync": "weights are synced",
    "save": "a checkpoint is saved",
    "eval": "the policy is evaluated",
}
WHO = {"worker": "a training worker", "engine": "an engine", "http": "an engine's HTTP process"}
HOW = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
ALREADY = {("worker", "train"), ("engine", "rollout"), ("http", "rollout")}  # in process_faults.py
LEFT_OUT = {("http", "train"), ("http", "save")}  # as the engine, which is idle then, too
WORDS = {
    ("worker", "killed"): "WorkerError: actor rank 0 died (SIGKILL)",
    ("worker", "stopped"): "WorkerError: actor rank 0 is stopped",
    ("engine", "killed"): "EngineError: engine 0 ",
    ("engine", "stopped"): "EngineError: engine 0 is stopped",
    ("http", "killed"): "EngineError: engine 0 ",
}


def disturb(place: Place, who: str, how: str, phase: str) -> None:
    ckpt, data = place.folder / "ckpt", place.tiny / "train.jsonl"
    flags = ("--num-rollout", "4", "--save", str(ckpt), "--save-interval", "1")
    flags += ("--eval-interval", "1", "--eval-prompt-data", "held-out", str(data), "--n-samples-per-eval-prompt", "1")
    given = f"WHO, NUMBER, PHASE = {who!r}, {int(HOW[how])}, {phase!r}"
    with place.run(*flags, patches={"controller": unindent(given, SIGNAL)}) as run:
        run.error(f"{who}_{how}_{phase}", WORDS[who, how])
    found = sorted(p.name for p in ckpt.glob("iter_*"))  # the second save may be done before an idle engine is missed
    assert found == [] if phase in ("start", "sync") else found[:1] == ["iter_0000000"], found
    for name in found:
        check_whole(ckpt / name)


def register() -> None:
    for who in WHO:
        for how in HOW:
            for phase in PHASES:
                if (who, phase) not in ALREADY | LEFT_OUT and (
                    who,
                    how,
                ) in WORDS:  # a stopped one is a missed heartbeat
                    name = f"{who}_{how}_{phase}"
                    work = partial(disturb, who=who, how=how, phase=phase)
                    work.__name__ = name  # type: ignore[attr-defined]
                    scenario(slow=True, **{name: f"error: {WHO[who]} is {how} while {PHASES[phase]}"})(work)


register()
