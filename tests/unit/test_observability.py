"""Metrics, files, TensorBoard, W&B, progress, memory, report: all run for real."""

from __future__ import annotations

import io
import json
import logging
import math
import multiprocessing
import os
import pty
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from instep.errors import ConfigError
from instep.observability.memory import PssSampler, read_pss, tree_memory
from instep.observability.metrics import rollout_metrics, sample_reward
from instep.observability.progress import Progress, duration, number, sparkline
from instep.observability.run_logger import RunLogger
from instep.observability.sinks import read_json_lines, without_secrets, write_json
from instep.observability.versions import git_state, versions
from instep.types import Sample, Status, VersionSpan


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=100)


def make_groups(num_groups: int = 2, size: int = 3, seed: int = 0) -> list[list[Sample]]:
    rng = random.Random(seed)
    return [
        [
            Sample(
                group_index=g,
                index=g * size + i,
                prompt=[{"role": "user", "content": f"{g} + {i} < <b>?"}],
                response=f"answer {g + i}",
                response_length=rng.randint(3, 30),
                reward=rng.random(),
                status=rng.choice([Status.COMPLETED, Status.TRUNCATED]),
                weight_versions=[VersionSpan("4", 0, 3)],
            )
            for i in range(size)
        ]
        for g in range(num_groups)
    ]


def run(folder: Path, **kwargs) -> RunLogger:
    options = {"title": "a run", "num_steps": 4, "console": plain_console(), **kwargs}
    return RunLogger(folder, options.pop("args_dict", {"lr": 0.1}), **options)


# Metrics


def test_rollout_metrics_against_statistics() -> None:
    groups = make_groups(5, 4)
    for sample in groups[2]:
        sample.reward = 0.25
    samples = [s for g in groups for s in g]
    rewards, lengths = [s.reward for s in samples], [s.response_length for s in samples]
    metrics = rollout_metrics(groups, num_dropped_groups=3)
    assert metrics["rollout/reward_mean"] == pytest.approx(statistics.fmean(rewards), abs=1e-12)
    assert metrics["rollout/reward_std"] == pytest.approx(statistics.pstdev(rewards), abs=1e-12)
    assert metrics["rollout/response_length_mean"] == statistics.fmean(lengths)
    assert metrics["rollout/response_length_max"] == max(lengths)
    assert metrics["rollout/truncated_ratio"] == sum(s.truncated for s in samples) / 20
    assert metrics["rollout/zero_std_groups_ratio"] == 1 / 5
    assert metrics["rollout/num_dropped_groups"] == 3


def test_rollout_metrics_leave_out_what_is_unknown() -> None:
    assert rollout_metrics([]) == {"rollout/num_dropped_groups": 0.0}
    no_reward = rollout_metrics([[Sample(response_length=4, status=Status.COMPLETED)]])
    assert not {name for name in no_reward if "reward" in name or "zero_std" in name}
    assert no_reward["rollout/response_length_mean"] == 4.0
    one_each = [[Sample(reward=1.0, response_length=1)], [Sample(reward=0.0, response_length=1)]]
    assert "rollout/zero_std_groups_ratio" not in rollout_metrics(one_each)


def test_dict_rewards_need_their_key() -> None:
    sample = Sample(reward={"score": 0.5, "format": 1}, index=7, group_index=3)
    assert sample_reward(sample, "score") == 0.5
    assert rollout_metrics([[sample]], reward_key="format")["rollout/reward_mean"] == 1.0
    for key in (None, "socre"):
        with pytest.raises(ConfigError, match="format.*score") as error:
            rollout_metrics([[sample]], reward_key=key)
        assert "sample 7 of group 3" in str(error.value)


# Files


def test_metrics_file_holds_each_row_at_once_and_null_for_nan(tmp_path: Path) -> None:
    with run(tmp_path) as log:
        log.log(0, {"train/loss": 0.5, "train/engine_kl": math.nan, "train/lr": math.inf, "train/n": np.float32(2)})
        text = (tmp_path / "metrics.jsonl").read_text()  # before closing: a crash loses nothing
        assert "NaN" not in text and "Infinity" not in text
        row = json.loads(text)
        assert abs(row.pop("time") - time.time()) < 60
        assert row == {"step": 0, "train/loss": 0.5, "train/engine_kl": None, "train/lr": None, "train/n": 2.0}
        with pytest.raises(ValueError):
            log.log(1, {"train/loss": "much"})


