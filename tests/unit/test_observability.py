"""Metrics of a rollout, phases, progress, memory, versions: all run for real."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from instep.errors import RewardError
from instep.observability.figures import duration, number
from instep.observability.memory import PssSampler, read_pss, tree_memory
from instep.observability.metrics import rollout_metrics
from instep.observability.progress import Progress, sparkline
from instep.observability.sinks import read_json_lines
from instep.observability.versions import git_state, versions
from instep.types import Sample, Status
from tests.logged_run import make_groups, plain_console, run

# Metrics


def test_rollout_metrics_against_statistics() -> None:
    groups = make_groups(5, 4)
    for sample in groups[2]:
        sample.reward = 0.25
    samples = [s for g in groups for s in g]
    rewards, lengths = [s.reward for s in samples], [s.response_length for s in samples]
    metrics = rollout_metrics(groups)
    assert metrics["rollout/reward_mean"] == pytest.approx(statistics.fmean(rewards), abs=1e-12)
    assert metrics["rollout/reward_std"] == pytest.approx(statistics.pstdev(rewards), abs=1e-12)
    assert metrics["rollout/response_length_mean"] == statistics.fmean(lengths)
    assert metrics["rollout/response_length_max"] == max(lengths)
    assert metrics["rollout/truncated_ratio"] == sum(s.truncated for s in samples) / 20
    assert metrics["rollout/zero_std_groups_ratio"] == 1 / 5
    assert (metrics["rollout/reward_min"], metrics["rollout/reward_max"]) == (min(rewards), max(rewards))
    assert metrics["rollout/num_tokens"] == sum(lengths) + 2 * 20
    assert metrics["rollout/masked_ratio"] == pytest.approx(40 / (sum(lengths) + 40))  # the prompts
    samples[0].loss_mask, samples[1].remove_sample = [0, 1] + [0] * (lengths[0] - 2), True
    masked = 40 + lengths[0] - 1 + lengths[1]
    assert rollout_metrics(groups)["rollout/masked_ratio"] == pytest.approx(masked / (sum(lengths) + 40))


def test_rollout_metrics_leave_out_what_is_unknown() -> None:
    assert rollout_metrics([]) == {}
    no_reward = rollout_metrics([[Sample(response_length=4, status=Status.COMPLETED)]])
    assert not {name for name in no_reward if "reward" in name or "zero_std" in name}
    assert no_reward["rollout/response_length_mean"] == 4.0
    one_each = [[Sample(reward=1.0, response_length=1)], [Sample(reward=0.0, response_length=1)]]
    assert "rollout/zero_std_groups_ratio" not in rollout_metrics(one_each)
    pair = [Sample(reward=1.0, tokens=[1, 2, 3], response_length=2, remove_sample=removed) for removed in (True, False)]
    assert rollout_metrics([*one_each, pair])["rollout/zero_std_groups_ratio"] == 1.0  # of those that can be compared
    assert rollout_metrics([pair])["rollout/masked_ratio"] == 1 - 2 / 6


def test_dict_rewards_need_their_key() -> None:
    sample = Sample(reward={"score": 0.5, "format": 1}, index=7, group_index=3)
    assert rollout_metrics([[sample]], reward_key="score")["rollout/reward_mean"] == 0.5
    assert rollout_metrics([[sample]], reward_key="format")["rollout/reward_mean"] == 1.0
    for key in (None, "socre"):
        with pytest.raises(RewardError, match="format.*score") as error:
            rollout_metrics([[sample]], reward_key=key)
        assert "group 3, sample 7" in str(error.value)


# Phases and progress


def test_a_step_shows_no_value_of_an_earlier_one() -> None:
    """A synchronous first step has a gap, the later ones of an asynchronous run may have none."""
    console = plain_console()
    progress = Progress("t", 3, console=console)
    progress.log(0, {"train/loss": 0.5, "train/log_prob_gap_mean": 0.027, "train/log_prob_gap_max": 0.763})
    progress.log(1, {"train/loss": 0.25})
    progress.log(1, {"rollout/reward_mean": 1.0})  # of the same step
    first, second, third = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "gap 0.027" in first and "gap max 0.763" in first
    assert "loss 0.2500" in second and "gap" not in second
    assert "loss 0.2500" in third and "reward 1.000" in third and "gap" not in third


def test_plain_progress_is_one_line_per_step_and_new_phase(tmp_path: Path) -> None:
    console = plain_console()
    with run(tmp_path, console=console) as log:
        log.log(0, {"eval/arith/reward_mean": 0.4, "eval/arith/response_length_mean": 20.0})
        for step in range(2):
            with log.phase("rollout"):
                log.status("groups 1/2")
            log.log(step, {"rollout/reward_mean": 0.5 + step / 10, "perf/rollout_tokens_per_second": 1234.0})
    lines = [re.sub(r"^[\d:]+ \| ", "", line) for line in console.file.getvalue().splitlines()]
    legend, *lines = lines
    assert "reward: mean |" in legend
    assert lines == [
        "eval arith: reward 0.400, length 20.0, after 0 rollouts",
        "rollout",
        "rollout 0 (1/4)  reward 0.500  rollout tok/s 1,234  left 00:00",
        "rollout 1 (2/4)  reward 0.600  rollout tok/s 1,234  left 00:00",
    ]


def test_time_left_is_mean_step_time_times_steps_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("instep.observability.progress.time.monotonic", lambda: now[0])
    progress = Progress("t", 10, console=plain_console())
    assert progress.left is None
    progress.begin_phase("rollout")
    for seconds in (30.0, 2.0, 4.0, 3.0):
        now[0] += seconds
        progress.log(int(now[0]), {"train/loss": 0.0})
    assert progress.left == pytest.approx(6 * 3.0)  # the first step, with its warm-up, is left out
    now[0] += 1.0
    assert progress.left == pytest.approx(17.0) and progress.elapsed == pytest.approx(40.0)
    progress.log(int(now[0]) - 1, {"perf/pss_bytes": 1.0})
    assert progress.steps_done == 4


def test_small_formatters() -> None:
    assert sparkline([0.0, 1.0, 2.0, math.nan], blocks="abc") == "abc"
    assert sparkline([3.0] * 50, width=4, blocks="abc") == "aaaa" and sparkline([]) == ""
    assert (duration(None), duration(59.6), duration(3661)) == ("-", "01:00", "1:01:01")
    shown = [number(v) for v in (None, math.nan, 0.0, 0.41234, 12345.6, 1.2e-6, -2500.0)]
    assert shown == ["-", "n/a", "0.000", "0.412", "12,346", "1.2e-06", "-2,500"]


SCRIPT = """
import logging, sys, time
from pathlib import Path
from instep.observability.run_logger import RunLogger
logging.basicConfig(level=logging.INFO, format="LOG %(message)s")
with RunLogger(Path(sys.argv[1]), {}, title="a run", num_steps=3) as log:
    for step in range(3):
        with log.phase("rollout", step):
            print("PRINTED", step)
            logging.info("line %d", step)
            log.status("groups 1/2")
            time.sleep(0.3)
        log.log(step, {"rollout/reward_mean": step / 2, "rollout/response_length_mean": 10.0})
        if sys.argv[2] == "raise" and step == 1:
            raise ValueError("broken")
        if sys.argv[2] == "wait" and step == 1:
            print("WAITING", flush=True)
            time.sleep(60)
    log.finish({"eval_reward_after": 0.75, "peak_pss_bytes": 2500000000})
