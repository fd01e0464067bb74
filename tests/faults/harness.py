"""Start `instep` as a user does, do something to it, and measure how it ends.

A fault that no signal can make is code in a `sitecustomize.py` that the run's processes import when they start: the
program runs unchanged, in processes of its own. `mark()` there, and `Run.mark` here, keep the time of the fault.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from instep.observability.sinks import read_json_lines
from tests.bounds import allowed
from tests.e2e.commands import ENVIRONMENT, gone_within, grpo_arguments, has_ended, words_of

ENDLESS = ("--num-rollout", "1000")
ROLES = {
    "worker": "instep.cluster.worker_main",
    "engine": "instep.engines.embedded",
    "controller": "instep.cli",
    "reward": "instep.rollout.rewards.worker",
    "router": "vllm::router",  # as vllm-router names itself
}
PREAMBLE = f"""\
import os, sys, time
ROLES = {ROLES!r}
role = next((name for name, module in ROLES.items() if module in sys.orig_argv), "other")
def mark():
    open(os.environ["FAULT_MARK"], "a").close()
"""
# The controller's patch acts after it has forked the server of its workers and engines.
IN_CONTROLLER = """\
if role == "controller":
    from instep.system.fork_server import ForkServer
    fork = ForkServer.fork
    def fork_first():
        server = fork()
        in_controller()
        return server
    ForkServer.fork = fork_first
"""


@dataclass
class Result:
    """What a fault led to: seconds until it was noticed (until the end of the command, for an error), and its words."""

    seconds: float
    seen: str


@dataclass
class Place:
    """Where a scenario works: the tiny model and data, a finished run's checkpoints, and a folder of its own."""

    tiny: Path
    saved: Path
    folder: Path
    results: dict[str, Result] = field(default_factory=dict)

    def run(self, *flags: str, **kwargs: Any) -> Run:
        return Run(self, *flags, **kwargs)