def test_resume_cuts_the_rows_from_its_step_on(tmp_path: Path) -> None:
    with run(tmp_path) as log:
        for step in range(4):
            log.log(step, {"train/loss": float(step)})
            log.samples(step, make_groups(), "train", 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/lo')  # the crash came in the middle of a line
    with run(tmp_path, resume_from_step=2) as log:
        assert log.progress.steps_done == 2
        log.log(2, {"train/loss": 20.0})
        log.samples(2, make_groups(), "train", 1)
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["train/loss"]) for row in rows] == [(0, 0.0), (1, 1.0), (2, 20.0)]
    assert [row["rollout_id"] for row in read_json_lines(tmp_path / "samples.jsonl")] == [0, 1, 2]
    with run(tmp_path):
        pass
    assert read_json_lines(tmp_path / "metrics.jsonl") == []  # no resume: begins anew


def test_broken_row_inside_a_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(json.JSONDecodeError):
        read_json_lines(path)


def test_samples_are_spread_over_groups(tmp_path: Path) -> None:
    with run(tmp_path) as log:
        log.samples(6, make_groups(3, 4), "eval", 5)
    rows = read_json_lines(tmp_path / "samples.jsonl")
    assert [(row["group_index"], row["index"]) for row in rows] == [(0, 0), (1, 4), (2, 8), (0, 1), (1, 5)]
    assert {(row["rollout_id"], row["split"]) for row in rows} == {(6, "eval")}
    assert rows[0]["prompt"][0]["content"] == "0 + 0 < <b>?" and rows[0]["weight_versions"] == ["4"]


def test_write_json_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": math.nan, "b": Path("x"), "c": [Status.COMPLETED]})
    assert json.loads(path.read_text()) == {"a": None, "b": "x", "c": ["completed"]}
    recursive: dict = {}
    recursive["self"] = recursive
    with pytest.raises(RecursionError):
        write_json(path, recursive)
    assert json.loads(path.read_text())["b"] == "x"