"""


def on_terminal(folder: Path, mode: str) -> tuple[int, str]:
    """Exit code and raw output of SCRIPT on a pseudo-terminal; Ctrl-C is typed at WAITING."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="90", LINES="30", PYTHONIOENCODING="utf-8")
        os.execv(sys.executable, [sys.executable, "-c", SCRIPT, str(folder), mode])
    output, typed, deadline = b"", False, time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            data = os.read(fd, 65536)
        except OSError:  # the child closed the terminal
            break
        output += data
        if b"WAITING" in output and not typed:
            typed = True
            os.write(fd, b"\x03")
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output.decode()


@pytest.mark.parametrize("mode", ["finish", "raise", "wait"])
def test_terminal_panel_garbles_nothing_and_is_taken_down(tmp_path: Path, mode: str) -> None:
    code, output = on_terminal(tmp_path, mode)
    assert code == {"finish": 0, "raise": 1, "wait": -signal.SIGINT}[mode]
    hide, show = output.rfind("\x1b[?25l"), output.rfind("\x1b[?25h")
    assert 0 <= hide < show  # the cursor was hidden while the panel was up, and is shown again
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() for line in re.split(r"[\r\n]+", output)]
    for step in range(2):
        assert f"PRINTED {step}" in lines and f"LOG line {step}" in lines  # whole, on lines of their own
    assert any("2 of 3 rollouts done" in line for line in lines)
    assert any(line.startswith("\u2502 reward") and "0.500" in line for line in lines)
    for step in range(2):  # the history, above the panel
        assert any(
            re.match(rf"00:0\d \| rollout {step} \({step + 1}/3\)  reward 0\.\d+  length 10.0", line) for line in lines
        )
    if mode == "finish":
        assert any("eval_reward_after" in line and "0.7500" in line for line in lines)
        assert any("2.50 GB" in line for line in lines)
        assert lines[-3] == f"report: {tmp_path / 'report.html'}"
        assert lines[-2] == f"next: instep view {tmp_path} (curves), instep samples {tmp_path} (texts)"
    else:
        error, phase = {"raise": ("ValueError", "rollout 1"), "wait": ("KeyboardInterrupt", "rollout 1")}[mode]
        assert f"stopped in phase {phase}, 2 of 3 rollouts done: {error}" in lines
        assert not (tmp_path / "summary.json").exists()
    assert len(read_json_lines(tmp_path / "metrics.jsonl")) == (3 if mode == "finish" else 2)