class Run:
    """A running `instep train`. Use it as a context manager: nothing of it is left afterwards.

    Args:
        name: of its folder.
        run_dir: its --run-dir; default: a folder of its own.
        patches: role ("controller", "worker", "engine" or "all") -> code that its processes run first.
        hooks: the module `my_hooks`, whose `reward` becomes the reward function.
        stdout: the descriptor that it prints to; default: nowhere.
        env: further environment variables.
    """

    def __init__(
        self,
        place: Place,
        *flags: str,
        name: str = "run",
        run_dir: Path | None = None,
        patches: dict[str, str] | None = None,
        hooks: str | None = None,
        stdout: int = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
    ):
        self.place, self.run_dir = place, run_dir or place.folder / name
        code = place.folder / f"{name}-code"
        code.mkdir()
        self._mark = code / "mark"
        text = PREAMBLE
        for role, patch in (patches or {}).items():
            head = "def in_controller():" if role == "controller" else f"if {role!r} in (role, 'all'):"
            text += head + "\n" + textwrap.indent(textwrap.dedent(patch), "    ") + "\n"
        text += IN_CONTROLLER if "controller" in (patches or {}) else ""
        (code / "sitecustomize.py").write_text(text)
        if hooks is not None:
            (code / "my_hooks.py").write_text(textwrap.dedent(hooks))
            flags = (*flags, "--custom-rm-path", "my_hooks.reward")
        path = os.pathsep.join(filter(None, [str(code), ENVIRONMENT.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "instep.cli", *grpo_arguments(place.tiny, self.run_dir, *flags)],
            env={**ENVIRONMENT, "PYTHONPATH": path, "FAULT_MARK": str(self._mark), **(env or {})},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started = time.time()
        self.children: list[psutil.Process] = []
        self._looked = 0.0

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        assert gone_within(self.children, 10), [p for p in self.children if p.is_running()]

    # ---- what happens to it --------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Now is the time of the fault."""
        self._mark.touch()

    def num_steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.read_text().count('"train/loss"') if path.exists() else 0

    def wait_steps(self, num: int = 1, seconds: float = 360) -> None:
        """Until `num` training steps more are done than now; the engine and the workers are at work then."""
        wanted = self.num_steps() + num
        self.wait(lambda: self.num_steps() >= wanted, seconds)

    def wait(self, condition: Callable[[], bool], seconds: float = 360) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[1][-3000:]
            assert time.monotonic() < deadline, "did not happen in time"
            self._look_now_and_then()
            time.sleep(0.03)

    def look(self) -> None:
        """Remember its children, to see later that none is left."""
        try:
            known = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self.children += [p for p in known if p not in self.children]

    def _look_now_and_then(self) -> None:
        """A look goes through all processes of the machine."""
        if time.monotonic() - self._looked > 0.3:
            self.look()
            self._looked = time.monotonic()

    def child(self, role: str) -> int:
        """The process id of the engine or of the worker."""
        self.look()
        return self.pids(role)[0]

    def pids(self, role: str) -> list[int]:
        """All processes of this role.

        Of an embedded engine the one that computes, then the one that answers HTTP; of vLLM and SGLang the one that
        answers HTTP, then the one that computes.
        """
        if role in ("vllm", "sglang"):
            main = f"instep.engines.{role}_main"
            server = next(p for p in self.children if p.is_running() and main in words_of(p))
            core = [c for c in server.children() if "sglang::scheduler" in words_of(c)] or server.children()
            return [server.pid, max(core, key=lambda child: child.memory_info().rss).pid]
        return [p.pid for p in self.children if not has_ended(p) and ROLES[role] in words_of(p)]

    def signal(self, role: str, number: int, which: int = 0) -> None:
        """The fault is a signal."""
        pid = self.process.pid if role == "controller" else self.pids(role)[which]
        self.look()
        self.mark()
        os.kill(pid, number)

    def pause(self, role: str, seconds: float) -> None:
        """Let a process stand still for a while, as on a machine with too much to do."""
        self.signal(role, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.process.pid if role == "controller" else self.child(role), signal.SIGCONT)

    # ---- how it ends ---------------------------------------------------------------------------------------------

    def end(self, limit: float = 360) -> tuple[int, str, float]:
        """Wait for the end: exit code, stderr, seconds since the fault (without one: since the start)."""
        deadline = time.monotonic() + limit
        while self.process.poll() is None and time.monotonic() < deadline:
            self._look_now_and_then()
            time.sleep(0.03)
        since = self._mark.stat().st_mtime if self._mark.exists() else self.started
        seconds = time.time() - since
        assert self.process.poll() is not None, f"still running after {limit} s"
        stderr = self.process.communicate()[1]
        assert not any(line.startswith("Traceback") for line in stderr.splitlines()), stderr[-3000:]
        return self.process.returncode, stderr, seconds

    def recovered(self, fault: str, seen: str, seconds: float | None = None) -> None:
        """It goes on: two more steps are done, within some seconds of the fault where these are given."""
        before = self._mark.stat().st_mtime
        self.wait_steps(1)
        taken = time.time() - before
        assert seconds is None or taken <= allowed(seconds), taken
        self.place.results[fault] = Result(taken, seen)

    def error(self, fault: str, *words: str, code: int = 1, within: float = 10) -> str:
        """It ends in time with one error that has what, where, remedy and these words, and leaves nothing."""
        got, stderr, seconds = self.end()
        missing = [word for word in words if word not in stderr]
        assert got == code and not missing, (got, missing, stderr[-3000:])
        assert stderr.count("\n  where: ") == stderr.count("\n  remedy: ") == 1, stderr[-3000:]
        # From the command's start most of it is Python's imports, 24 s where other tests kept the machine busy.
        assert seconds <= allowed(within if self._mark.exists() else 40), seconds
        assert gone_within(self.children, 2) and not left_in_shared_memory(self.process.pid)
        self.place.results[fault] = Result(seconds, self._words(stderr))
        return stderr

    def ended(self, fault: str) -> str:
        """It ends in order, at the user's wish."""
        code, stderr, seconds = self.end()
        assert code == 130 and stderr.rstrip().endswith("interrupted"), (code, stderr[-3000:])
        assert seconds <= allowed(10) and gone_within(self.children, 1), seconds
        self.place.results[fault] = Result(seconds, "exit code 130, `interrupted`")
        return stderr

    def interrupted(self, fault: str, *words: str) -> None:
        """The same, and it says how to go on (`words`) and leaves a report."""
        stderr = self.ended(fault)
        line = next((x for x in stderr.splitlines() if x.startswith("interrupted, ")), "")
        assert line and not [word for word in words if word not in line], stderr[-3000:]
        summary = json.loads((self.run_dir / "summary.json").read_text())
        assert summary["status"] == "interrupted" and summary["to_go_on"] in line
        assert "interrupted, " in (self.run_dir / "report.html").read_text()
        self.place.results[fault].seen = f"a report, and `{self._clean(line)}`"

    def _words(self, stderr: str) -> str:
        """The first line of the error."""
        return self._clean(next(x for x in stderr.splitlines() if re.match(r"\w+Error: ", x)))

    def _clean(self, line: str) -> str:
        """A line without what differs from machine to machine."""
        for path, name in ((self.run_dir, "RUN_DIR"), (self.place.folder, "..."), (self.place.tiny, "...")):
            line = line.replace(str(path), name)
        line = re.sub(r"\b(process|port|pid|step|iter_)( ?)\d+(/\d+)?", lambda m: f"{m[1]}{m[2]}N", line)
        line = re.sub(r" on [\w.-]+$", " on HOST", line)
        line = re.sub(r"pid=\d+\) (\w+) \d\d-\d\d [\d:]+ ", r"pid=N) \1 ", line)  # as vLLM's log has it
        line = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", line)
        return line if len(line) <= 200 else line[:197] + "..."


def left_in_shared_memory(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"instep-sync-{pid}-*"))


def steps(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics of its training steps."""
    return [row for row in read_json_lines(run_dir / "metrics.jsonl") if "train/loss" in row]