def test_no_secret_is_saved(tmp_path: Path) -> None:
    args = {
        "wandb_key": "s3cret",
        "env": {"WANDB_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "OMP_NUM_THREADS": "2"},
        "items": [{"password": "s3cret"}],
        "label_key": "label",
        "apply_chat_template": True,
        "reward_key": "score",
        "num_token": 3,
    }
    clean = without_secrets(args)
    assert clean["env"] == {"OMP_NUM_THREADS": "2"} and clean["items"] == [{}]
    assert {"label_key", "reward_key", "num_token", "apply_chat_template"} <= set(clean)
    with run(tmp_path, args_dict=args) as log:
        log.log(0, {"train/loss": 1.0})
        log.finish({"eval_reward_after": 1.0})
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"s3cret" not in path.read_bytes(), path


# TensorBoard and W&B


def read_events(folder: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}


def test_tensorboard_events_read_back(tmp_path: Path) -> None:
    with run(tmp_path) as log:
        for step in range(4):
            log.log(step, {"train/loss": step / 4, "rollout/reward_mean": 1.0 - step})
        assert read_events(tmp_path / "tensorboard")[("train/loss", 3)] == 0.75  # flushed before closing
    with run(tmp_path, resume_from_step=2) as log:
        log.log(2, {"train/loss": 9.0})
    losses = {step: v for (tag, step), v in read_events(tmp_path / "tensorboard").items() if tag == "train/loss"}
    assert losses == {0: 0.0, 1: 0.25, 2: 9.0}
    with run(tmp_path) as log:
        log.log(0, {"train/loss": 5.0})
    assert read_events(tmp_path / "tensorboard") == {("train/loss", 0): 5.0}
    with run(tmp_path / "without", use_tensorboard=False) as log:
        log.log(0, {"train/loss": 5.0})
    assert not (tmp_path / "without" / "tensorboard").exists()


def test_tensorboard_writer_needs_no_torch() -> None:
    code = (
        "import sys, tempfile, pathlib\n"
        "from instep.observability.run_logger import RunLogger\n"
        "with RunLogger(pathlib.Path(tempfile.mkdtemp()), {}, title='t', num_steps=1) as log:\n"
        "    log.log(0, {'train/loss': 1.0})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    options = {"project": "step", "group": "night", "mode": "offline", "team": "crew", "run_id": "abc123"}
    with run(tmp_path / "run", wandb=options, args_dict={"lr": 0.125, "wandb_key": "s3cret"}) as log:
        assert log.wandb_run_id == "abc123"
        log.log(0, {"train/loss": 0.5})
        log.log(1, {"train/loss": math.nan, "rollout/reward_mean": 0.75})
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*-abc123/run-abc123.wandb"))
    assert len(files) == 1
    records, deadline = read_wandb(files[0]), time.monotonic() + 20
    while not any(r.WhichOneof("record_type") == "exit" for r in records) and time.monotonic() < deadline:
        time.sleep(0.01)  # wandb's own process writes the file some milliseconds after `finish` returned
        records = read_wandb(files[0])
    opened = next(r.run for r in records if r.WhichOneof("record_type") == "run")
    assert (opened.project, opened.run_group, opened.entity, opened.run_id) == ("step", "night", "crew", "abc123")
    config = {item.key: json.loads(item.value_json) for item in opened.config.update}
    assert config["lr"] == 0.125 and "wandb_key" not in config
    history = [
        {(i.key or "/".join(i.nested_key)): i.value_json for i in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    assert [(h["step"], h["train/loss"]) for h in history] == [("0", "0.5"), ("1", "NaN")]
    assert history[1]["rollout/reward_mean"] == "0.75"
    for path in (tmp_path / "run").rglob("*"):
        data = b"" if path.is_dir() else path.read_bytes()
        assert b"s3cret" not in data and b"0123456789" * 4 not in data, path


def read_wandb(path: Path) -> list:
    """The records of an offline run's file: blocks of 32 KiB of chunks of crc (4 bytes), length (2), type (1), data.

    Types: 1 a whole record, 2 its first chunk, 3 a middle one, 4 the last.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, parts, records = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def test_wandb_takes_no_key_and_no_unknown_option(tmp_path: Path) -> None:
    for options in ({"key": "s3cret"}, {"projcet": "x"}):
        with pytest.raises(ConfigError, match="unknown W&B options") as error:
            run(tmp_path, wandb=options)
        assert "WANDB_API_KEY" in str(error.value) and "s3cret" not in str(error.value)


# Phases and progress


def test_plain_progress_is_one_line_per_step_and_new_phase(tmp_path: Path) -> None:
    console = plain_console()
    with run(tmp_path, console=console) as log:
        log.log(0, {"eval/arith/reward_mean": 0.4, "eval/arith/response_length_mean": 20.0})
        for step in range(2):
            with log.phase("rollout"):
                log.status("groups 1/2")
            log.log(step, {"rollout/reward_mean": 0.5 + step / 10, "perf/rollout_tokens_per_second": 1234.0})
    lines = [re.sub(r"^[\d:]+ \| ", "", line) for line in console.file.getvalue().splitlines()]
    assert lines == [
        "eval arith: reward 0.400, length 20.0, after 0 steps",
        "rollout",
        "step 1/4  reward 0.500  rollout tok/s 1,234  left 00:00",
        "step 2/4  reward 0.600  rollout tok/s 1,234  left 00:00",
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
        with log.phase("rollout"):
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
    assert any("step 2/3" in line and "rollout" in line for line in lines)
    assert any(line.startswith("\u2502 reward") and "0.500" in line for line in lines)
    if mode == "finish":
        assert any("eval_reward_after" in line and "0.7500" in line for line in lines)
        assert any("2.50 GB" in line for line in lines)
        assert lines[-2:] == [f"report: {tmp_path / 'report.html'}", ""]
    else:
        error = {"raise": "ValueError", "wait": "KeyboardInterrupt"}[mode]
        assert f"stopped in phase rollout, step 2/3: {error}" in lines
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


def _allocate(num_bytes: int, ready, release) -> None:
    block = bytearray(os.urandom(1024) * (num_bytes // 1024))
    ready.set()
    release.wait(60)
    del block


def test_pss_counts_children_and_shared_pages_once() -> None:
    context = multiprocessing.get_context("fork")
    shared = bytearray(os.urandom(1024) * (60 * 1024))  # 60 MiB, mapped by parent and children after the fork
    with PssSampler(interval=0.05) as sampler:
        assert sampler.method == "pss"
        before = sampler.sample()
        events = [(context.Event(), context.Event()) for _ in range(2)]
        children = [context.Process(target=_allocate, args=(40 << 20, *pair)) for pair in events]
        for child in children:
            child.start()
        try:
            assert all(ready.wait(30) for ready, _ in events)
            grown = sampler.sample() - before
            rss_sum = sum(int(Path(f"/proc/{p.pid}/statm").read_text().split()[1]) * 4096 for p in children)
        finally:
            for _, release in events:
                release.set()
            for child in children:
                child.join(30)
        assert 75 << 20 < grown < 115 << 20  # two of 40 MiB; the shared 60 MiB are not counted again
        assert rss_sum > (2 * 100) << 20  # as RSS would
    assert sampler.peak >= before + grown and sampler.current < before + (20 << 20)
    assert len(shared) == 60 << 20


def test_memory_of_absent_processes_and_systems(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert tree_memory(child.pid) == (0, True)
    with pytest.raises(ProcessLookupError):
        read_pss(child.pid)
    monkeypatch.setattr("instep.observability.memory.read_pss", lambda pid: None)
    with caplog.at_level(logging.WARNING), PssSampler(interval=0.01) as sampler:
        time.sleep(0.1)
    assert sampler.method == "rss" and sampler.peak > 1 << 20
    assert len([r for r in caplog.records if "RSS" in r.message]) == 1


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