def test_log_handlers_get_their_stream_back() -> None:
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        before = handler.stream
        progress = Progress("t", 1, console=Console(file=io.StringIO(), force_terminal=True))
        assert not progress.live
        progress.start()
        assert progress.live and handler.stream is not before
        progress.stop()
        progress.stop()
        assert handler.stream is before and not progress.live
    finally:
        logging.getLogger().removeHandler(handler)


# Memory


# In a process of its own: in a worker of pytest, children of earlier tests would be counted, and its large heap, of
# which each fork copies what it touches.
_TREE = """
import json, multiprocessing, os
from pathlib import Path
from instep.observability.memory import PssSampler

def allocate(num_bytes, ready, release):
    block = bytearray(num_bytes)
    block[::4096] = b"x" * len(block[::4096])
    ready.set()
    release.wait(60)

context = multiprocessing.get_context("fork")
shared = bytearray(os.urandom(1024) * (60 * 1024))  # 60 MiB, mapped by parent and children after the fork
with PssSampler(interval=0.05) as sampler:
    before = sampler.sample()
    events = [(context.Event(), context.Event()) for _ in range(2)]
    children = [context.Process(target=allocate, args=(40 << 20, *pair)) for pair in events]
    for child in children:
        child.start()
    assert all(ready.wait(30) for ready, _ in events)
    grown = sampler.sample() - before
    rss = sum(int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) * 4096 for child in children)
    for _, release in events:
        release.set()
    for child in children:
        child.join(30)
print(json.dumps({"method": sampler.method, "before": before, "grown": grown, "rss": rss, "peak": sampler.peak,
                  "current": sampler.current, "shared": len(shared)}))
"""


def test_pss_counts_children_and_shared_pages_once() -> None:
    ended = subprocess.run([sys.executable, "-c", _TREE], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert seen["method"] == "pss"
    assert 75 << 20 < seen["grown"] < 100 << 20  # two of 40 MiB; the shared 60 MiB are not counted again
    assert seen["rss"] > (2 * 95) << 20  # as RSS would
    assert seen["peak"] >= seen["before"] + seen["grown"] and seen["current"] < seen["before"] + (20 << 20)


def test_memory_of_absent_processes_and_systems(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert tree_memory(child.pid) == ({}, {}, True)
    with pytest.raises(psutil.NoSuchProcess):
        read_pss(child.pid)
    monkeypatch.setattr("instep.observability.memory.read_pss", lambda pid: None)
    with caplog.at_level(logging.WARNING), PssSampler(interval=0.01) as sampler:
        time.sleep(0.1)
    assert sampler.method == "rss" and sampler.peak > 1 << 20
    assert len([r for r in caplog.records if "RSS" in r.message]) == 1


def test_memory_is_that_of_the_nearest_owner() -> None:
    words = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])"]
    with subprocess.Popen(words) as child:
        tree = psutil.Process(child.pid)
        while not tree.children():
            time.sleep(0.01)
        sampler = PssSampler()
        sampler.sample()
        owned = sampler.by_owner([child.pid])
        (grandchild,) = tree.children()
        assert sum(owned.values()) == sampler.current and owned.keys() == {os.getpid(), child.pid}
        both = sampler.by_owner([child.pid, grandchild.pid])
        assert both[child.pid] + both[grandchild.pid] == owned[child.pid] > both[grandchild.pid] > 0
        grandchild.kill()


def test_a_slow_sample_keeps_no_reader_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, began, go_on = PssSampler(), threading.Event(), threading.Event()
    before = sampler.sample()

    def slow(pid: int) -> int:
        began.set()
        go_on.wait(20)
        return 1

    monkeypatch.setattr("instep.observability.memory.read_pss", slow)
    thread = threading.Thread(target=sampler.sample)
    thread.start()
    assert began.wait(20) and sum(sampler.by_owner([]).values()) == before and thread.is_alive()
    go_on.set()
    thread.join()
    assert sampler.by_owner([])[os.getpid()] == sampler.current < before


@pytest.mark.alone
def test_sampler_uses_little_time() -> None:
    with PssSampler(interval=0.001) as sampler:
        start, cpu = time.perf_counter(), time.process_time()
        time.sleep(1.0)
        share = (time.process_time() - cpu) / (time.perf_counter() - start)
    assert sampler.peak > 0 and share < 0.10


# Versions


def test_versions_and_git_state(tmp_path: Path) -> None:
    import torch

    found = versions()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0] and found["python"].startswith("3.")
    assert "vllm" not in found or found["vllm"]
    assert found["cpu_count"] >= 1
    assert git_state(tmp_path) == (None, None)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "f").write_text("1")
    subprocess.run([*git, "add", "f"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    commit, dirty = git_state(tmp_path)
    assert commit is not None and len(commit) == 40 and dirty is False
    (tmp_path / "f").write_text("2")
    assert git_state(tmp_path) == (commit, True)
